"""LoRA: folders of adapters against peft's own forward pass, and students that train adapters alone."""

import json
from fnmatch import fnmatch
from functools import partial
from importlib.metadata import version

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import random_student, tiny_config, tiny_model
from transformers import AutoModelForCausalLM

from llmdistill.config import FactorizeConfig, LoraConfig, StudentConfig
from llmdistill.errors import UserError
from llmdistill.models.adapters import add_lora, apply_adapter, is_adapter, load_adapters, merge_lora
from llmdistill.models.configs import load_config
from llmdistill.models.load import load_model, merge_adapter
from llmdistill.serving.dense import export_dense
from llmdistill.step.taps import Recorder
from llmdistill.students.convert import compress_folder, factorize
from llmdistill.students.kinds import Factorization

TOKENS = torch.arange(24).view(2, 12)
LORA = LoraConfig(rank=3, alpha=6.0)


def factorized():
    model = tiny_model("llama")
    names = [name for name, _ in model.base_model.named_modules() if name.endswith(("q_proj", "up_proj"))]
    factorize(model, Factorization(sizes=dict.fromkeys(names, 5)))
    return model


def randomize(model):
    """Adapters as training leaves them: B is zero at first."""
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.3).to(parameter.dtype)


def save_adapter(folder, dtype=torch.float32):
    """A random adapter and, beside it, its base with files that are no weights; the adapter's folder."""
    base = folder.parent / "base"
    tiny_model("llama").to(dtype).save_pretrained(base)
    settings = PeftConfig(target_modules=["q_proj", "down_proj"], r=3, lora_alpha=6)
    model = get_peft_model(load_model(base, dtype=torch.float32), settings)
    randomize(model)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer.model", "generation_config.json"):
        (base / name).write_text(f'{{"of": "base {name}"}}')
    return named_base(folder, "../base")


def named_base(folder, base):
    file = folder / "adapter_config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "base_model_name_or_path": base}))
    return folder


def test_an_adapter_loads_merged_into_its_base_beside_it_or_as_given(tmp_path, monkeypatch):
    folder = save_adapter(tmp_path / "adapter")
    assert is_adapter(folder) > is_adapter(tmp_path / "base")
    assert load_config(folder).to_dict() == load_config(tmp_path / "base").to_dict()
    model = load_model(folder, dtype=torch.float32)
    base = load_model(tmp_path / "base", dtype=torch.float32)
    assert type(model) is type(base)
    assert model.config._attn_implementation == "sdpa"
    assert model.state_dict().keys() == base.state_dict().keys()
    before, expected = base(TOKENS).logits, PeftModel.from_pretrained(base, folder)(TOKENS).logits
    assert torch.allclose(model(TOKENS).logits, expected, atol=1e-5, rtol=0)
    assert (expected - before).abs().max() > 0.01
    half, plain = (load_model(tmp_path / each, dtype=torch.bfloat16) for each in ("adapter", "base"))
    assert half.dtype == half.config.dtype == torch.bfloat16
    for (name, one), other in zip(model.named_parameters(), half.parameters(), strict=True):
        assert torch.equal(one.bfloat16(), other), name
    # Loading in bf16 leaves the angles of RoPE alone, and so does the cast here.
    assert {name: each.dtype for name, each in half.named_buffers()} == {n: b.dtype for n, b in plain.named_buffers()}
    monkeypatch.chdir(tmp_path)
    for given in (str(tmp_path / "base"), "base"):
        named_base(folder, given)
        assert torch.equal(load_model("adapter", dtype=torch.float32)(TOKENS).logits, model(TOKENS).logits)


def test_an_adapter_on_the_hub(tmp_path, monkeypatch):
    folder = save_adapter(tmp_path / "adapter")
    asked = []

    def download(name, allow_patterns):
        asked.append(name)
        assert not any(fnmatch("adapter_model.bin", pattern) for pattern in allow_patterns)
        return str(folder)

    monkeypatch.setattr("transformers.utils.peft_utils.find_adapter_config_file", lambda name: name)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert is_adapter("org/of-this-test")
    expected = load_model(folder, dtype=torch.float32)(TOKENS).logits
    assert torch.equal(load_model("org/of-this-test", dtype=torch.float32)(TOKENS).logits, expected)
    assert asked == ["org/of-this-test"]


def without_weights(folder):
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


LORA_B = "base_model.model.model.layers.{}.mlp.down_proj.lora_B.weight"


def changed(layer, values):
    """Damage one matrix of the adapter; None leaves it out."""

    def damage(folder):
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
def test_bad_adapters(tmp_path, damage, said):
    folder = save_adapter(tmp_path / "adapter")
    damage(folder)
    with pytest.raises(UserError, match=said) as caught:
        load_model(folder, dtype=torch.float32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("torchao.dtypes", rf"install other versions of peft \(now {version('peft')}\) and torchao \(now [\d.]+"),
        ("gptqmodel", r"and gptqmodel \(now missing\)"),
        (None, rf"install other versions of peft \(now {version('peft')}\)$"),
    ],
)
def test_libraries_that_do_not_go_together_are_named_with_their_versions(tmp_path, monkeypatch, name, said):
    def load(*_, **__):
        raise ImportError("cannot import name 'AffineQuantizedTensor'", name=name)

    monkeypatch.setattr(PeftModel, "from_pretrained", load)
    with pytest.raises(UserError, match=said) as caught:
        apply_adapter(tiny_model("llama"), save_adapter(tmp_path / "adapter"))
    assert "peft cannot read the adapter (cannot import name 'AffineQuantizedTensor')" in str(caught.value)


