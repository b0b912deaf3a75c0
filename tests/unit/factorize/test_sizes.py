"""Parameter counts of the papers' models from configs alone, and what plan() accepts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_config
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from llmdistill.config import FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.factorize.convert import factorize
from llmdistill.factorize.counting import build_reference, count_parameters, layer_linears
from llmdistill.factorize.install import features, install
from llmdistill.factorize.sizes import parse_target, plan, summarize

LLAMA_1B = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}

DECODER_LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

DISTILBERT = {"q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"}


def meta(config: PreTrainedConfig, auto: Any = AutoModelForCausalLM) -> PreTrainedModel:
    with torch.device("meta"):
        return auto.from_config(config)


def tiny_llama(**changes: Any) -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96, "tie_word_embeddings": True}
    return meta(tiny_config("llama", **{**sizes, **changes}))


@pytest.mark.parametrize(("config", "settings", "teacher", "student"), [
    (BertConfig(), {"rank": 256}, 109_482_240, 67_014_912),  # MaKD's 67.0M
    (GPT2Config(), {"rank": 256}, 124_439_808, 77_253_888),  # c_attn as one 768×2304 matrix
    # MaKD_64's 24.1M needs the embedding too; ranks 394 to 397 round to it.
    (BertConfig(), {"rank": 64, "embedding_rank": 395}, 109_482_240, 24_083_070),
    # k_proj and v_proj (2048×512) stay dense: they shrink at ranks under 410 only.
    (LlamaConfig(**LLAMA_1B), {"target_params": "0.69B"}, 1_235_814_400, 689_768_448),
])  # fmt: skip
def test_published_counts(config: PreTrainedConfig, settings: dict[str, Any], teacher: int, student: int) -> None:
    summary = summarize(config, FactorizeConfig(**settings))
    assert summary["teacher_params"] == teacher
    assert summary["student_params"] == student
    assert summary["ratio"] == student / teacher
    if config.model_type == "llama":
        assert summary["rank"] == 632
        assert len(summary["ranks"]) == 5 * 16
        assert {name.rsplit(".", 1)[1] for name in summary["dense"]} == {"k_proj", "v_proj"}


@pytest.mark.parametrize(("name", "auto", "linears"), [
    *((name, AutoModelForCausalLM, DECODER_LINEARS) for name in ("llama", "mistral", "qwen2", "qwen3")),
    ("gpt2", AutoModelForCausalLM, {"c_attn", "c_proj", "c_fc"}),
    *(("bert", auto, {"query", "key", "value", "dense"}) for auto in (AutoModelForMaskedLM, AutoModel)),
    ("roberta", AutoModelForMaskedLM, {"query", "key", "value", "dense"}),
    ("distilbert", AutoModelForMaskedLM, DISTILBERT),
])  # fmt: skip
def test_only_linears_of_the_layers(name: str, auto: Any, linears: set[str]) -> None:
    model = meta(tiny_config(name), auto)
    found = layer_linears(model)
    assert {each.rsplit(".", 1)[1] for each in found} == linears
    assert all(re.search(r"\.\d+\.", f".{each}") for each in found)  # all have a layer number
    assert all(features(model.get_submodule(each)) == shape for each, shape in found.items())
    assert len(found) == 2 * {"gpt2": 4, "bert": 6, "roberta": 6, "distilbert": 6}.get(name, 7)


@pytest.mark.parametrize("form", ["plain", "pivoted"])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("embedding_rank", [None, 20])
def test_target_is_the_largest_rank_below(tie: bool, embedding_rank: int | None, form: Any) -> None:
    def count(settings: dict[str, Any]) -> int:
        model = tiny_llama(tie_word_embeddings=tie)
        install(model, plan(model, FactorizeConfig(**settings, embedding_rank=embedding_rank, form=form)))
        return count_parameters(model)

    by_rank = {rank: count({"rank": rank}) for rank in range(4, 9)}
    for rank in range(4, 8):
        assert count({"target_params": str(by_rank[rank])}) == by_rank[rank]
        assert count({"target_params": str(by_rank[rank + 1] - 1)}) == by_rank[rank]


@pytest.mark.parametrize(
    ("text", "params"),
    [("690000000", 690_000_000), ("690_000_000", 690_000_000), ("0.69B", 690_000_000), ("77.25M", 77_250_000),
     ("500k", 500_000), ("62%", 620_000_000), (" 12.5 % ", 125_000_000)],
)  # fmt: skip
def test_parse_target(text: str, params: int) -> None:
    assert parse_target(text, 1_000_000_000) == params


@pytest.mark.parametrize("text", ["", "many", "-5M", "1.2.3B", "5T", "1e9", "2B", "100%"])
def test_parse_target_refuses(text: str) -> None:
    with pytest.raises(UserError, match="target_params"):
        parse_target(text, 1_000_000_000)


def test_patterns_first_match_counts_and_is_literal() -> None:
    ranks = plan(
        tiny_llama(), FactorizeConfig(ranks={"model.layers.0.*.q_proj": 32, "*.q_proj": 4, "*.mlp.*": 7})
    ).sizes
    assert ranks["model.layers.0.self_attn.q_proj"] == 32
    assert ranks["model.layers.1.self_attn.q_proj"] == 4
    assert ranks["model.layers.1.mlp.down_proj"] == 7
    assert len(ranks) == 2 + 6


@pytest.mark.parametrize(("settings", "words"), [
    ({}, ["no size", "rank, ranks, target_params"]),
    ({"rank": 4, "target_params": "50%"}, ["exactly one", "rank and target_params"]),
    ({"rank": 17}, ["rank 17", "model.layers.0.self_attn.k_proj", "16"]),
    ({"rank": 0}, ["rank 0", "from 1"]),
    ({"ranks": {"*.q_proj": 33}}, ["*.q_proj", "33", "model.layers.0.self_attn.q_proj", "32"]),
    ({"ranks": {"*.q_porj": 3}}, ["'*.q_porj'", "q_proj"]),
    ({"ranks": {"lm_head": 3}}, ["'lm_head'", "transformer layers"]),
    ({"rank": 4, "embedding_rank": 40}, ["embedding_rank 40", "96×32", "32"]),
    ({"target_params": "3000"}, ["3000", "out of reach", "embedding_rank"]),
])  # fmt: skip
def test_refuses_in_one_sentence(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        plan(tiny_llama(), FactorizeConfig(**settings))
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_out_of_reach_target_names_a_range_that_is_reachable() -> None:
    with pytest.raises(UserError) as caught:
        plan(tiny_llama(), FactorizeConfig(target_params="1000"))
    least, most = re.search(r"give ([\d,]+) to ([\d,]+)", str(caught.value)).groups()  # type: ignore[union-attr]
    for bound, rank in ((least, 1), (most, 19)):
        ranks = plan(tiny_llama(), FactorizeConfig(target_params=bound.replace(",", ""))).sizes
        assert set(ranks.values()) == {rank}


@pytest.mark.parametrize("content", [None, "{not json", '{"model_type": "nonesuch"}'])
def test_summarize_refuses_what_is_no_model(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json"):
        summarize(tmp_path, FactorizeConfig(rank=4))


def test_reference_of_a_student_is_factorized(tmp_path: Path) -> None:
    torch.manual_seed(0)
    student = AutoModelForCausalLM.from_config(tiny_config("llama", tie_word_embeddings=True))
    factorize(student, plan(student, FactorizeConfig(rank=5, embedding_rank=8)))
    student.save_pretrained(tmp_path)
    for config in (student.config, AutoConfig.from_pretrained(tmp_path)):
        assert count_parameters(build_reference(config)) == count_parameters(student)
    with pytest.raises(UserError, match="already"):
        summarize(tmp_path, FactorizeConfig(rank=4))
