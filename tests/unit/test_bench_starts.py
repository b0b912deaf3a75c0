"""The benches of starts: the rival's ranks, the metric of a start, and the figure, against plain loops."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from llmdistill.embedded import locate
from llmdistill.factorize.weighted import WeightedSVD
from llmdistill.methods.makd import MakdConfig, build_makd
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer

pytestmark = pytest.mark.tools

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.fixture(autouse=True)
def _scripts_on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.mark.parametrize("seed", range(5))
def test_zero_sum_ranks_are_those_of_a_plain_search(seed):
    from bench_starts import zero_sum_ranks

    shapes = {"a": (6, 10), "b": (8, 8), "c": (12, 5)}
    torch.manual_seed(seed)
    values = {name: torch.rand(min(shape)).sort(descending=True).values for name, shape in shapes.items()}
    slopes = {name: torch.randn(min(shape)) for name, shape in shapes.items()}
    empty = torch.zeros(0)
    factors = {
        name: WeightedSVD(left=empty, values=each, right=empty, energy=0.0, scale=1.0) for name, each in values.items()
    }
    budget = random.Random(seed).randint(60, 150)

    ranks, running = {name: min(shape) for name, shape in shapes.items()}, 0.0

    def params():
        return sum(min(ranks[name] * (m + n), m * n) for name, (m, n) in shapes.items())

    while params() > budget:
        offers = [(float(-values[n][r - 1] * slopes[n][r - 1]), n) for n, r in ranks.items() if r > 1]
        wanted = [each for each in offers if (each[0] > 0) == (running <= 0)] or offers
        change, name = min(wanted, key=lambda each: abs(each[0]))
        running += change
        ranks[name] -= 1
    kept = {name: rank for name, rank in ranks.items() if rank * sum(shapes[name]) < math.prod(shapes[name])}
    assert zero_sum_ranks(factors, slopes, shapes, budget) == kept


def test_the_metric_of_a_start_is_that_of_plain_autograd():
    """G of the values, which no rotation moves, from a hook on the projection; and the term ½ δᵀGδ by a loop."""
    from bench_metric import build_metric, features, measure

    folder = locate("embedded:teacher")
    config = load_model(folder, dtype=torch.float32).config
    method = build_makd(MakdConfig(), config, config)
    text = "Name a river in the north. " * 20
    found = measure(str(folder), text, texts=2, tokens=12, method=method)
    assert {aspect for aspect, _ in found} == {"query", "key", "value", "ffn_up", "ffn_gate"}

    model, gradients = load_model(folder, dtype=torch.float32).requires_grad_(), []

    def watch(_, __, out):
        if out.requires_grad:
            out.register_hook(lambda each: gradients.append(each[0]))

    model.model.layers[1].self_attn.v_proj.register_forward_hook(watch)
    generator = torch.Generator().manual_seed(0)
    ids = load_tokenizer(folder)(text, return_tensors="pt").input_ids[0][:24].reshape(2, 1, 12)
    for piece in ids:
        with torch.no_grad():
            drawn = torch.multinomial(model(piece).logits[0].softmax(-1), 1, generator=generator)[:, 0]
        functional.cross_entropy(model(piece).logits[0, :-1], drawn[:-1], reduction="sum").backward()
    rows = torch.cat(gradients)
    expected = rows.T @ rows / 24
    assert (found["value", 1] - expected).abs().max() < 1e-5 * expected.abs().max()

    terms = {term.name: term for term in build_metric(found).build(MakdConfig(), config, config).layer_terms}
    heads, width = config.num_key_value_heads, config.head_dim
    ((_, last),) = terms["value"].student
    mine, theirs = (torch.randn(1, heads, 3, width) for _ in range(2))
    taps = [type("Taps", (), {"value": {last: each}})() for each in (mine, theirs)]
    total = terms["value"].loss(*taps, torch.tensor([[1, 1, 0]]))
    errors = features(mine - theirs)[0]
    expected = sum(0.5 * errors[t] @ found["value", last] @ errors[t] for t in range(2))
    torch.testing.assert_close(total.sum, expected)
    assert total.count == 2


def test_the_figure_has_a_line_for_each_start_and_the_teacher():
    from bench_starts import draw

    rows = [{"start": "teacher", "all": 1.0, "perplexity": 20.0}]
    rows += [{"start": "a", "all": share, "perplexity": 9 / share} for share in (0.6, 0.8)]
    (axes,) = draw([*rows, {"start": "trained", "all": 0.6, "perplexity": 11.0}], 1000).axes
    labels = {line.get_label(): list(line.get_xdata()) for line in axes.lines}
    assert labels.keys() == {"a", "trained", "teacher"}
    assert labels["a"] == [600, 800]
