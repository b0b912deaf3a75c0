"""The client of a server that speaks OpenAI's protocol, as vLLM does, for a training run that asks ahead of a step."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from llmdistill.errors import ServerLost, UserError
from llmdistill.runtime import signals

Answer = TypeVar("Answer")

_PAUSES = (0.25, 2.0)
"""Seconds between a failed request and its first repetition, and the most between two; they double."""
_AGAIN = (408, 429)  # request timeout, too many requests
"""HTTP codes, besides those of a failed server (500 and more), after which a request is repeated."""


class ModelServer:
    """A server of models. Its methods may be called in any thread."""

    def __init__(self, url: str, *, key: str, wait: float, requests: int) -> None:
        """Store the settings; nothing is sent yet.

        Args:
            url: where the protocol's paths begin, with or without /v1; `key` is its setting, for messages.
            wait: the seconds without any answer after which the server is lost.
            requests: the number of requests that are under way at the same time.
        """
        self.name = f"{key} {url}"
        """What a message begins with."""
        # Some paths, such as /collective_rpc, are outside of /v1.
        self._base = url.rstrip("/").removesuffix("/v1")
        self._wait = wait
        self._threads = ThreadPoolExecutor(requests, "server")
        self._answered = 0.0  # when the last answer came
        self._loss: str | None = None  # why the server is lost

    def models(self, remedy: str) -> Mapping[str, Any]:
        """Return the server's descriptions of its models, by their names.

        Raises UserError, whose message ends with the remedy, if there is no such server.
        """
        try:
            return {model["id"]: model for model in self.send("/v1/models")["data"]}
        except HTTPError as error:
            raise UserError(f"{self.name}: it answers {describe_error(error)}; {remedy}") from error
        except (OSError, HTTPException) as error:
            raise UserError(f"{self.name}: no server answers there ({describe_error(error)}); {remedy}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.name}: it does not speak OpenAI's protocol; {remedy}") from error

    def check_room(self, model: Mapping[str, Any], tokens: int) -> None:
        """Raise a UserError if one of the `models` reads fewer tokens than a text of data.max_length needs."""
        limit = model.get("max_model_len")
        if limit is not None and limit < tokens:
            raise UserError(
                f"{self.name}: it reads {limit} tokens, and a text of data.max_length needs {tokens}: start it with "
                f"--max-model-len {tokens}, or take a smaller data.max_length"
            )

    def complete(
        self, body: Mapping[str, Any], read: Callable[[Any], Answer], *, what: str, remedy: str
    ) -> Future[Answer]:
        """Request a completion; the future has what `read` makes of the answer, or raises.

        It raises ServerLost if the server has not answered for too long, a UserError if the server refuses the request,
        which the message calls `what`, and what `read` raises.
        """
        return self._threads.submit(lambda: read(self.insist("/v1/completions", body, what=what, remedy=remedy)))

    def insist(self, path: str, body: Mapping[str, Any], *, what: str, remedy: str, final: int = 500) -> Any:
        """Repeat a request until the server answers; raises as `complete` does.

        `final` is the lowest HTTP code after which the request is repeated; a lower one means that it is refused.
        """
        began, pause = time.monotonic(), _PAUSES[0]
        while self._loss is None:
            try:
                answer = self.send(path, body)
                self._answered = time.monotonic()
                return answer
            except (OSError, HTTPException, json.JSONDecodeError) as error:
                reason = describe_error(error)
                if isinstance(error, HTTPError) and error.code < final and error.code not in _AGAIN:
                    raise UserError(f"{self.name}: it refuses {what}: {reason}; {remedy}") from error
            # Give up at once on a signal, or at the end of the program: other ranks and the shell wait for this one.
            is_over = signals.first_signal() != 0 or not threading.main_thread().is_alive()
            # An answer to any other request also shows that the server is there.
            if time.monotonic() - max(began, self._answered) >= self._wait or is_over:
                self._loss = reason
                break
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
        silent = f"the server has not answered for {self._wait:g} s ({self._loss})"
        raise ServerLost(f"{self.name}: {silent}: start it again")

    def send(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request once, by POST if it has a body; raises what urllib does."""
        headers = {"Content-Type": "application/json"}
        key = os.environ.get("VLLM_API_KEY")  # the variable from which vLLM's server takes it
        headers |= {} if key is None else {"Authorization": f"Bearer {key}"}
        data = None if body is None else json.dumps(body).encode()
        with urlopen(Request(self._base + path, data, headers), timeout=self._wait) as answer:
            content = answer.read()
        return json.loads(content) if content else None


def describe_error(error: Exception) -> str:
    """Describe why a request failed, with the first words of the server's answer."""
    if isinstance(error, HTTPError):
        text = error.read(2000).decode(errors="replace")
        # A proxy in front of the server may answer with something else than its JSON.
        with suppress(ValueError, KeyError, TypeError):
            text = json.loads(text)["error"]["message"]
        return f"HTTP {error.code}: {text[:300]}"
    return str(getattr(error, "reason", error)) or type(error).__name__
