"""Answers that the student writes during training (GKD, Agarwal et al. 2024): by itself, or by a vLLM server.

The weights travel to the server as a folder that trainer and server both see. What loads them there is
`generation.vllm_worker`.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol
from urllib.error import HTTPError

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel

from llmdistill.batch import Batch, HeadInputs, Loader
from llmdistill.data.collate import Encoded, collate
from llmdistill.data.prompts import answer_ends
from llmdistill.data.random_streams import ANSWER, STEP_KIND
from llmdistill.data.sampler import StepLoader
from llmdistill.errors import UserError
from llmdistill.generation.decode import inference, new_tokens
from llmdistill.generation.model_server import ModelServer, describe_error
from llmdistill.generation.row_draws import RowDraws
from llmdistill.losses.agreement import count_shared, log_probs_of, top_tokens
from llmdistill.report.metrics_log import TOP_SHARED, WRITER_GAP
from llmdistill.runtime.distributed import World, all_reduce_sum, on_every, on_main
from llmdistill.step.teacher import with_requests
from llmdistill.training.batch_source import LoaderParts
from llmdistill.training.callbacks.base import Callback, TrainState
from llmdistill.training.plan import Plan
from llmdistill.training.trainer import Trainer

_K = 10  # the ten of TOP_SHARED
_REQUESTS = 64
"""Requests that a rank sends at the same time: vLLM answers them together."""
_TRIES = 30
"""How often a run tells the server to clear its cache, a second apart."""
_STAMP_REQUEST = {"method": "weights_stamp"}


@dataclass(frozen=True)
class StudentBatches:
    """The prompts of the data, which in some steps the student answers (data.on_policy), or a server for it."""

    plan: Plan

    def describe(self) -> str:
        """See BatchSource."""
        return f"; the student writes {self.plan.config.data.on_policy:.0%} of it"

    @property
    def asks_server(self) -> bool:
        """See BatchSource."""
        return self.plan.config.data.rollout.url is not None

    @property
    def student_copy(self) -> Path | None:
        """See BatchSource: the weights that the server has."""
        return self.plan.folder / "handed-over" if self.asks_server else None

    def check_available(self) -> None:
        """See BatchSource."""
        if self.asks_server:
            # The check needs neither the end tokens nor the vocabulary.
            self._server([], 0).check(self.plan.config.data.max_length)

    def make_loader(self, parts: LoaderParts) -> Loader:
        """See BatchSource."""
        data, engine, padding = self.plan.config.data, parts.engine, parts.tokenizer.pad_token_id
        ends = answer_ends(parts.tokenizer, engine.module.generation_config)
        writer: Writer
        if self.student_copy is None:
            writer = StudentWriter(
                engine.module,
                max_new_tokens=data.max_length - data.max_prompt_length,
                end_token_ids=ends,
                pad_token_id=padding,
                # ZeRO-3 gathers parameters in each forward pass, so the ranks write equally many tokens.
                synced=engine.zero_optimization_stage() == 3,
            )
        else:
            server = self._server(ends, engine.module.config.vocab_size)
            writer = ServerWriter(server, parts.save, folder=self.student_copy, every=data.rollout.every)
        # Not a step ahead, as of data: the student answers with the weights that the step before has left.
        answered = OnPolicyLoader(parts.loader, writer, on_policy=data.on_policy, pad_token_id=padding)
        return with_requests(answered, parts.teacher)

    def callbacks(self, trainer: Trainer) -> list[Callback]:
        """See BatchSource."""
        return [OwnAnswers(trainer, self.plan.models.vocabulary)]

    def _server(self, end_token_ids: list[int], vocabulary: int) -> RolloutServer:
        """Return the client of the server that writes the student's answers."""
        data = self.plan.config.data
        assert data.rollout.url is not None
        return RolloutServer(
            data.rollout.url,
            vocabulary=vocabulary,
            max_new_tokens=data.max_length - data.max_prompt_length,
            end_token_ids=end_token_ids,
            wait=data.rollout.wait,
        )


class Prompt(NamedTuple):
    """A prompt to answer, and the seed of the random numbers of its answer."""

    ids: list[int]
    seed: int


