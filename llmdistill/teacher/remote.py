"""A teacher behind a server that speaks OpenAI's protocol: sequences are asked about over HTTP, ahead of their step.

A completion of one token is asked for each sequence, with `prompt_logprobs`, which vLLM adds to the protocol: the most
likely tokens in the place of each token of the prompt.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

import torch
from torch import Tensor

from llmdistill.batch import Batch, Loader, Outputs, Positions, TopK
from llmdistill.errors import TeacherLost, UserError
from llmdistill.generation.vllm_engine import to_top_k
from llmdistill.runtime import signals
from llmdistill.teacher.rows import Request, to_outputs, top_rows

_REQUESTS = 16
"""Requests that a rank has under way at the same time."""
_PAUSES = (0.25, 2.0)
"""Seconds between a failed request and its first repetition, and the most between two; they double."""
_AGAIN = (408, 429)
"""HTTP codes, besides those of a failed server (500 and more), after which a request is repeated."""


class TeacherServer:
    """A server with one model, as its client sees it. Its methods may be called in any thread."""

    def __init__(self, url: str, model: str, *, k: int, vocabulary: int, wait: float) -> None:
        """Nothing is asked yet.

        Args:
            url: where the protocol's paths begin, with or without /v1.
            model: the name under which the server has the model.
            k: the number of most likely tokens that are asked for.
            vocabulary: the number of the model's tokens.
            wait: the seconds without any answer after which the server is lost.
        """
        self._url, self._model, self._k, self._vocabulary, self._wait = url, model, k, vocabulary, wait
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._threads = ThreadPoolExecutor(_REQUESTS, "teacher")
        self._answered = 0.0  # when the last answer came
        self._loss: str | None = None  # why the server is lost

    def check(self, longest: int) -> None:
        """Check that the server is there, has the model, reads so many tokens, and gives log-probabilities.

        Raises:
            UserError: it does not; the message says what.
        """
        remedy = f"start it with `vllm serve {self._model} --max-logprobs {self._k}`, or correct the url"
        try:
            models = {each["id"]: each for each in self._send("models")["data"]}
        except HTTPError as error:
            raise UserError(f"teacher.url {self._url}: it answers {_words(error)}; {remedy}") from error
        except (OSError, HTTPException) as error:
            raise UserError(f"teacher.url {self._url}: no server answers there ({_words(error)}); {remedy}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"teacher.url {self._url}: it does not speak OpenAI's protocol; {remedy}") from error
        if self._model not in models:
            raise UserError(
                f"teacher.url {self._url}: it serves {', '.join(models) or 'no model'}, and teacher.model is "
                f"{self._model}: serve that one, or add `--served-model-name {self._model}` if it is the same"
            )
        limit = models[self._model].get("max_model_len")
        if limit is not None and limit <= longest:
            raise UserError(
                f"teacher.url {self._url}: it reads {limit} tokens, and needs one more than the {longest} of "
                f"data.max_length: start it with --max-model-len {longest + 1}, or take a smaller data.max_length"
            )
        self.score([[self._vocabulary - 1]])

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[TopK]:
        """Return the k most likely tokens after each of the T tokens of each sequence, (T, k), with the tail at 1.

        Raises:
            TeacherLost: the server has not answered for too long.
            UserError: it refuses a sequence, or gives something else than is asked for.
        """
        return [each.result() for each in [self.ask(ids) for ids in token_ids]]

    def ask(self, token_ids: Sequence[int]) -> Future[TopK]:
        """Ask what `score` returns of one sequence, which is there later, and so are its exceptions."""
        return self._threads.submit(self._answer, list(token_ids))

    def _answer(self, ids: list[int]) -> TopK:
        body = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": self._k,
            "logprobs": self._k,
            "return_tokens_as_token_ids": True,
        }
        began, pause = time.monotonic(), _PAUSES[0]
        while self._loss is None:
            try:
                answer = self._send("completions", body)
            except (OSError, HTTPException, json.JSONDecodeError) as error:
                said = _words(error)
                if isinstance(error, HTTPError) and error.code < 500 and error.code not in _AGAIN:
                    raise UserError(
                        f"teacher.url {self._url}: it refuses {len(ids)} tokens with {self._k} log-probabilities each: "
                        f"{said}; serve the model of teacher.model, with --max-logprobs {self._k}"
                    ) from error
            else:
                self._answered = time.monotonic()
                return self._top_k(ids, answer)
            # A signal, or the end of the program, is not kept waiting for the server.
            is_over = signals.caught() != 0 or not threading.main_thread().is_alive()
            if time.monotonic() - max(began, self._answered) >= self._wait or is_over:
                self._loss = said
                break
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
        raise TeacherLost(
            f"teacher.url {self._url}: the server has not answered for {self._wait:g} s ({self._loss}): start it again"
        )

    def _send(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        key = os.environ.get("VLLM_API_KEY")  # the variable from which vLLM's server takes it
        headers |= {} if key is None else {"Authorization": f"Bearer {key}"}
        data = None if body is None else json.dumps(body).encode()
        with urlopen(HttpRequest(f"{self._base}/{path}", data, headers), timeout=self._wait) as answer:
            return json.load(answer)

    def _top_k(self, ids: list[int], answer: Any) -> TopK:
        try:
            choice = answer["choices"][0]
            entries = [
                {int(token): each["logprob"] for token, each in row.items()} for row in choice["prompt_logprobs"][1:]
            ]
            after = choice["logprobs"]["top_logprobs"]
            entries += [{int(name.removeprefix("token_id:")): value for name, value in row.items()} for row in after]
            top = to_top_k(entries, self._k) if len(entries) == len(ids) else None
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            top = None
        if top is None:
            raise UserError(
                f"teacher.url {self._url}: it does not give the {self._k} most likely tokens after each of {len(ids)} "
                "tokens (prompt_logprobs and logprobs, as vLLM does): take a server that does"
            )
        if not 0 <= int(top.tokens.min()) <= int(top.tokens.max()) < self._vocabulary:
            raise UserError(
                f"teacher.url {self._url}: it names the token {int(top.tokens.max())}, and {self._model} has "
                f"{self._vocabulary}: serve the model of teacher.model"
            )
        return top


def _words(error: Exception) -> str:
    """Say what has happened to a request, with the first words of the server."""
    if isinstance(error, HTTPError):
        said = error.read(2000).decode(errors="replace")
        with suppress(ValueError, KeyError, TypeError):
            said = json.loads(said)["error"]["message"]
        return f"HTTP {error.code}: {said[:300]}"
    return str(getattr(error, "reason", error)) or type(error).__name__


class RemoteTeacher:
    """Gives the outputs that the live teacher would give, as far as the k most likely tokens say them."""

    def __init__(self, server: TeacherServer, request: Request, *, k: int, device: torch.device) -> None:
        """`request` is what is needed, which `run.checks` has found that such a server gives."""
        self._server, self._request, self._k, self._device = server, request, k, device

    def ask(self, batch: Batch) -> Batch:
        """Ask about each sequence of a batch; returns the batch with the answers to come."""
        ids_BT, mask_BT = batch.input_ids.cpu(), batch.attention_mask.cpu()
        sequences = [
            ids_T[mask_T == number]
            for ids_T, mask_T in zip(ids_BT, mask_BT, strict=True)
            for number in range(1, int(mask_T.max()) + 1)
        ]
        return replace(batch, asked=tuple(self._server.ask(ids.tolist()) for ids in sequences))

    def wait(self, batches: Iterable[Batch]) -> None:
        """Wait for what was asked about batches; raises what `TeacherServer.score` does."""
        for batch in batches:
            for each in batch.asked:
                each.result()

    def teach(self, batch: Batch, *, lm_head: Sequence[Positions]) -> Outputs:
        """Return the outputs for a batch, which is asked about now if it was not before; raises as `wait` does."""
        batch = (batch if batch.asked else self.ask(batch)).with_label_rows(shift=True)
        answers = [each.result() for each in batch.asked]
        top = TopK(
            torch.cat([each.tokens for each in answers]).to(self._device),
            torch.cat([each.log_probs for each in answers]).to(self._device),
            {1.0: torch.cat([each.tails[1.0] for each in answers]).to(self._device)},
        )
        rows: dict[str, Tensor] = {}
        assert set(lm_head) <= set(self._request.positions), f"{lm_head} was not asked for"
        for place in self._request.positions:
            # The answers are those at all real tokens, in their order.
            here = torch.searchsorted(batch.rows_at("tokens"), batch.rows_at(place))
            rows |= top_rows(top.at(here), place)
        return to_outputs(rows.__getitem__, batch, self._request, top_k=self._k, head=None, scaling={})


@dataclass(frozen=True)
class AskingLoader:
    """A loader whose batches are asked about as soon as they are made."""

    loader: Loader
    ask: Callable[[Batch], Batch]

    def micro_batches(self, step: int) -> list[Batch]:
        """See Loader."""
        return [self.ask(batch) for batch in self.loader.micro_batches(step)]
