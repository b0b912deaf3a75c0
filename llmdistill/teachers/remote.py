"""A teacher behind a server that speaks OpenAI's protocol: requests go out over HTTP, ahead of their step.

Each request completes a sequence by one token with `prompt_logprobs`, which vLLM adds to the protocol: the most likely
tokens in the place of each token of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from llmdistill.batch import Batch, Outputs, Positions, Taps, TopK
from llmdistill.config.teacher import CacheConfig, TeacherConfig
from llmdistill.errors import UserError
from llmdistill.generation.model_server import ModelServer
from llmdistill.generation.vllm_engine import to_top_k
from llmdistill.models.families import max_positions
from llmdistill.runtime.devices import to_device_later
from llmdistill.runtime.distributed import World, on_main
from llmdistill.step.teacher import AsyncTeacher
from llmdistill.teachers.output_rows import Request
from llmdistill.teachers.source import Capabilities, TeacherContext, TeacherPlan, TeacherSource

_REQUESTS = 16
"""Requests that a rank sends at the same time."""


class TeacherServer:
    """A server with one model, as its client sees it. Its methods may be called in any thread."""

    def __init__(self, url: str, model: str, *, k: int, vocabulary: int, wait: float) -> None:
        """Send nothing yet.

        Args:
            url: where the protocol's paths begin, with or without /v1.
            model: the name under which the server has the model.
            k: the number of most likely tokens to request.
            vocabulary: the number of the model's tokens.
            wait: the seconds without any answer after which the server is lost.
        """
        self._server = ModelServer(url, key="teacher.url", wait=wait, requests=_REQUESTS)
        self._model, self._k, self._vocabulary = model, k, vocabulary

    def check(self, longest: int) -> None:
        """Check that the server is there, has the model, reads so many tokens, and gives log-probabilities.

        Raises:
            UserError: it does not; the message says what.
        """
        models = self._server.models(
            f"start it with `vllm serve {self._model} --max-logprobs {self._k}`, or correct the url"
        )
        if self._model not in models:
            raise UserError(
                f"{self._server.name}: it serves {', '.join(models) or 'no model'}, and teacher.model is "
                f"{self._model}: serve that one, or add `--served-model-name {self._model}` if it is the same"
            )
        # A token is generated behind the longest text, see `request`.
        self._server.check_room(models[self._model], longest + 1)
        # The last token of the vocabulary: a model with fewer tokens refuses it.
        self.score([[self._vocabulary - 1]])

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[TopK]:
        """Return the k most likely tokens after each of the T tokens of each sequence, (T, k), with the rest at 1.

        Raises:
            ServerLost: the server has not answered for too long.
            UserError: it refuses a sequence, or does not give the tokens that were requested.
        """
        return [answer.result() for answer in [self.request(ids) for ids in token_ids]]

    def request(self, token_ids: Sequence[int]) -> Future[TopK]:
        """Request what `score` returns of one sequence; the future raises what `score` does."""
        ids = list(token_ids)
        body = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": 1,  # the distribution after the last token is that of the token which is generated
            "temperature": 1.0,
            "prompt_logprobs": self._k,
            "logprobs": self._k,
            "return_tokens_as_token_ids": True,  # as `token_id:N`, because two tokens may have the same text
        }
        return self._server.complete(
            body,
            partial(self._top_k, ids),
            what=f"{len(ids)} tokens with {self._k} log-probabilities each",
            remedy=f"serve the model of teacher.model, with --max-logprobs {self._k}",
        )

    def _top_k(self, ids: list[int], answer: Any) -> TopK:
        try:
            choice = answer["choices"][0]
            # The first token of a prompt is predicted by none, so its entry is null.
            entries = [
                {int(token): entry["logprob"] for token, entry in row.items()} for row in choice["prompt_logprobs"][1:]
            ]
            after = choice["logprobs"]["top_logprobs"]
            entries += [{int(name.removeprefix("token_id:")): value for name, value in row.items()} for row in after]
            top = to_top_k(entries, self._k) if len(entries) == len(ids) else None
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            top = None
        if top is None:
            raise UserError(
                f"{self._server.name}: it does not give the {self._k} most likely tokens after each of {len(ids)} "
                "tokens (prompt_logprobs and logprobs, as vLLM does): take a server that does"
            )
        if not 0 <= int(top.tokens.min()) <= int(top.tokens.max()) < self._vocabulary:
            raise UserError(
                f"{self._server.name}: it names the token {int(top.tokens.max())}, and {self._model} has "
                f"{self._vocabulary}: serve the model of teacher.model"
            )
        return top


class RemoteTeacher(AsyncTeacher):
    """Gives the outputs that the live teacher would give, as far as the k most likely tokens say them."""

    def __init__(self, server: TeacherServer, *, device: torch.device) -> None:
        """`ServerSource.check_available` has made sure that the server gives what is needed."""
        self._server, self._device = server, device

    def request(self, batch: Batch) -> Batch:
        """Request the answers for each sequence of a batch; returns the batch with the answers to come."""
        ids_BT, mask_BT = batch.on_cpu().input_ids, batch.on_cpu().attention_mask
        sequences = [
            ids_T[mask_T == number]
            for ids_T, mask_T in zip(ids_BT, mask_BT, strict=True)
            for number in range(1, int(mask_T.max()) + 1)  # a packed row numbers its sequences from 1
        ]
        return replace(batch, requests=tuple(self._server.request(ids.tolist()) for ids in sequences))

    def wait(self, batches: Iterable[Batch]) -> None:
        """Wait for the answers that were requested for batches; raises what `TeacherServer.score` does."""
        for batch in batches:
            for answer in batch.requests:
                answer.result()

    def compute_targets(self, batch: Batch, *, lm_head: Sequence[Positions]) -> Outputs:
        """Return the outputs for a batch; requests them now if they were not before; raises as `wait` does."""
        batch = (batch if batch.requests else self.request(batch)).with_positions(shift=True)
        answers = [answer.result() for answer in batch.requests]
        tokens, log_probs, rest = (
            to_device_later(torch.cat(parts), self._device)
            for parts in zip(*((each.tokens, each.log_probs, each.rest[1.0]) for each in answers), strict=True)
        )
        top = TopK(tokens, log_probs, {1.0: rest})
        # The answers are those at all real tokens, in their order.
        here = {
            place: torch.searchsorted(batch.flat_positions("tokens"), batch.flat_positions(place)) for place in lm_head
        }
        return Outputs(logits=None, taps=Taps(), lm_head={place: top.at(rows) for place, rows in here.items()})


class ServerSource(TeacherSource):
    """Asks a server for the most likely tokens of the teacher."""

    gives = Capabilities(positions=("labels", "tokens"))

    def build(self, context: TeacherContext) -> RemoteTeacher:
        return RemoteTeacher(self.client(context.plan), device=World.current().device)

    def client(self, plan: TeacherPlan) -> TeacherServer:
        """Return the client of the server."""
        teacher, vocabulary = plan.config.teacher, plan.models.compared_tokens
        assert teacher.url is not None
        assert teacher.model is not None
        assert teacher.top_k is not None
        return TeacherServer(teacher.url, teacher.model, k=teacher.top_k, vocabulary=vocabulary, wait=teacher.wait)

    def describe(self, teacher: TeacherConfig) -> str:
        return f", asked at {teacher.url}; it is not scored"

    def check_plan(self, plan: TeacherPlan) -> None:
        teacher, tokens = plan.config.teacher, plan.models.compared_tokens
        obstacle = vllm_number_obstacle(
            plan, remedy="train with the teacher itself (teacher.url and teacher.top_k null)"
        )
        if obstacle is not None:
            raise UserError(f"teacher.url {teacher.url}: {obstacle}")
        if teacher.top_k is not None and teacher.top_k >= tokens:
            raise UserError(
                f"teacher.top_k is {teacher.top_k}, but teacher and student share {tokens} tokens: give less"
            )

    def check_available(self, plan: TeacherPlan) -> tuple[str, str]:
        self.client(plan).check(plan.config.data.max_length)
        return "teacher.url", "the server has the model, and gives its log-probabilities"

    def unforecast(self, teacher: TeacherConfig) -> str:
        return (
            f"teacher.url is {teacher.url}, and what a server costs is not forecast: leave teacher.url and "
            "teacher.top_k out"
        )

    def cache_settings(self, plan: TeacherPlan, settings: CacheConfig) -> CacheConfig:
        top_k = plan.config.teacher.top_k  # the server's answers fill the cache
        assert top_k is not None
        if settings.engine != "auto" or settings.stored_top_k not in (None, top_k):
            raise UserError(
                f"teacher.url {plan.config.teacher.url} fills a cache with the {top_k} most likely tokens of "
                "teacher.top_k: leave --cache.engine, --cache.content and --cache.top_k out"
            )
        on_main(lambda: self.check_available(plan))
        return replace(settings, content="top_k", top_k=top_k, engine="vllm")

    def scorer(self, plan: TeacherPlan) -> Callable[..., Any]:
        return self.client(plan).score


def vllm_number_obstacle(plan: TeacherPlan, *, remedy: str) -> str | None:
    """Why vLLM's log-probabilities are not those that a run compares, by a number; None if they are."""
    temperatures, length = Request.of(plan.method).temperatures, plan.config.data.max_length
    if temperatures != (1.0,):
        listed = ", ".join(f"{temperature:g}" for temperature in temperatures)
        return f"the mass of the rest at temperature {listed} does not follow from vLLM's answers; {remedy}"
    if plan.models.compared_tokens != plan.models.teacher.vocab_size:
        return (
            f"vLLM compares all {plan.models.teacher.vocab_size} tokens of the teacher, of which the student has "
            f"{plan.models.compared_tokens}; {remedy}"
        )
    if max_positions(plan.models.teacher, length + 1) <= length:
        return (
            f"vLLM generates a token after the {length} of data.max_length, and the teacher has no position for it; "
            f"{remedy}, or a smaller data.max_length"
        )
    return None
