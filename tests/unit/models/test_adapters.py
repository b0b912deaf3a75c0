"""LoRA: folders of adapters against peft's own forward pass, and students that train adapters alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from transformers import PreTrainedModel

from llmdistill.batch import Taps
from llmdistill.config import LoraConfig
from llmdistill.errors import UserError
from llmdistill.factorize.convert import factorize
from llmdistill.factorize.kinds import Factorization
from llmdistill.models.adapters import add_lora, apply_adapter, is_adapter, load_adapters, merge_lora
from llmdistill.models.configs import load_config
from llmdistill.models.load import load_model
from llmdistill.models.taps import Recorder

TOKENS = torch.arange(24).view(2, 12)
LORA = LoraConfig(rank=3, alpha=6.0)


def factorized() -> PreTrainedModel:
    model = tiny_model("llama")
    names = [name for name, _ in model.base_model.named_modules() if name.endswith(("q_proj", "up_proj"))]
    factorize(model, Factorization(sizes=dict.fromkeys(names, 5)))
    return model


def randomize(model: torch.nn.Module) -> None:
    """Adapters as training leaves them: B is zero at first."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.3).to(parameter.dtype)


def save_adapter(folder: Path) -> Path:
    """A random adapter and, beside it, its base; the adapter's folder."""
    tiny_model("llama").save_pretrained(folder.parent / "base")
    model = get_peft_model(tiny_model("llama"), PeftConfig(target_modules=["q_proj", "down_proj"], r=3, lora_alpha=6))
    randomize(model)
    model.save_pretrained(folder)
    return named_base(folder, "../base")


def named_base(folder: Path, base: str | None) -> Path:
    file = folder / "adapter_config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "base_model_name_or_path": base}))
    return folder


def test_an_adapter_loads_merged(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "adapter")
    assert is_adapter(folder) > is_adapter(tmp_path / "base")
    assert load_config(folder).to_dict() == load_config(tmp_path / "base").to_dict()
    model = load_model(folder, dtype=torch.float32)
    assert type(model) is type(tiny_model("llama"))
    assert model.config._attn_implementation == "sdpa"
    assert model.state_dict().keys() == tiny_model("llama").state_dict().keys()
    base = load_model(tmp_path / "base", dtype=torch.float32)
    before, expected = base(TOKENS).logits, PeftModel.from_pretrained(base, folder)(TOKENS).logits
    assert torch.allclose(model(TOKENS).logits, expected, atol=1e-5, rtol=0)
    assert (expected - before).abs().max() > 0.01
    half, plain = (load_model(tmp_path / each, dtype=torch.bfloat16) for each in ("adapter", "base"))
    assert half.dtype == half.config.dtype == torch.bfloat16
    for (name, one), other in zip(model.named_parameters(), half.parameters(), strict=True):
        assert torch.equal(one.bfloat16(), other), name
    # Loading in bf16 leaves the angles of RoPE alone, and so does the cast here.
    assert {name: each.dtype for name, each in half.named_buffers()} == {n: b.dtype for n, b in plain.named_buffers()}


def test_base_is_found_beside_the_adapter_or_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_adapter(tmp_path / "adapter")
    expected = load_model(folder, dtype=torch.float32)(TOKENS).logits
    monkeypatch.chdir(tmp_path)
    for base in (str(tmp_path / "base"), "base"):
        named_base(folder, base)
        assert torch.equal(load_model("adapter", dtype=torch.float32)(TOKENS).logits, expected)


def test_an_adapter_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_adapter(tmp_path / "adapter")
    asked: list[str] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append(name)
        assert not any(fnmatch("adapter_model.bin", pattern) for pattern in allow_patterns)
        return str(folder)

    monkeypatch.setattr("transformers.utils.peft_utils.find_adapter_config_file", lambda name: name)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert is_adapter("org/of-this-test")
    expected = load_model(folder, dtype=torch.float32)(TOKENS).logits
    assert torch.equal(load_model("org/of-this-test", dtype=torch.float32)(TOKENS).logits, expected)
    assert asked == ["org/of-this-test"]


def without_weights(folder: Path) -> None:
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


LORA_B = "base_model.model.model.layers.{}.mlp.down_proj.lora_B.weight"


def changed(layer: int, values: torch.Tensor | None) -> Callable[[Path], None]:
    """Damage one matrix of the adapter; None leaves it out."""

    def damage(folder: Path) -> None:
        weights = load_file(folder / "adapter_model.safetensors")
        others = {name: value for name, value in weights.items() if name != LORA_B.format(layer)}
        more = {} if values is None else {LORA_B.format(layer): values}
        save_file({**others, **more}, folder / "adapter_model.safetensors")

    return damage


