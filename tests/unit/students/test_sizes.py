"""Parameter counts of the papers' models from configs alone, and what plan_factors() accepts."""

import json
import re
from dataclasses import replace

import pytest
import torch
from shrunk import shrunk_model
from tiny import random_student, tiny_config
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
)

from llmdistill.config import FactorizeConfig
from llmdistill.config.command_line import with_values
from llmdistill.errors import UserError
from llmdistill.students.counting import build_reference, count_parameters
from llmdistill.students.install import can_factorize_embedding, install
from llmdistill.students.sizes import describe_params, parse_target, plan_factors, rank_budget, summarize

LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
LLAMA_1B |= {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True}


def meta(config, auto=AutoModelForCausalLM):
    with torch.device("meta"):
        return auto.from_config(config)


def tiny_llama(**changes):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96}
    return meta(tiny_config("llama", **{**sizes, "tie_word_embeddings": True, **changes}))


@pytest.mark.parametrize(("config", "settings", "teacher", "student"), [
    (BertConfig(), {"rank": 256}, 109_482_240, 67_014_912),  # MaKD's 67.0M
    (GPT2Config(), {"rank": 256}, 124_439_808, 77_253_888),  # c_attn as one 768×2304 matrix
    # MaKD_64's 24.1M needs the embedding too; ranks 394 to 397 round to it.
    (BertConfig(), {"rank": 64, "embedding_rank": 395}, 109_482_240, 24_083_070),
    # k_proj and v_proj (2048×512) stay dense: they shrink at ranks under 410 only.
    (LlamaConfig(**LLAMA_1B), {"target_params": "0.69B", "rank_multiple": 1}, 1_235_814_400, 689_768_448),
])  # fmt: skip
def test_published_counts(config, settings, teacher, student):
    summary = summarize(config, FactorizeConfig(**settings))
    assert summary["teacher_params"] == teacher
    assert summary["student_params"] == student
    assert summary["ratio"] == student / teacher
    assert summary["forward_flops"] == 2 * student
    if config.model_type == "llama":
        assert summary["rank"] == 632
        assert len(summary["ranks"]) == 5 * 16
        assert {name.rsplit(".", 1)[1] for name in summary["dense"]} == {"k_proj", "v_proj"}


def by_hand(m, n, m1, n1, sums):
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
def test_counts_of_kroneckerbert(attention, ffn, columns, sums, student, without_pooler):
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
    factors = 12 * sum(params for params, _ in layer)
    assert summary["forward_flops"] == 2 * (student - factors) + summary["flops_per_token"]


@pytest.mark.parametrize("form", ["plain", "pivoted"])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("embedding_rank", [None, 20])
def test_target_is_the_largest_rank_below(tie, embedding_rank, form):
    def count(settings):
        model = tiny_llama(tie_word_embeddings=tie)
        install(model, plan_factors(model, FactorizeConfig(**settings, embedding_rank=embedding_rank, form=form)))
        return count_parameters(model)

    by_rank = {rank: count({"rank": rank}) for rank in range(4, 9)}
    for rank in range(4, 8):
        assert count({"target_params": str(by_rank[rank])}) == by_rank[rank]
        assert count({"target_params": str(by_rank[rank + 1] - 1)}) == by_rank[rank]


def wide_llama(width, layers=5):
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "vocab_size": 64}
    return meta(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=True))


