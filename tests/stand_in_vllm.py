"""Plays vLLM's offline interface with a tiny model (answers, log-probabilities), and its base classes of layers."""

import importlib.machinery
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from llmdistill.models.load import load_model


@dataclass
class Logprob:
    """As vllm.logprobs.Logprob."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class StandInLLM:
    """As vllm.LLM, one prompt at a time, without cache."""

    made: list[dict[str, Any]]

    def __init__(self, **arguments: Any) -> None:
        type(self).made.append(arguments)
        assert arguments["dtype"] == "float32"
        self.model = load_model(arguments["model"], dtype=torch.float32)
        self.limit = arguments["max_model_len"]
        self.most = arguments.get("max_logprobs", 20)  # vLLM's default

    def generate(self, prompts: list[dict[str, list[int]]], sampling_params: list[dict[str, Any]], use_tqdm: bool):
        assert not use_tqdm
        results = []
        for prompt, params in zip(prompts, sampling_params, strict=True):
            ids = list(prompt["prompt_token_ids"])
            assert len(ids) + params["max_tokens"] <= self.limit
            answer = self.scored if "prompt_logprobs" in params else self.answered
            results.append(answer(ids, params))
            type(self).made.append(params)
        return results

    def answered(self, ids: list[int], params: dict[str, Any]) -> SimpleNamespace:
        """The answer: greedy, or a sample at temperature 1 with the seed of the prompt."""
        start, nats, stream = len(ids), 0.0, torch.Generator().manual_seed(params["seed"])
        while len(ids) - start < params["max_tokens"] and not set(ids[start:][-1:]) & set(params["stop_token_ids"]):
            with torch.no_grad():
                log_probs = self.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            drawn = torch.multinomial(log_probs.exp(), 1, generator=stream)
            ids.append(int(log_probs.argmax() if params["temperature"] == 0.0 else drawn))
            nats -= float(log_probs[ids[-1]])
        output = SimpleNamespace(
            token_ids=tuple(ids[start:]), cumulative_logprob=-nats if "logprobs" in params else None
        )
        return SimpleNamespace(outputs=[output])

    def scored(self, ids: list[int], params: dict[str, Any]) -> SimpleNamespace:
        assert params["max_tokens"] == 1
        assert max(params["prompt_logprobs"], params["logprobs"]) <= self.most
        with torch.no_grad():
            log_probs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        # The documented structure: nothing of the first token, then for each token the k most likely ones in its place
        # and, first, itself; and the same for the generated token, here the least likely one.
        of_prompt = [
            None,
            *(_entry(row, token, params["prompt_logprobs"]) for row, token in zip(log_probs, ids[1:], strict=False)),
        ]
        sampled = int(log_probs[-1].argmin())
        output = SimpleNamespace(token_ids=(sampled,), logprobs=[_entry(log_probs[-1], sampled, params["logprobs"])])
        return SimpleNamespace(prompt_token_ids=ids, prompt_logprobs=of_prompt, outputs=[output])


def _entry(log_probs: Tensor, token: int, k: int) -> dict[int, Logprob]:
    top = log_probs.topk(k)
    found = {token: Logprob(float(log_probs[token]), int((log_probs > log_probs[token]).sum()) + 1)}
    pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
    return found | {each: Logprob(value, rank) for rank, (value, each) in enumerate(pairs, start=1)}


def install(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Install the stand-in on a machine with two GPUs; returns what it is called with."""
    StandInLLM.made = []
    module = ModuleType("vllm")
    module.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    module.LLM, module.SamplingParams = StandInLLM, dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return StandInLLM.made


class Base:
    """As vLLM's QuantizationConfig and LinearMethodBase: a model's packed_modules_mapping is set by the model."""

    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}


class StandInLinear(torch.nn.Module):
    """As vLLM's LinearBase on one rank of tensor parallelism, which asks a method for its weights and its product."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.tp_rank, self.tp_size = rank, ranks


class StandInDense(Base):
    """As vLLM's UnquantizedLinearMethod and UnquantizedEmbeddingMethod."""


class StandInEmbedding(torch.nn.Module):
    """As vLLM's VocabParallelEmbedding: the rows of each rank are padded, and what it lacks is 0 in its outputs."""

    def __init__(self, words: int, width: int, dtype=None, quant_config=None, prefix: str = "", *, rank=0, ranks=1):
        super().__init__()
        self.tp_rank, self.tp_size, self.org_vocab_size = rank, ranks, words
        self.rows = -(-words // 64) * 64 // ranks
        method = None if quant_config is None else quant_config.get_quant_method(self, prefix)
        self.quant_method = StandInDense() if method is None else method
        if isinstance(self.quant_method, StandInDense):
            self.weight = torch.nn.Parameter(torch.zeros(self.rows, width))
        else:
            self.quant_method.create_weights(
                self, width, [self.rows], width, self.rows * ranks, params_dtype=dtype, weight_loader=self.weight_loader
            )

    def weight_loader(self, param: Any, loaded: Tensor) -> None:
        if not hasattr(param, "output_dim"):
            param.data.copy_(loaded)
            return
        own = loaded[self.rows * self.tp_rank :][: self.rows]
        param.data[: len(own)].copy_(own)
        param.data[len(own) :].fill_(0)

    def forward(self, ids: Tensor) -> Tensor:
        own = ids - self.rows * self.tp_rank
        other = (own < 0) | (own >= self.rows)
        return self.quant_method.embedding(self, own.masked_fill(other, 0)).masked_fill(other[..., None], 0.0)


class StandInHead(StandInEmbedding):
    """As vLLM's ParallelLMHead."""

    def tie_weights(self, embed_tokens: StandInEmbedding) -> torch.nn.Module:
        return self.quant_method.tie_weights(self, embed_tokens)


def install_layers(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """Install the base classes of layers as vLLM 0.32 and 0.33 name them; returns what is registered with them."""
    monkeypatch.setattr(StandInEmbedding, "__init__", StandInEmbedding.__init__)  # undone after the plugin's change
    registered: dict[str, type] = {}
    names = {
        "": {},
        ".config": {"get_current_vllm_config_or_none": lambda: None},
        ".model_executor": {},
        ".model_executor.layers": {},
        ".model_executor.layers.linear": {
            "LinearBase": StandInLinear,
            "LinearMethodBase": Base,
            "UnquantizedLinearMethod": StandInDense,
        },
        ".model_executor.layers.quantization": {
            "register_quantization_config": lambda name: lambda each: registered.setdefault(name, each)
        },
        ".model_executor.layers.quantization.base_config": {
            "QuantizationConfig": Base,
            "QuantizeMethodBase": Base,
        },
        ".model_executor.layers.vocab_parallel_embedding": {
            "ParallelLMHead": StandInHead,
            "UnquantizedEmbeddingMethod": StandInDense,
            "VocabParallelEmbedding": StandInEmbedding,
        },
    }
    for name, values in names.items():
        module = ModuleType(f"vllm{name}")
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, f"vllm{name}", module)
    return registered