@pytest.mark.parametrize(("damage", "said"), [
    (without_weights, r"has no adapter_model\.safetensors"),
    (lambda folder: named_base(folder, None), "names no base model"),
    (lambda folder: named_base(folder, "./nowhere"), r"base_model_name_or_path: \./nowhere: no such folder"),
    (lambda folder: named_base(folder, "."), "is an adapter itself"),
    (lambda folder: tiny_model("gpt2").save_pretrained(folder.parent / "base"), "does not fit its base, a GPT2"),
    (changed(0, None), r"it lacks .*layers\.0\.mlp\.down_proj\.lora_B"),
    (changed(7, torch.zeros(16, 3)), r"no place for its .*layers\.7\.mlp"),
    (changed(0, torch.full((16, 3), float("nan"))), "cannot be merged into its base"),
])  # fmt: skip
def test_bad_adapters(tmp_path: Path, damage: Callable[[Path], object], said: str) -> None:
    folder = save_adapter(tmp_path / "adapter")
    damage(folder)
    with pytest.raises(UserError, match=said) as caught:
        load_model(folder, dtype=torch.float32)
    assert "\n" not in str(caught.value)


def test_no_merging_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_adapter(tmp_path / "adapter")
    monkeypatch.setattr("transformers.integrations.deepspeed.is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(UserError, match="ZeRO-3 shards while loading: write the merged model first"):
        apply_adapter(tiny_model("llama"), folder)


ASPECTS: dict[Any, frozenset[int]]
ASPECTS = dict.fromkeys(["query", "key", "value", "ffn_up", "ffn_down", "hidden"], frozenset({0, 1}))


def outputs(model: PreTrainedModel) -> tuple[torch.Tensor, Taps]:
    recorder = Recorder(model, ASPECTS)
    with recorder.recording():
        logits = model(TOKENS, use_cache=False).logits
    taps = recorder.take()
    recorder.remove()
    return logits, taps


STUDENTS = {"llama-factorized": (factorized, 18), "gpt2": (partial(tiny_model, "gpt2"), 8)}


@pytest.mark.parametrize("student", STUDENTS)
def test_adapters_start_as_identity_are_tapped_and_merge_back(student: str) -> None:
    make, linears = STUDENTS[student]
    model = make()
    before, (expected, _), modules = model.state_dict().keys(), outputs(model), dict(make().named_modules())
    state = torch.get_rng_state()
    add_lora(model, LORA, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model) is type(make())
    assert modules.keys() <= dict(model.named_modules()).keys()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * linears
    assert all("lora_" in name for name in trained)
    assert torch.equal(model(TOKENS).logits, expected)

    randomize(model)
    adapted, taps = outputs(model)
    assert (adapted - expected).abs().max() > 0.01
    merge_lora(model)
    assert model.state_dict().keys() == before
    assert {name: type(module) for name, module in model.named_modules()} == {n: type(m) for n, m in modules.items()}
    assert all(parameter.requires_grad for parameter in model.parameters())
    merged, merged_taps = outputs(model)
    assert torch.allclose(merged, adapted, atol=1e-5, rtol=0)
    for aspect in ASPECTS:  # fp32, values up to 10
        torch.testing.assert_close(*(getattr(each, aspect) for each in (taps, merged_taps)), atol=1e-5, rtol=1e-4)


def test_targets() -> None:
    model = factorized()
    add_lora(model, LoraConfig(rank=2, targets=["q_proj", "mlp.down_proj"]), seed=0)
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    layers = [f"model.layers.{i}" for i in range(2)]
    expected = {f"{layer}.{name}" for layer in layers for name in ("self_attn.q_proj.A", "self_attn.q_proj.B")}
    assert adapted == expected | {f"{layer}.mlp.down_proj" for layer in layers}
    with pytest.raises(UserError, match=r"student\.lora\.targets: 'proj' is no linear .* there are .*q_proj") as caught:
        add_lora(tiny_model("llama"), LoraConfig(rank=2, targets=["q_proj", "proj"]), seed=0)
    assert "lm_head" not in str(caught.value)


def test_adapters_load_whole_or_not_at_all() -> None:
    model = tiny_model("llama")
    add_lora(model, LORA, seed=0)
    state = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    less, more = {n: each for n, each in state.items() if n != min(state)}, {**state, "norm.weight": torch.ones(16)}
    for other in (less, more):
        with pytest.raises(RuntimeError, match="differ, first in"):
            load_adapters(model, other)
