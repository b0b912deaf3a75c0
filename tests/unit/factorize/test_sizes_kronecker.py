"""Counts of the paper's Kronecker students from configs alone, and the shapes that plan() accepts."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tiny import tiny_config
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from llmdistill.config import FactorizeConfig, LoraConfig, StudentConfig
from llmdistill.errors import UserError
from llmdistill.factorize.counting import count_parameters
from llmdistill.factorize.install import install
from llmdistill.factorize.sizes import plan, summarize

SIZES = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96}
LLAMA = tiny_config("llama", **SIZES, tie_word_embeddings=True)
BERT = tiny_config("bert", **SIZES)


def meta(config: PreTrainedConfig, auto: Any = AutoModelForCausalLM) -> PreTrainedModel:
    with torch.device("meta"):
        return auto.from_config(config)


def by_hand(m: int, n: int, m1: int, n1: int, sums: int) -> tuple[int, int]:
    """Parameters of a matrix' factors, and eq. 7."""
    m2, n2 = m // m1, n // n1
    b_first = (2 * n2 - 1) * m2 * n1 + (2 * n1 - 1) * m2 * m1
    a_first = (2 * n1 - 1) * n2 * m1 + (2 * n2 - 1) * m2 * m1
    return sums * (m1 * n1 + m2 * n2), sums * min(b_first, a_first) + (sums - 1) * m


# KroneckerBERT Table 1: A of attention and of the first feed-forward matrix (m1, n1), n of the embedding, sums; then
# parameters with and without pooler. Of 8 the table's 7.8x is the count without; 5's are no 5.5x and cannot be: four
# products of 384 x 384 have 589,840 parameters for each matrix of attention, which dense has 589,824.
@pytest.mark.parametrize(("attention", "ffn", "columns", "sums", "student", "without_pooler"), [
    ((384, 384), (8, 2), 8, 1, 14_654_216, 14_063_624),
    ((384, 48), (16, 2), 16, 1, 5_228_272, 4_637_680),
    ((384, 384), (384, 384), 12, 4, 45_529_740, 44_939_148),
], ids=["8", "21", "5"])  # fmt: skip
def test_counts_of_kroneckerbert(attention, ffn, columns, sums, student, without_pooler) -> None:
    (m1, n1), (f1, g1) = attention, ffn
    shapes = {"*.attention.*": f"{m1}x{n1}", "*.intermediate.dense": f"{f1}x{g1}", "*.output.dense": f"{g1}x{f1}"}
    settings = FactorizeConfig(shapes=shapes, embedding_columns=columns, sums=sums)
    summary = summarize(BertConfig(), settings, "kronecker")
    pooler, biases, norms, vocabulary = 768 * 769, 5 * 768 + 3072, 4 * 768, 30_522
    layer = [by_hand(768, 768, m1, n1, sums)] * 4
    layer += [by_hand(3072, 768, f1, g1, sums), by_hand(768, 3072, g1, f1, sums)]
    around = vocabulary * 768 // columns + columns + (512 + 2) * 768 + 2 * 768
    counted = around + 12 * (sum(params for params, _ in layer) + biases + norms)
    assert summary["teacher_params"] == 109_482_240
    assert summary["student_params"] == student == counted + pooler
    assert without_pooler == counted
    assert summary["flops_per_token"] == 12 * sum(flops for _, flops in layer)
    assert summary["teacher_flops_per_token"] == 12 * (5 * 1535 * 768 + 1535 * 3072 - 1535 * 768 + 6143 * 768)
    assert (summary["method"], summary["embedding_columns"], summary["dense"]) == ("kronecker", columns, [])
    assert summary["shapes"]["encoder.layer.0.output.dense"] == [g1, f1, sums]
    assert json.loads(json.dumps(summary)) == summary
    with torch.device("meta"):
        model = AutoModel.from_config(BertConfig())
    install(model, plan(model, settings, "kronecker"))
    assert count_parameters(model) == student


def test_forward_flops_are_two_a_parameter_and_equation_7s_of_the_products() -> None:
    config = BertConfig()
    shapes = {"*.attention.*": "384x48", "*": "dense"}
    summary = summarize(config, FactorizeConfig(shapes=shapes), "kronecker")
    params, flops = by_hand(768, 768, 384, 48, 1)
    assert summary["forward_flops"] == 2 * (summary["student_params"] - 48 * params) + 48 * flops
    low_rank = summarize(config, FactorizeConfig(rank=64))
    assert low_rank["forward_flops"] == 2 * low_rank["student_params"]


@pytest.mark.parametrize(("method", "settings", "words"), [
    ("kronecker", {}, ["no size", "one of shapes, target_params"]),
    ("kronecker", {"shapes": {"*.q_proj": "5x2"}}, ["shapes['*.q_proj'] 5x2", "model.layers.0.self_attn.q_proj",
                                                   "5 rows does not divide the 32 rows", "1, 2, 4, 8, 16, 32"]),
    ("kronecker", {"shapes": {"*.down_proj": "2x5"}}, ["5 columns does not divide the 48 columns"]),
    ("kronecker", {"shapes": {"*.q_proj": "2x2"}, "sums": 5}, ["5 sums", "1 to 4"]),
    ("kronecker", {"shapes": {"*.q_proj": "2x2"}, "sums": 0}, ["sums is 0"]),
    ("kronecker", {"shapes": {"*.q_proj": "2,2"}}, ["shapes['*.q_proj'] '2,2'", "384x48"]),
    ("kronecker", {"shapes": {"*": "2x2"}, "embedding_columns": 5}, ["embedding_columns: 5 columns", "width 32"]),
    ("kronecker", {"shapes": {"*": "2x2", "lm_head": "dense"}, "embedding_columns": 4},
     ["shapes['lm_head']", "tied", "embedding_columns 4"]),
    ("kronecker", {"shapes": {"*": "2x2"}, "max_flops": "30%"}, ["max_flops", "target_params"]),
    ("kronecker", {"target_params": "50%"}, ["needs the weights", "llmdistill compress --method kronecker"]),
    ("kronecker", {"shapes": {"*": "2x2"}, "rank": 4}, ["rank is a setting of the method svd", "kronecker", "null"]),
    ("svd", {"rank": 4, "sums": 2}, ["sums is a setting of the method kronecker"]),
])  # fmt: skip
def test_refuses_in_one_sentence(method: str, settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        plan(meta(LLAMA), FactorizeConfig(**settings), method)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_tied_head_of_an_encoder_cannot_stay_dense() -> None:
    """The model that is counted has no head, the one that learns has."""
    settings = FactorizeConfig(shapes={"*.layer.*": "2x2", "cls.predictions.decoder": "dense"}, embedding_columns=4)
    for auto in (AutoModel, AutoModelForMaskedLM):
        with pytest.raises(UserError, match=r"cls\.predictions\.decoder to stay dense, but it is tied"):
            plan(meta(BERT, auto), settings, "kronecker")


def test_adapters_on_kronecker_products_are_refused_before_a_run() -> None:
    with pytest.raises(ValueError, match=r"student\.lora\.rank: adapters go on linears"):
        StudentConfig(method="kronecker", lora=LoraConfig(rank=4))
    StudentConfig(method="kronecker", lora=LoraConfig(rank=4), model="a student made before")  # looked at when loaded