@pytest.mark.parametrize("form", ["plain", "pivoted"])
@pytest.mark.parametrize("target", ["30%", "60%", "93%"])
@pytest.mark.parametrize(("width", "multiple", "units"), [
    (1024, "auto", {1024: 64, 256: 8}), (512, "auto", {512: 8, 128: 1}), (128, "auto", {128: 1, 32: 1}),
    (512, 1, {512: 1, 128: 1}), (512, 48, {512: 48, 128: 48}),
])  # fmt: skip
def test_a_target_is_spent_on_multiples(width, multiple, units, target, form):
    model, settings = wide_llama(width), {"target_params": target, "form": form}
    shapes = {
        name: tuple(model.get_submodule(name).weight.shape)
        for name in plan_factors(model, FactorizeConfig(rank=1)).sizes
    }
    ranks = plan_factors(model, FactorizeConfig(**settings, rank_multiple=multiple)).sizes
    exact = plan_factors(model, FactorizeConfig(**settings, rank_multiple=1)).sizes
    (rank,) = set(exact.values())
    for name, given in ranks.items():
        unit = units[min(shapes[name])]
        assert given % (unit if given >= unit else 8 if unit == 64 else 1) == 0
        assert abs(given - rank) <= 2 * max(units.values())

    def count(sizes):
        student = wide_llama(width)
        install(student, replace(plan_factors(student, FactorizeConfig(rank=1, form=form)), sizes=sizes))
        return count_parameters(student)

    most, spent, spent_exactly = parse_target(target, count_parameters(model)), count(ranks), count(exact)
    # The next rank takes one more row and column of each matrix, and one matrix may be short of one multiple.
    steps = sum(map(sum, shapes.values())), max(units[min(shape)] * sum(shape) for shape in shapes.values())
    # A narrow matrix has few multiples of 48, of which the next may be as large as the matrix.
    assert spent <= most if multiple == 48 else most - sum(steps) < spent <= most
    assert spent_exactly <= most
    # A target of what was spent gives the same student, as comparisons of starts rely on.
    assert (
        plan_factors(model, FactorizeConfig(**{**settings, "target_params": str(spent)}, rank_multiple=multiple)).sizes
        == ranks
    )


def test_parameters_are_a_limit_until_the_data_have_decided_the_ranks():
    config, size = tiny_config("llama"), {"target_params": "85%"}
    by_data = summarize(config, FactorizeConfig(**size, weighting="gradients", allocation="loss"))
    known = summarize(config, FactorizeConfig(**size, allocation="uniform"))
    assert describe_params(by_data) == f"up to {by_data['student_params']:,}"
    assert describe_params(known) == f"{known['student_params']:,}"


def test_a_rank_that_is_given_stays():
    assert set(plan_factors(wide_llama(1024), FactorizeConfig(rank=101)).sizes.values()) == {101}
    assert set(plan_factors(wide_llama(1024), FactorizeConfig(ranks={"*.q_proj": 101})).sizes.values()) == {101}


def test_parse_target():
    texts = ("690_000_000", "0.69B", "77.25M", "500k", " 12.5 % ")
    found = [parse_target(text, 1_000_000_000) for text in texts]
    assert found == [690_000_000, 690_000_000, 77_250_000, 500_000, 125_000_000]
    for text in ("", "-5M", "1.2.3B", "5T", "1e9", "100%"):
        with pytest.raises(UserError, match="target_params"):
            parse_target(text, 1_000_000_000)


def test_patterns_first_match_counts_and_is_literal():
    given = {"model.layers.0.*.q_proj": 32, "*.q_proj": 4, "*.mlp.*": 7}
    ranks = plan_factors(tiny_llama(), FactorizeConfig(ranks=given)).sizes
    assert ranks["model.layers.0.self_attn.q_proj"] == 32
    assert ranks["model.layers.1.self_attn.q_proj"] == 4
    assert ranks["model.layers.1.mlp.down_proj"] == 7
    assert len(ranks) == 2 + 6


REFUSED = [
    ("svd", {}, "no size.* one of rank, ranks, target_params"),
    ("svd", {"rank": 4, "target_params": "50%"}, "exactly one.*rank and target_params"),
    ("svd", {"rank": 17}, "rank 17 .*0.self_attn.k_proj.* 1 to 16"),
    ("svd", {"rank": 0}, "rank 0 .*from 1"),
    ("svd", {"ranks": {"*.q_proj": 33}}, r"ranks\['\*.q_proj'\] 33 .*layers.0.self_attn.q_proj.* 1 to 32"),
    ("svd", {"ranks": {"*.q_porj": 3}}, r"'\*.q_porj' in ranks matches no linear .*q_proj"),
    ("svd", {"ranks": {"*.k_proj": 16}, "form": "pivoted"}, "its rank can be from 1 to 15"),
    ("svd", {"rank": 4, "embedding_rank": 40}, "embedding_rank 40 .*96×32 .* 32"),
    ("svd", {"rank": 4, "sums": 2}, "sums is a setting of the method kronecker.*back to 1"),
    ("kronecker", {"shapes": {"*.q_proj": "5x2"}}, r"shapes\['\*.q_proj'\] 5x2 for model.layers.0.self_attn.q_proj.* "
                                                   "5 rows does not divide the 32 rows.*1, 2, 4, 8, 16, 32"),
    ("kronecker", {"shapes": {"*.down_proj": "2x5"}}, "5 columns does not divide the 48 columns"),
    ("kronecker", {"shapes": {"*.q_proj": "2x2"}, "sums": 5}, "5 sums.*1 to 4"),
    ("kronecker", {"shapes": {"*.q_proj": "2x2"}, "sums": 0}, "sums is 0"),
    ("kronecker", {"shapes": {"*.q_proj": "2,2"}}, r"shapes\['\*.q_proj'\] '2,2'.*384x48"),
    ("kronecker", {"shapes": {"*": "2x2"}, "embedding_columns": 5}, "embedding_columns: 5 columns.*width 32"),
    ("kronecker", {"shapes": {"*": "2x2"}, "max_flops": "30%"}, "max_flops.*target_params"),
    ("kronecker", {"target_params": "50%"}, "needs the weights.*llmdistill compress --method kronecker"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "settings", "said"), REFUSED)
