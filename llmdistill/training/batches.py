"""Where the batches of a training come from: from the data as they are, or with answers that the student writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from llmdistill.batch import Batch, HeadInputs, Loader
from llmdistill.data.prompts import answer_ends
from llmdistill.data.sampler import PrefetchingLoader
from llmdistill.generation.rollout import OnPolicyLoader, StudentWriter, Writer
from llmdistill.generation.rollout_server import RolloutServer, ServerWriter
from llmdistill.losses.agreement import count_shared, log_probs_of, top_tokens
from llmdistill.report.metrics_log import TOP_SHARED, WRITER_GAP
from llmdistill.runtime.distributed import World, all_reduce_sum
from llmdistill.step.teacher import AsyncTeacher, RequestingLoader, Teacher
from llmdistill.training.callbacks.base import Callback, TrainState
from llmdistill.training.plan import Plan
from llmdistill.training.trainer import Trainer

_K = 10  # the ten of TOP_SHARED


@dataclass(frozen=True, kw_only=True)
class LoaderParts:
    """What the loader of the training loop is made from."""

    loader: Any
    """That of the data; a `StepLoader` if the student answers its prompts."""
    teacher: Teacher | None
    engine: Any
    """The student's."""
    tokenizer: PreTrainedTokenizerBase
    save: Callable[[Path], None]
    """Saves the engine's student in a folder; every rank must call it."""


class BatchSource(Protocol):
    """Where the batches of a run come from, and what else the run needs for that."""

    def describe(self) -> str:
        """Return what the first lines of the run add to its data."""
        ...

    def check_there(self) -> None:
        """Raise a UserError if a server that makes the batches is not there, or is another one than is needed."""
        ...

    @property
    def asks_server(self) -> bool:
        """Whether a server takes part in making the batches."""
        ...

    @property
    def student_copy(self) -> Path | None:
        """A folder in that of the run, with a copy of the student that is only needed during the training."""
        ...

    def make_loader(self, parts: LoaderParts) -> Loader:
        """Return the loader of the training loop; a teacher that answers later gets a batch as soon as it is made."""
        ...

    def callbacks(self, trainer: Trainer) -> list[Callback]:
        """Return the callbacks that watch how good the batches are."""
        ...


def batch_source(plan: Plan) -> BatchSource:
    """Return where the batches of a run come from."""
    return DataBatches(plan) if plan.config.data.on_policy == 0 else StudentBatches(plan)


@dataclass(frozen=True)
class DataBatches:
    """The data as they are: a thread prepares the batches of the next step."""

    plan: Plan
    asks_server: ClassVar[bool] = False
    student_copy: ClassVar[None] = None

    def describe(self) -> str:
        """See BatchSource."""
        return ""

    def check_there(self) -> None:
        """See BatchSource."""

    def make_loader(self, parts: LoaderParts) -> Loader:
        """See BatchSource."""
        config, device = self.plan.config, World.current().device
        # The matrix units of a GPU work on tiles, and a kernel that is compiled for a length is used again.
        multiple = config.data.pad_to_multiple_of or (64 if device.type == "cuda" else 1)

        def prepare(batch: Batch) -> Batch:
            return batch.pad_to_multiple(multiple, config.data.max_length).with_positions(shift=self.plan.method.shift)

        requesting = _with_requests(parts.loader, parts.teacher)
        return PrefetchingLoader(requesting, steps=config.train.steps, device=device, prepare=prepare)

    def callbacks(self, trainer: Trainer) -> list[Callback]:
        """See BatchSource."""
        return []


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

    def check_there(self) -> None:
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
        return _with_requests(answered, parts.teacher)

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


def _with_requests(loader: Loader, teacher: Teacher | None) -> Loader:
    return RequestingLoader(loader, teacher.request) if isinstance(teacher, AsyncTeacher) else loader


@dataclass(frozen=True)
class OwnAnswers:
    """Compares, for each row of the log, the models on the first micro batch of the next step.

    `top_10_shared` is the share of the student's ten most likely tokens that are among the teacher's ten; `writer_gap`
    the mean difference of a token's log-probabilities in the student and in the server that wrote it.

    On it the student is still the one that has written the answers, or that was handed over to what has.
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
