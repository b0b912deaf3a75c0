"""Plays vLLM's server of OpenAI's protocol with a tiny model: the same prompt has the same answer, bit for bit.

It takes other weights, as its worker does with `llmdistill.generation.vllm_worker`.
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from llmdistill.errors import UserError
from llmdistill.models.load import load_model

from stand_in_vllm import StandInLLM

_loading = threading.Lock()
"""transformers loads one model at a time in a process: of two that are loaded at once one may lack its tied weights."""


class StandInServer:
    """Serves a model, as `vllm serve` documents its answers, until it is told to fail."""

    def __init__(self, model: str | Path, *, name: str | None = None, most: int = 64, port: int = 0) -> None:
        self.name, self.most = str(model) if name is None else name, most
        self.lives: float = float("inf")
        """Answers until it is dead: it closes every connection without a word from then on."""
        self.died: float | None = None
        """When it was asked for the first time after its end."""
        self.stumbles = 0
        """Requests that it answers with HTTP 503 before it answers others."""
        self.changes: Mapping[str, Any] = {}
        """What replaces parts of each choice."""
        self.asked: list[list[int]] = []
        """The prompts that were answered."""
        self.stamp: str | None = None
        self.takes_weights = True
        self._folder, self._lock = model, threading.Lock()
        self._model = StandInLLM.__new__(StandInLLM)
        self._model.model, self._model.most = _load(model), most
        self._vocabulary = int(self._model.model.config.vocab_size)
        self._http = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it: nothing listens at its address any more."""
        self._http.shutdown()
        self._http.server_close()

    def start_again(self) -> None:
        """It has the weights of its start again."""
        self._model.model, self.stamp = _load(self._folder), None

    def _call(self, method: str, arguments: list[str]) -> tuple[int, Any]:
        if not self.takes_weights:
            return 500, {"error": {"message": f"no attribute {method}"}}
        if method == "take_weights":
            folder, self.stamp = arguments
            try:
                self._model.model = _load(folder)
            except UserError:
                return 500, {"error": {"message": f"cannot read {folder}"}}
            return 200, {"results": [None]}
        assert method == "weights_stamp"
        return 200, {"results": [self.stamp]}

    def _sampled(self, body: Mapping[str, Any]) -> tuple[int, Any]:
        """An answer by torch's own sampling."""
        plain = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        assert plain.items() <= body.items()
        stream, ids, log_probs = torch.Generator().manual_seed(body["seed"]), list(body["prompt"]), []
        while len(log_probs) < body["max_tokens"] and ids[-1:] not in [[end] for end in body["stop_token_ids"]]:
            with torch.no_grad():
                row = self._model.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(row.exp().multinomial(1, generator=stream)))
            log_probs.append(float(row[ids[-1]]))
        self.asked.append(body["prompt"])
        choice = {"token_ids": ids[len(body["prompt"]) :], "logprobs": {"token_logprobs": log_probs}}
        return 200, {"choices": [{**choice, **self.changes}]}

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": self.name, "object": "model", "max_model_len": 512}]}
        if path == "/collective_rpc":
            return self._call(body["method"], body.get("args", []))
        if path == "/reset_prefix_cache":
            return 200, None
        assert path == "/v1/completions"
        if self.stumbles > 0:
            self.stumbles -= 1
            return 503, {"error": {"message": "still loading"}}
        if "prompt_logprobs" not in body:
            return self._sampled(body)
        ids, k = body["prompt"], body["prompt_logprobs"]
        if max(ids) >= self._vocabulary:
            return 400, {"error": {"message": f"Token id {max(ids)} is out of vocabulary"}}
        if k > self.most:
            return 400, {"error": {"message": f"Requested prompt logprobs of {k}, which is greater than max allowed"}}
        found = self._model.scored(ids, body)
        rows = [None, *(_entry(row) for row in found.prompt_logprobs[1:])]
        (after,) = found.outputs[0].logprobs
        top = [{f"token_id:{token}": each.logprob for token, each in after.items()}]
        self.asked.append(ids)
        choice = {"index": 0, "text": "", "prompt_logprobs": rows, "logprobs": {"top_logprobs": top}}
        return 200, {"object": "text_completion", "choices": [{**choice, **self.changes}]}

    def _handler(server) -> type[BaseHTTPRequestHandler]:  # self is the handler's
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
                with server._lock:
                    if server.lives <= 0:
                        server.died = server.died or time.time()
                        return self.connection.close()
                    server.lives -= self.path == "/v1/completions"
                    code, answer = server._answer(self.path, body)
                content = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        return Handler


def _load(model: str | Path) -> Any:
    with _loading:
        return load_model(model, dtype=torch.float32).eval()


def _entry(row: Mapping[int, Any]) -> dict[str, dict[str, Any]]:
    return {str(token): {"logprob": each.logprob, "rank": each.rank} for token, each in row.items()}


@contextmanager
def serving(model: str | Path, **options: Any) -> Iterator[StandInServer]:
    """Serve a model for a block."""
    server = StandInServer(model, **options)
    try:
        yield server
    finally:
        server.close()