def test_refuses_in_one_sentence(method, settings, said):
    with pytest.raises(UserError, match=f"^.*{said}.*$"):
        plan_factors(tiny_llama(), FactorizeConfig(**settings), method)


@pytest.mark.parametrize(("settings", "said"), [
    ({"rank": 4, "sigma": "balanced", "form": "pivoted"}, "sigma is balanced, but pivoted factors have no singular"),
    ({"rank": 8, "allocation": "loss"}, "allocation loss spends target_params"),
    ({"target_params": "50%", "allocation": "loss", "weighting": "activations"}, "weighting gradients"),
    ({"rank": 8, "rank_multiple": 0}, "rank_multiple is 0"),
])  # fmt: skip
def test_settings_that_contradict_each_other(settings, said):
    with pytest.raises(ValueError, match=said):
        with_values(FactorizeConfig(), settings, key="")


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForMaskedLM])
def test_a_tied_head_of_an_encoder_cannot_stay_dense(auto):
    """The model that is counted has no head, the one that learns has."""
    settings = FactorizeConfig(shapes={"*.layer.*": "2x2", "cls.predictions.decoder": "dense"}, embedding_columns=4)
    with pytest.raises(UserError, match=r"cls\.predictions\.decoder to stay dense, but it is tied"):
        plan_factors(meta(tiny_config("bert"), auto), settings, "kronecker")


def test_an_embedding_whose_table_another_module_has_stays_dense():
    model = shrunk_model("prophetnet as a decoder")
    assert not can_factorize_embedding(model)
    with pytest.raises(
        UserError, match=r"shares its table with prophetnet\.word_embeddings\.weight; leave embedding_rank"
    ):
        plan_factors(model, FactorizeConfig(rank=4, embedding_rank=4))


def test_out_of_reach_target_names_a_range_that_is_reachable():
    with pytest.raises(UserError) as caught:
        plan_factors(tiny_llama(), FactorizeConfig(target_params="1000"))
    least, most = re.search(r"give ([\d,]+) to ([\d,]+)", str(caught.value)).groups()
    for bound, rank in ((least, 1), (most, 19)):
        ranks = plan_factors(tiny_llama(), FactorizeConfig(target_params=bound.replace(",", ""))).sizes
        assert set(ranks.values()) == {rank}


def test_reference_of_a_student_is_factorized(tmp_path):
    config = tiny_config("llama", tie_word_embeddings=True)
    student = random_student(AutoModelForCausalLM, config, {"rank": 5, "embedding_rank": 8})
    student.save_pretrained(tmp_path)
    for config in (student.config, AutoConfig.from_pretrained(tmp_path)):
        assert count_parameters(build_reference(config)) == count_parameters(student)
    with pytest.raises(UserError, match="already"):
        summarize(tmp_path, FactorizeConfig(rank=4))


def test_the_budget_of_ranks_is_what_all_else_leaves():
    model = tiny_llama()
    settings = FactorizeConfig(target_params="70%", weighting="gradients", allocation="loss")
    linears = {name: weight.numel() for name, weight in model.named_parameters() if "_proj" in name}
    fixed = sum(weight.numel() for weight in model.parameters()) - sum(linears.values())
    left = int(0.7 * (fixed + sum(linears.values()))) - fixed
    assert rank_budget(model, settings) == pytest.approx(left, abs=1)
    dense = ["layers.0.mlp.up_proj", "layers.1.self_attn.k_proj"]
    taken = sum(linears[f"model.{name}.weight"] for name in dense)
    assert rank_budget(model, settings, dense) == rank_budget(model, settings) - taken
