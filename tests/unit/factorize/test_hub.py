"""A student is a Hugging Face model: saved, loaded, cast, placed, generated from, trained and saved again."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
    XLMRobertaConfig,
)

import llmdistill
from llmdistill.config import FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.factorize import count_parameters, factorize, hub, plan

DECODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 66,
}
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 96,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def config_of(model_type: str, **changes: Any) -> PreTrainedConfig:
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "llama": (LlamaConfig, {**DECODER, "tie_word_embeddings": True}),
        "mistral": (MistralConfig, {**DECODER, "tie_word_embeddings": True}),
        "qwen2": (Qwen2Config, {**DECODER, "tie_word_embeddings": True}),
        "qwen3": (Qwen3Config, {**DECODER, "head_dim": 8, "tie_word_embeddings": True}),
        "gpt2": (GPT2Config, GPT2),
        "bert": (BertConfig, ENCODER),
        "roberta": (RobertaConfig, ENCODER),
        "xlm-roberta": (XLMRobertaConfig, ENCODER),
    }
    kind, values = kinds[model_type]
    return kind(**{**values, **changes})


def make_student(
    auto: Any, config: PreTrainedConfig, embedding_rank: int | None = None, rank: int = 9
) -> PreTrainedModel:
    torch.manual_seed(0)
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases are zero when fresh, and would not be missed
            parameter.add_(0.1 * torch.randn_like(parameter))
    settings = FactorizeConfig(rank=rank, embedding_rank=embedding_rank)
    factorize(model, plan(model, settings), embedding_rank=embedding_rank)
    return model


@torch.no_grad()
def outputs(model: PreTrainedModel) -> torch.Tensor:
    input_ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(1))
    return model(input_ids=input_ids.to(model.device))[0]


# fmt: off
CASES = [
    *[(AutoModelForCausalLM, config_of(kind)) for kind in ("llama", "mistral", "qwen2", "qwen3", "gpt2")],
    *[(AutoModelForCausalLM, config_of(kind, tie_word_embeddings=False)) for kind in ("llama", "gpt2")],
    *[(AutoModelForMaskedLM, config_of(kind)) for kind in ("bert", "roberta", "xlm-roberta")],
    (AutoModel, config_of("bert")),
    (AutoModelForSequenceClassification, config_of("roberta")),
]
# fmt: on


@pytest.mark.parametrize("embedding_rank", [None, 20])
@pytest.mark.parametrize(("auto", "config"), CASES)
def test_round_trip_is_bit_equal(
    tmp_path: Path, auto: Any, config: PreTrainedConfig, embedding_rank: int | None
) -> None:
    student = make_student(auto, config, embedding_rank)
    expected = outputs(student)
    student.save_pretrained(tmp_path / "once")
    loaded, info = auto.from_pretrained(tmp_path / "once", output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(outputs(loaded), expected)
    assert count_parameters(loaded) == count_parameters(student)
    assert not getattr(loaded, "is_quantized", False)

    loaded.save_pretrained(tmp_path / "twice", max_shard_size="10KB")
    assert len(list((tmp_path / "twice").glob("*.safetensors"))) > 1
    again = auto.from_pretrained(tmp_path / "twice")
    assert torch.equal(outputs(again), expected)
    assert (tmp_path / "once/config.json").read_text() == (tmp_path / "twice/config.json").read_text()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_tied_head_shares_the_factors(tmp_path: Path, kind: str) -> None:
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    student = make_student(auto, config_of(kind), embedding_rank=20)
    student.save_pretrained(tmp_path)
    for model in (student, auto.from_pretrained(tmp_path)):
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        assert head.B.weight is embedding.A.weight
        assert head.A.weight is embedding.B.weight
        # logits = (h Bᵀ) Aᵀ is h Eᵀ for the matrix E that the embedding looks up in.
        table = embedding(torch.arange(96))
        hidden = torch.randn(3, 32)
        bias = 0 if head.B.bias is None else head.B.bias
        torch.testing.assert_close(head(hidden), hidden @ table.T + bias)


def test_untied_head_stays_dense() -> None:
    student = make_student(AutoModelForCausalLM, config_of("llama", tie_word_embeddings=False), embedding_rank=20)
    assert type(student.get_output_embeddings()) is torch.nn.Linear


def test_any_head_loads_a_student_of_another(tmp_path: Path) -> None:
    masked = make_student(AutoModelForMaskedLM, config_of("bert"), embedding_rank=20)
    masked.save_pretrained(tmp_path / "masked")
    base = AutoModel.from_pretrained(tmp_path / "masked", add_pooling_layer=False)
    input_ids = torch.tensor([[4, 5, 6]])
    with torch.no_grad():
        expected = masked.bert(input_ids=input_ids)[0]
        assert torch.equal(base(input_ids=input_ids)[0], expected)
        base.save_pretrained(tmp_path / "base")
        classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
        assert torch.equal(classifier.bert(input_ids=input_ids)[0], expected)


@pytest.mark.parametrize("kwargs", [
    {"dtype": torch.bfloat16}, {"device_map": {"": "cpu"}}, {"device_map": "auto"}, {"low_cpu_mem_usage": True},
])  # fmt: skip
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_loading_options(tmp_path: Path, kind: str, kwargs: dict[str, Any]) -> None:
    student = make_student(AutoModelForCausalLM, config_of(kind), embedding_rank=20)
    student.save_pretrained(tmp_path)
    dtype = kwargs.get("dtype", torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **kwargs)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    for parameter in student.parameters():  # not student.to(): that would also round the rotary frequencies
        parameter.data = parameter.data.to(dtype)
    assert torch.equal(outputs(loaded), outputs(student))


def test_modules_on_disk_are_fetched(tmp_path: Path) -> None:
    student = make_student(AutoModelForCausalLM, config_of("llama"), embedding_rank=20)
    student.save_pretrained(tmp_path)
    places = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    layers = {"model.layers.0": "cpu", "model.layers.1": "disk"}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, device_map={**places, **layers}, offload_folder=tmp_path / "offload"
    )
    assert torch.equal(outputs(loaded), outputs(student))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("embedding_rank", [None, 20])
def test_generate_with_cache_equals_without(tmp_path: Path, kind: str, embedding_rank: int | None) -> None:
    make_student(AutoModelForCausalLM, config_of(kind), embedding_rank).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt = torch.tensor([[5, 6, 7], [8, 9, 10]])
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 12, "pad_token_id": 1}
    with_cache = model.generate(prompt, use_cache=True, **options)
    assert with_cache.shape[1] > 3
    assert torch.equal(with_cache, model.generate(prompt, use_cache=False, **options))


def test_loaded_student_trains_and_casts(tmp_path: Path) -> None:
    make_student(AutoModelForCausalLM, config_of("llama"), embedding_rank=20).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    input_ids = torch.randint(0, 96, (2, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert model.half().float().dtype == torch.float32  # transformers refuses both for what it deems quantised


def test_loading_draws_no_random_numbers(tmp_path: Path) -> None:
    make_student(AutoModelForCausalLM, config_of("gpt2")).save_pretrained(tmp_path)
    before = torch.get_rng_state()
    AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_adapters_go_on_the_factors() -> None:
    peft = pytest.importorskip("peft")
    student = make_student(AutoModelForCausalLM, config_of("llama"))
    expected = outputs(student)
    adapted = peft.get_peft_model(student, peft.LoraConfig(r=2, target_modules=["A", "B"]))
    assert torch.equal(outputs(adapted), expected)  # LoRA starts at zero
    assert sum(name.endswith("A.lora_A.default") for name, _ in adapted.named_modules()) == 14


def test_registration_is_idempotent() -> None:
    hub.register()
    importlib.reload(llmdistill)
    assert llmdistill.__version__


def test_import_is_cheap() -> None:
    code = "import sys, llmdistill; assert 'deepspeed' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


def test_config_json_says_what_was_done(tmp_path: Path) -> None:
    make_student(AutoModelForCausalLM, config_of("gpt2"), embedding_rank=20).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    names = [
        f"h.{layer}.{part}" for layer in (0, 1) for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    ]
    assert saved == {
        "quant_method": "llmdistill",
        "method": "svd",
        "modules": dict.fromkeys(names, 9),
        "embedding_rank": 20,
    }


@pytest.mark.parametrize(("changes", "word"), [
    ({"method": "fourier"}, "'fourier'"),
    ({"blocks": 3}, "blocks"),
    ({"modules": {"layers.7.mlp.up_proj": 3}}, "layers.7.mlp.up_proj"),
    ({"modules": {"layers.0.mlp": 3}}, "LlamaMLP"),
])  # fmt: skip
def test_foreign_config_is_refused(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    make_student(AutoModelForCausalLM, config_of("llama")).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"].update(changes)
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=word):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_factorising_while_loading_is_refused(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(config_of("llama")).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="factorize"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=hub.FactorizedConfig())