class WrittenAnswer(NamedTuple):
    """An answer, with its end token if it has one."""

    ids: list[int]
    log_probs: list[float]
    """Of each token, under the model that wrote it; empty if unknown."""


class Writer(Protocol):
    """Writes the answers of the student: samples of its distribution at temperature 1."""

    def write(self, step: int, micro_batches: Sequence[Sequence[Prompt]]) -> list[list[WrittenAnswer]]:
        """Return the answers of a step (from 0) to this rank's prompts. Every rank must call this function."""
        ...


@dataclass(frozen=True)
class OnPolicyLoader:
    """A loader that replaces the answers of some steps by answers that the current student generates.

    The choice of these steps and the random numbers of every answer depend only on the seed, the step and the
    example's index in the global batch, so they are the same on any number of ranks and in a resumed run.
    """

    loader: StepLoader[Encoded]
    writer: Writer
    on_policy: float
    """λ: the probability that a step is on-policy."""
    pad_token_id: int

    def is_on_policy(self, step: int) -> bool:
        """Return whether the student generates the answers of this step, on every rank."""
        return bool(np.random.default_rng((self.loader.share.seed, step, STEP_KIND)).random() < self.on_policy)

    def micro_batches(self, step: int) -> list[Batch]:
        """Return this rank's micro batches of a step."""
        if not self.is_on_policy(step):
            return self.loader.micro_batches(step)
        share, micro_batches = self.loader.share, self.loader.micro_batch_items(step)
        prompts: list[list[Prompt]] = []
        for number, items in enumerate(micro_batches):
            # The index in the global batch, so that a row's random numbers do not depend on the number of ranks.
            first_row = (number * share.world_size + share.rank) * len(items)
            prompts.append([])
            for row, item in enumerate(items, first_row):
                [state] = np.random.SeedSequence((share.seed, step, row, ANSWER)).generate_state(1, np.uint64)
                prompts[-1].append(Prompt(item.last_prompt, int(state >> np.uint64(1))))  # 63 bits fit into int64
        batches = []
        for items, written in zip(micro_batches, self.writer.write(step, prompts), strict=True):
            # The prompt of the student's answer is the last one of the example, without the turns of the data after it.
            answered = [
                Encoded(item.last_prompt, answer.ids, item.teacher) for item, answer in zip(items, written, strict=True)
            ]
            log_probs = torch.tensor([value for answer in written for value in answer.log_probs])
            batches.append(
                replace(
                    collate(answered, self.pad_token_id),
                    labels_are="samples",
                    written_log_probs=log_probs if len(log_probs) else None,
                )
            )
        return batches


@dataclass(frozen=True)
class StudentWriter:
    """The student itself, by transformers' generate: a micro batch at once, on a GPU more if its memory holds them."""

    model: PreTrainedModel
    """The student that is trained."""
    max_new_tokens: int
    end_token_ids: list[int]
    pad_token_id: int
    synced: bool
    """Whether every rank must take part in each forward pass (ZeRO-3)."""

    def write(self, step: int, micro_batches: Sequence[Sequence[Prompt]]) -> list[list[WrittenAnswer]]:
        """See Writer."""
        sizes = [len(prompts) for prompts in micro_batches]
        # The rows of all micro batches take each other's places. ZeRO-3 needs all ranks in each batch.
        groups, at_once = micro_batches, None
        if not self.synced:
            groups, at_once = [[prompt for prompts in micro_batches for prompt in prompts]], max(sizes)
        written = iter([answer for prompts in groups for answer in self._generate(prompts, at_once)])
        return [[next(written) for _ in range(size)] for size in sizes]

    @torch.no_grad()
    def _generate(self, prompts: Sequence[Prompt], at_once: int | None) -> list[WrittenAnswer]:
        model = self.model
        settings = GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            do_sample=False,  # RowDraws leaves only the token that it drew
            eos_token_id=self.end_token_ids,
            pad_token_id=self.pad_token_id,
        )
        draws = RowDraws([prompt.seed for prompt in prompts])
        ids = [prompt.ids for prompt in prompts]
        with inference(model, settings):
            rows = dict(new_tokens(model, ids, settings, at_once=at_once, draws=draws))
        return [WrittenAnswer(rows[row], []) for row in range(len(prompts))]


