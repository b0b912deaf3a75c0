"""MaKD against a loop over tokens, with the ablations and the placements of the paper's tables."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache

import pytest
import torch
from references import terms_of
from transformers import GPT2Config, LlamaConfig

from llmdistill.batch import Batch, Outputs, Taps
from llmdistill.methods.makd import TERMS, MakdConfig, build_makd

LAYERS = 5  # odd: the lower half has two layers, the upper three


def llama(num_layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
    )


LLAMA = llama(LAYERS)
GPT2 = GPT2Config(vocab_size=50, n_embd=16, n_layer=LAYERS, n_head=4, n_positions=32)

MATRIX = ("query", "key", "value", "ffn_up", "ffn_gate", "ffn_down")
LAYER = ("attention", "hidden")


def off(*names: str) -> dict[str, float]:
    return dict.fromkeys(names, 0.0)


# The rows of the paper's Tables 3 and 4 are settings of the same kinds; experiments/test_variants.py has them.
VARIANTS = {
    "full": MakdConfig(),
    "w/o matrix": MakdConfig(matrix_layers="none"),
    "w/o MHA": MakdConfig(**off("query", "key", "value")),
    "w/o FNN": MakdConfig(**off("ffn_up", "ffn_gate", "ffn_down")),
    "w/o layer": MakdConfig(layer_layers="none"),
    "w/o model": MakdConfig(logits=0.0),
    "weights": MakdConfig(query=2.0, ffn_up=0.5, attention=3.0, hidden=0.25, logits=1.5, label=0.75, temperature=2.0),
    "some layers": MakdConfig(matrix_layers="1-2,4", layer_layers="5", value=0.0),
    "overlap": MakdConfig(matrix_layers="3", layer_layers="3", key=0.0),
    "plain": MakdConfig(matrix_layers="all", layer_layers="all", scale="plain"),
}
PLACES = {
    "lower": {1, 2},
    "upper": {3, 4, 5},
    "all": {1, 2, 3, 4, 5},
    "none": set[int](),
    "1-2,4": {1, 2, 4},
    "5": {5},
    "3": {3},
}


@pytest.fixture(scope="module")
def pairs(models):
    """Two models of one shape by their family, and all that a naive loss reads of them."""

    @cache
    def pair_of(family: str):
        config = models.families[family](LAYERS, 16, 4, 2)
        pair = models.Pair(config, config)
        return pair, *pair.seen()

    return pair_of


def naive(settings: MakdConfig, pair, student, teacher, kl) -> dict[str, float]:
    """The terms of MaKD eq. 12-18, token by token, in fp64."""
    means: dict[str, float] = {}

    def add(name: str, layer: int) -> None:
        def squared(b: int, i: int) -> float:
            mine, theirs = (seen.flat[name, layer][b, i] for seen in (student, teacher))
            return (mine - theirs).square().mean() / (theirs.square().mean() if settings.scale == "token" else 1)

        def attention(b: int, i: int) -> float:
            keys = student.keys_of(pair.batch, b, i)
            rows = ([seen.attentions[layer][b, h, i, keys] for seen in (student, teacher)] for h in range(4))
            return sum(kl(mine, theirs) / 4 for mine, theirs in rows)

        loss = attention if name == "attention" else squared
        means[name] = means.get(name, 0.0) + pair.mean_over_tokens(loss)

    for names, layers in ((MATRIX, settings.matrix_layers), (LAYER, settings.layer_layers)):
        for name in names:
            if name != "ffn_gate" or (name, 0) in student.flat:
                for layer in PLACES[layers]:
                    add(name, layer - 1)
    return {**means, **pair.output_terms(student, teacher, settings.temperature)}


def check(settings: MakdConfig, pair, student, teacher, kl) -> None:
    method = build_makd(settings, pair.teacher_config, pair.student_config)
    weights = {name: weight for name, weight in asdict(settings).items() if name in TERMS}
    expected = {name: mean for name, mean in naive(settings, pair, student, teacher, kl).items() if weights[name]}
    assert method.weights == {name: weights[name] for name in expected}
    found = pair.means(method)
    totals = [sum(weights[name] * means[name] for name in expected) for means in (found, expected)]
    assert totals[0] == pytest.approx(totals[1], rel=1e-5)


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_total_equals_the_naive_loop(models, pairs, family: str, settings: MakdConfig) -> None:
    check(settings, *pairs(family), models.kl)


@pytest.mark.parametrize("family", ["mistral", "bert"])
def test_other_masks_equal_the_naive_loop(models, pairs, family: str) -> None:
    check(MakdConfig(matrix_layers="all", layer_layers="all", label=1.0), *pairs(family), models.kl)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_each_variant_asks_only_for_what_it_needs(settings: MakdConfig, gated: bool) -> None:
    config = LLAMA if gated else GPT2
    method = build_makd(settings, config, config)
    weights = asdict(settings)
    expected: dict[str, set[int]] = {}
    for name in MATRIX:
        if weights[name] and (gated or name != "ffn_gate"):
            expected[name] = {layer - 1 for layer in PLACES[settings.matrix_layers]}
    upper = {layer - 1 for layer in PLACES[settings.layer_layers]}
    expected["hidden"] = upper
    for name in ("query", "key"):  # the attention distribution is built from them
        expected[name] = expected.get(name, set()) | upper
    expected = {name: layers for name, layers in expected.items() if layers}
    assert method.student_taps == method.teacher_taps == expected
    assert all(method.weights.values())


def test_student_that_equals_its_teacher_stays(models) -> None:
    pair = models.Pair(LLAMA, LLAMA, seeds=(0, 0))
    method = build_makd(MakdConfig(matrix_layers="all", layer_layers="all"), LLAMA, LLAMA)
    run = pair.run(method)
    terms = terms_of(method, run.student, run.teacher, pair.batch)
    torch.stack([term.sum / term.count for term in terms.values()]).sum().backward()
    for parameter in pair.student.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() < 1e-5  # rounding in fp32 of gradients that otherwise exceed 0.1


def test_padding_does_not_matter(pairs) -> None:
    """The same sequences with more padding, on either side, give the same terms."""
    pair, *_ = pairs("llama")
    settings = MakdConfig(matrix_layers="all", layer_layers="all", label=1.0)
    method = build_makd(settings, pair.teacher_config, pair.student_config)
    for sides in ((0, 4), (4, 0)):
        assert pair.means(method, pair.padded(sides)) == pytest.approx(pair.means(method), rel=1e-5)


def test_needs_teacher() -> None:
    assert build_makd(MakdConfig(), LLAMA, LLAMA).needs_teacher
    names = [name for name in TERMS if name != "label"]
    method = build_makd(MakdConfig(**off(*names), label=1.0), LLAMA, LLAMA)
    assert not method.needs_teacher
    ids = torch.zeros(3, 8, dtype=torch.int64)
    batch = Batch(ids, torch.ones_like(ids), ids)
    assert list(terms_of(method, Outputs(torch.zeros(3, 8, 50), Taps()), None, batch)) == ["label"]