def test_no_merging_into_shards(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.integrations.deepspeed.is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(UserError, match="ZeRO-3 shards while loading: write the merged model first"):
        apply_adapter(tiny_model("llama"), save_adapter(tmp_path / "adapter"))


def test_a_merged_folder_is_a_stock_model_and_compress_merges_too(tmp_path):
    adapter, merged = save_adapter(tmp_path / "adapter", torch.bfloat16), tmp_path / "merged"
    merge_adapter(adapter, merged)
    assert not list(merged.glob("adapter*"))
    assert json.loads((merged / "config.json").read_text())["dtype"] == "bfloat16"
    saved, exact = load_file(merged / "model.safetensors"), load_model(adapter, dtype=torch.float32).state_dict()
    assert saved.keys() == load_file(tmp_path / "base" / "model.safetensors").keys()
    for name, value in saved.items():
        assert torch.equal(value, exact[name].bfloat16()), name
    assert (merged / "tokenizer.model").is_file()
    assert (merged / "tokenizer.json").read_text() == '{"of": "base tokenizer.json"}'
    (adapter / "tokenizer.json").write_text("{}")
    other = tmp_path / "other"
    merge_adapter(adapter, other, torch.float32)
    assert load_file(other / "model.safetensors")["model.norm.weight"].dtype == torch.float32
    assert (other / "tokenizer.json").read_text() == "{}"
    assert not (other / "tokenizer.model").exists(), "it would contradict the adapter's tokenizer"
    with pytest.raises(UserError, match=r"base: no adapter there \(no adapter_config\.json\)"):
        merge_adapter(tmp_path / "base", tmp_path / "out")
    with pytest.raises(UserError, match="exists and is not empty"):
        merge_adapter(adapter, tmp_path / "base")

    names = ("adapter", "merged")
    settings = StudentConfig(factorize=FactorizeConfig(rank=5))
    first, second = (compress_folder(tmp_path / name, tmp_path / f"{name}-made", settings) for name in names)
    assert first == second
    students = [load_file(tmp_path / f"{name}-made" / "model.safetensors") for name in names]
    torch.testing.assert_close(*students, rtol=0, atol=0)
    assert (tmp_path / "adapter-made" / "tokenizer.json").is_file()


def test_an_adapter_of_factors_is_merged_into_them_and_the_export_multiplies_all_out(tmp_path):
    factorized().save_pretrained(tmp_path / "base")
    settings = PeftConfig(r=2, target_modules=["q_proj.A", "q_proj.B"], init_lora_weights=False)
    model = get_peft_model(load_model(tmp_path / "base", dtype=torch.float32), settings).eval()
    model.save_pretrained(tmp_path / "adapter")
    adapter = named_base(tmp_path / "adapter", "../base")
    export_dense(adapter, tmp_path / "dense")
    for folder in (adapter, tmp_path / "dense"):
        loaded = load_model(folder, dtype=torch.float32)
        torch.testing.assert_close(loaded(TOKENS).logits, model(TOKENS).logits, atol=1e-5, rtol=0)


# Students that train adapters alone.


ASPECTS = dict.fromkeys(["query", "key", "value", "ffn_up", "ffn_down", "hidden"], frozenset({0, 1}))


def outputs(model):
    recorder = Recorder(model, ASPECTS)
    with recorder.recording():
        logits = model(TOKENS, use_cache=False).logits
    taps = recorder.pop_taps()
    recorder.remove()
    return logits, taps


@pytest.mark.parametrize(("make", "linears"), [(factorized, 18), (partial(tiny_model, "gpt2"), 8)])
def test_adapters_start_as_identity_are_tapped_and_merge_back(make, linears):
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


def test_targets():
    model = factorized()
    add_lora(model, LoraConfig(rank=2, targets=["q_proj", "mlp.down_proj"]), seed=0)
    adapted = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    layers = [f"model.layers.{i}" for i in range(2)]
    expected = {f"{layer}.{name}" for layer in layers for name in ("self_attn.q_proj.A", "self_attn.q_proj.B")}
    assert adapted == expected | {f"{layer}.mlp.down_proj" for layer in layers}
    with pytest.raises(UserError, match=r"student\.lora\.targets: 'proj' is no linear .* there are .*q_proj") as caught:
        add_lora(tiny_model("llama"), LoraConfig(rank=2, targets=["q_proj", "proj"]), seed=0)
    assert "lm_head" not in str(caught.value)


def test_kronecker_factors_take_no_adapters():
    settings = {"shapes": {"*.mlp.*": "dense", "*": "4x4"}}
    model = random_student(AutoModelForCausalLM, tiny_config("llama"), settings)
    for targets in (None, ["up_proj", "q_proj"]):
        with pytest.raises(UserError, match=r"0\.self_attn\.q_proj of the student's layers is a Kronecker product"):
            add_lora(model, LoraConfig(rank=2, targets=targets), seed=0)
    add_lora(model, LoraConfig(rank=2, targets=["up_proj"]), seed=0)  # a dense one beside them
    assert sum(hasattr(module, "lora_A") for module in model.modules()) == 2


def test_adapters_load_whole_or_not_at_all():
    model = tiny_model("llama")
    add_lora(model, LORA, seed=0)
    state = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    less, more = {n: each for n, each in state.items() if n != min(state)}, {**state, "norm.weight": torch.ones(16)}
    for other in (less, more):
        with pytest.raises(RuntimeError, match="differ, first in"):
            load_adapters(model, other)