class RolloutServer:
    """A server that has a model with the student's shapes, as its client sees it."""

    def __init__(
        self, url: str, *, vocabulary: int, max_new_tokens: int, end_token_ids: Sequence[int], wait: float
    ) -> None:
        """Store the settings; nothing is sent yet. `url` and `wait` are as for `ModelServer`.

        Args:
            vocabulary: the number of the student's tokens.
            max_new_tokens: the largest number of tokens of an answer.
            end_token_ids: the tokens that end an answer, and are its last.
        """
        self._server = ModelServer(url, key="data.rollout.url", wait=wait, requests=_REQUESTS)
        self._vocabulary, self._longest, self._ends = vocabulary, max_new_tokens, list(end_token_ids)

    def check(self, longest: int) -> None:
        """Raise a UserError if the server is not there, reads fewer tokens than `longest`, or cannot take weights."""
        start = (
            "start it with `VLLM_SERVER_DEV_MODE=1 vllm serve STUDENT --worker-extension-cls "
            "llmdistill.generation.vllm_worker.StudentWeights`"
        )
        models = self._server.models(f"{start}, or correct the url")
        if not models:
            raise UserError(f"{self._server.name}: it serves no model; {start}")
        self._server.check_room(next(iter(models.values())), longest)
        try:
            self._server.send("/collective_rpc", _STAMP_REQUEST)
        except HTTPError as error:
            reason = describe_error(error)
            raise UserError(f"{self._server.name}: it does not take weights ({reason}); {start}") from error

    def stamp(self) -> str | None:
        """Return the stamp of the server's weights; None if it has received none since its start."""
        what, remedy = "to say which weights it has", "start it as docs/methods.md says"
        answer = self._server.insist("/collective_rpc", _STAMP_REQUEST, what=what, remedy=remedy)
        return next(iter(answer["results"]))

    def take_weights(self, folder: Path, stamp: str) -> None:
        """Have the server load the weights of a folder; raises as `ModelServer.complete` does."""
        # The server may run in another folder.
        body = {"method": "take_weights", "args": [str(folder.absolute()), stamp]}
        remedy = "let it see this folder, and serve the untrained student of this run, or one with the same shapes"
        what = f"the weights in {folder.absolute()}"
        # It answers 500 if it cannot read them, and a repetition would not help; hence 501.
        self._server.insist("/collective_rpc", body, what=what, remedy=remedy, final=501)
        # The prefix cache holds keys and values of the old weights. vLLM refuses to clear it while requests run.
        for _ in range(_TRIES):
            answer = self._server.insist("/reset_prefix_cache", {}, what="to forget its cache", remedy=remedy)
            if not isinstance(answer, dict) or answer.get("success", True):
                return
            time.sleep(1)
        raise UserError(f"{self._server.name}: it goes on answering others; give the run a server of its own")

    def request(self, prompt: Prompt) -> Future[WrittenAnswer]:
        """Request an answer; the future raises as `ModelServer.complete` does."""
        body = {
            "prompt": prompt.ids,
            "max_tokens": self._longest,
            "seed": prompt.seed,
            # The student's own distribution, without the defaults of the server or of its generation_config.json.
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": self._ends,
            # The ends are those of `stop_token_ids`, and not of the served folder.
            "ignore_eos": True,
            "logprobs": 0,  # of the sampled token, without alternatives
            "return_token_ids": True,
        }
        what, remedy = f"a prompt of {len(prompt.ids)} tokens", "serve the untrained student of this run"

        def parse(answer: Any) -> WrittenAnswer:
            try:
                choice = answer["choices"][0]
                ids, log_probs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
                written = WrittenAnswer([int(token) for token in ids], [float(value) for value in log_probs])
            except (KeyError, IndexError, TypeError, ValueError):
                written = WrittenAnswer([], [])
            if not 0 < len(written.ids) == len(written.log_probs) <= self._longest:
                raise UserError(
                    f"{self._server.name}: it does not give the 1 to {self._longest} tokens of an answer with the "
                    "log-probability of each (return_token_ids and logprobs, as vLLM does): take a server that does"
                )
            if not 0 <= min(written.ids) <= max(written.ids) < self._vocabulary:
                raise UserError(
                    f"{self._server.name}: it names the token {max(written.ids)}, and the student has "
                    f"{self._vocabulary}: {remedy}"
                )
            return written

        return self._server.complete(body, parse, what=what, remedy=remedy)


