"""vLLM's interface is played by a stand-in that decodes with the same tiny model, greedily or not at all."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from llmdistill.config import ResponseConfig
from llmdistill.errors import UserError
from llmdistill.generation import responses
from llmdistill.generation.responses import generate_responses
from llmdistill.generation.vllm_engine import choose_engine, shares
from llmdistill.runtime.distributed import World

from stand_in_vllm import StandInLLM, install

LIMITS: dict[str, Any] = {"max_prompt_length": 60, "max_length": 70, "dtype": "fp32"}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Install the stand-in on a machine with two GPUs; returns what it is called with."""
    return install(monkeypatch)


ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def test_vllm_writes_the_file_that_transformers_writes(vllm, teacher, data, tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        settings = ResponseConfig(decoding="greedy", **LIMITS)
        first = generate_responses(str(teacher), str(data), tmp_path / "hf.jsonl", settings, world=ALONE)
    monkeypatch.setattr(responses, "load_model", lambda *_, **__: pytest.fail("vLLM loads the model itself"))
    second = generate_responses(str(teacher), str(data), tmp_path / "vllm.jsonl", settings, world=ALONE)
    assert (first["engine"], second["engine"]) == ("hf", "vllm")
    assert (first["settings"]["batch_size"], second["settings"]["batch_size"]) == (32, 1024)
    assert (tmp_path / "vllm.jsonl").read_bytes() == (tmp_path / "hf.jsonl").read_bytes()
    assert second["generated_tokens"] == first["generated_tokens"]
    engine, request, *_ = vllm
    assert (engine["tensor_parallel_size"], engine["trust_remote_code"], engine["max_model_len"]) == (2, False, 70)
    assert request["max_tokens"] == 10


def test_every_prompt_has_its_own_seed(vllm, teacher, data, tmp_path, monkeypatch) -> None:
    asked: list[dict[str, Any]] = []

    def generate(_: Any, prompts: list[Any], sampling_params: list[dict[str, Any]], use_tqdm: bool) -> list[Any]:
        asked.extend(sampling_params)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(4, 0))]) for _ in prompts]

    monkeypatch.setattr(StandInLLM, "generate", generate)
    settings = ResponseConfig(temperature=0.7, top_p=0.9, batch_size=3, engine="vllm", **LIMITS)
    generate_responses(str(teacher), str(data), tmp_path / "a.jsonl", settings, world=ALONE)
    seeds = [params.pop("seed") for params in asked]
    assert len(set(seeds)) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert [params[key] for params in asked[:1] for key in ("temperature", "top_p", "top_k")] == [0.7, 0.9, -1]


def test_vllm_is_refused_with_the_reason_and_auto_does_without_it(vllm, teacher, tmp_path, monkeypatch) -> None:
    def check(pattern: str | None, folder: Path = teacher, ngram: int = 0, ranks: int = 1) -> None:
        arguments: dict[str, Any] = {"no_repeat_ngram_size": ngram, "world_size": ranks}
        assert choose_engine("auto", folder, **arguments) == ("vllm" if pattern is None else "hf")
        assert choose_engine("hf", folder, **arguments) == "hf"
        if pattern is None:
            assert choose_engine("vllm", folder, **arguments) == "vllm"
        else:
            with pytest.raises(UserError, match=f"--engine vllm: .*{pattern}.*--engine hf"):
                choose_engine("vllm", folder, **arguments)

    check(None)
    check("no no_repeat_ngram_size", ngram=6)
    check("drives all GPUs from one process", ranks=2)
    config = json.loads((teacher / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "llmdistill", "method": "svd", "modules": {}}
    for name, content, pattern in (
        ("config.json", config, "is factorized"),
        ("adapter_config.json", {}, "is an adapter"),
    ):
        student = tmp_path / name
        student.mkdir()
        (student / name).write_text(json.dumps(content))
        check(pattern, student)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        check("no GPU")
    monkeypatch.delitem(sys.modules, "vllm")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    check("not installed")


@pytest.mark.parametrize(
    ("heads", "groups", "gpus", "expected"), [(32, 8, 6, 4), (12, 12, 8, 6), (14, 2, 8, 2), (9, 3, 2, 1), (16, 2, 8, 8)]
)
def test_the_heads_decide_over_how_many_gpus_a_model_is_split(heads, groups, gpus, expected) -> None:
    config = LlamaConfig(num_attention_heads=heads, num_key_value_heads=groups, hidden_size=heads * 8)
    assert shares(config, gpus) == expected
