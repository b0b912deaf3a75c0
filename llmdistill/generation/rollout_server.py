"""Answers of the student by a vLLM server, to which its weights are handed over while it is trained.

The weights travel as a folder that trainer and server both see. What loads them there is `generation.vllm_worker`.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from llmdistill.errors import UserError
from llmdistill.generation.model_server import ModelServer, describe_error
from llmdistill.generation.rollout import Prompt, WrittenAnswer
from llmdistill.runtime.distributed import on_every, on_main

_REQUESTS = 64
"""Requests that a rank has under way at the same time: vLLM answers them together."""
_TRIES = 30
"""How often a run tells the server to clear its cache, a second apart."""
_STAMP_REQUEST = {"method": "weights_stamp"}


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

    def ask(self, prompt: Prompt) -> Future[WrittenAnswer]:
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
        return self._server.complete(body, self._parse_answer, what=what, remedy=remedy)

    def _parse_answer(self, answer: Any) -> WrittenAnswer:
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
                f"{self._server.name}: it names the token {max(written.ids)}, and the student has {self._vocabulary}: "
                "serve the untrained student of this run"
            )
        return written


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
        while True:
            futures = [[self.server.ask(prompt) for prompt in prompts] for prompts in micro_batches]
            # A UserError of one rank stops all of them.
            written = on_every(partial(_collect, futures))
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


def _collect(futures: Sequence[Sequence[Future[WrittenAnswer]]]) -> list[list[WrittenAnswer]]:
    return [[future.result() for future in of_batch] for of_batch in futures]