@dataclass
class ServerWriter:
    """Writes answers by a server, with the weights of the student as they were at most some steps ago."""

    server: RolloutServer
    save: Callable[[Path], None]
    """Saves the student in a folder; every rank must call it."""
    folder: Path
    every: int
    """The number of steps in a period; the weights are sent in the first on-policy step of each period."""
    _period: int | None = field(default=None, init=False)
    _stamp: str | None = field(default=None, init=False)

    def write(self, step: int, micro_batches: Sequence[Sequence[Prompt]]) -> list[list[WrittenAnswer]]:
        """See Writer; raises a UserError, on every rank, as `RolloutServer` does."""
        if self._period != step // self.every:
            self._send_weights()
        self._period = step // self.every

        def answers() -> list[list[WrittenAnswer]]:
            futures = [[self.server.request(prompt) for prompt in prompts] for prompts in micro_batches]
            return [[future.result() for future in of_batch] for of_batch in futures]

        while True:
            written = on_every(answers)  # a UserError of one rank stops all of them
            # After the answers: a server that was restarted in between has lost its stamp.
            stamp = on_main(self.server.stamp)
            if stamp == self._stamp:
                return written
            if stamp is not None:
                raise UserError(
                    "data.rollout.url: another training has handed its weights to this server: give each a server of "
                    "its own"
                )
            self._send_weights()  # the server was restarted, and has answered with the weights of its start

    def _send_weights(self) -> None:
        on_main(lambda: shutil.rmtree(self.folder, ignore_errors=True))
        self.save(self.folder)
        self._stamp = on_main(lambda: uuid.uuid4().hex)  # the same on every rank
        on_main(lambda: self.server.take_weights(self.folder, str(self._stamp)))


@dataclass(frozen=True)
class OwnAnswers:
    """Compares, for each row of the log, the models on the first micro batch of the next step.

    `top_10_shared` is the share of the student's ten most likely tokens that are among the teacher's ten; `writer_gap`
    the mean difference of a token's log-probabilities in the student and in the server that wrote it.

    The student is still the one that wrote the answers of this batch, or whose weights the server has.
    """

    reads: ClassVar[tuple[str, ...]] = ("settings", "step", "failure")
    gives: ClassVar[tuple[str, ...]] = ("measures",)

    trainer: Trainer
    vocabulary: int | None
    """Only so many logits of each model are compared; None compares all."""

    def after_step(self, state: TrainState) -> None:
        """See Callback. Every rank must call it."""
        if state.is_last or state.failure is not None or not state.is_due(state.settings.log_every):
            return
        batch, *_ = self.trainer.micro_batches(state.step)
        if batch.labels_are != "samples":
            return
        trainer, moved = self.trainer, self.trainer.to_device(batch)
        labels_N, written_N = moved.row_labels(shift=trainer.student.shift), moved.written_log_probs
        # Labels, shared tokens, and differences of log-probabilities.
        sums = torch.zeros(3, dtype=torch.float64, device=World.current().device)
        trainer.engine.eval()
        with torch.no_grad():
            teacher = trainer.compute_targets(moved)
            targets = None if teacher is None else teacher.lm_head.get("labels")
            top_Nk = None if targets is None else top_tokens(targets, _K, self.vocabulary)

            def compare(head: HeadInputs) -> None:
                sums[0] = len(labels_N)
                if top_Nk is not None:
                    sums[1] = count_shared(head, top_Nk, self.vocabulary)
                if written_N is not None:
                    sums[2] = (log_probs_of(head, labels_N) - written_N).abs().sum()

            trainer.student.inspect_head(moved, compare)
        trainer.engine.train()
        count, shared, gap = all_reduce_sum(sums).tolist()
        if top_Nk is not None:
            state.measures[TOP_SHARED] = shared / (_K * count)
        if written_N is not None:
            state.measures[WRITER_GAP] = gap / count
