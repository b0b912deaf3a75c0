"""The search for shapes against trying every combination with the errors of the nearest products themselves."""

import itertools
import json
from functools import cache

import pytest
import torch
from tiny import shaken, tiny_model

from llmdistill.cli import main
from llmdistill.config import FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.students import options
from llmdistill.students.counting import build_reference, count_parameters, layer_linears
from llmdistill.students.install import matrix
from llmdistill.students.kronecker import (
    KroneckerShape,
    divisors,
    kronecker_flops,
    nearest_kronecker,
    parse_kronecker,
)
from llmdistill.students.search import search
from llmdistill.students.sizes import summarize

WIDTH, FFN, TOKENS = 8, 12, 20


def bert(layers=2):
    sizes = {"hidden_size": WIDTH, "intermediate_size": FFN, "vocab_size": TOKENS, "num_hidden_layers": layers}
    return shaken(tiny_model("bert", **sizes), 0.5)


def missed(weight, shape):
    """Squared error of the nearest product."""
    if shape is None:
        return 0.0
    a, b = (factor.double() for factor in nearest_kronecker(weight, shape))
    product = sum(torch.kron(one, other) for one, other in zip(a, b, strict=True))
    return float((weight.double() - product).square().sum())


@cache
def every_combination(sums):
    """Parameters, FLOPs and error by mean squares of all shapes of `bert`'s attention, feed-forward and embedding."""
    model = bert()
    reference = build_reference(model.config)
    sizes = layer_linears(reference)
    weights = {name: matrix(model.base_model.get_submodule(name)).detach() for name in sizes}
    table = model.get_input_embeddings().weight.detach()
    fixed = count_parameters(reference) - sum(m * n for m, n in sizes.values()) - table.numel()

    def choices(m, n):
        shapes = [KroneckerShape(m1, n1, sums) for m1 in divisors(m) for n1 in divisors(n)]
        return [None, *(s for s in shapes if sums <= min(s.m1 * s.n1, m * n // (s.m1 * s.n1)))]

    def cost(names, shape):
        params, flops, error = 0, 0, 0.0
        mean_square = float(torch.cat([weights[name].flatten() for name in names]).double().square().mean())
        for name in names:
            m, n = sizes[name]
            here = None if shape is None else shape if m >= n else KroneckerShape(shape.n1, shape.m1, shape.sums)
            if here is None:
                params, flops = params + m * n, flops + (2 * n - 1) * m
            else:
                params += sums * (here.m1 * here.n1 + m // here.m1 * (n // here.n1))
                flops += kronecker_flops(m, n, here)
            error += missed(weights[name], here) / mean_square
        return params, flops, error

    def embedding(columns):
        if columns == 1:
            return table.numel(), 0, 0.0
        error = missed(table, KroneckerShape(TOKENS, WIDTH // columns)) / float(table.double().square().mean())
        return TOKENS * WIDTH // columns + columns, 0, error

    attention = [name for name in sizes if ".attention." in name]
    ffn = [name for name in sizes if ".attention." not in name]
    groups = [
        [cost(attention, shape) for shape in choices(WIDTH, WIDTH)],
        [cost(ffn, shape) for shape in choices(FFN, WIDTH)],
        [embedding(columns) for columns in divisors(WIDTH)],
    ]
    totals = ([sum(each) for each in zip(*picks, strict=True)] for picks in itertools.product(*groups))
    return [(fixed + params, flops, error) for params, flops, error in totals]


@pytest.mark.parametrize("sums", [1, 3])
@pytest.mark.parametrize(("first", "second"), [((2, 6), (8, 3)), ((8, 2), (3, 6)), ((1, 4), (9, 3)), ((9, 1), (1, 4))])
def test_flops_are_those_of_the_cheaper_order_of_two_matrix_products(first, second, sums):
    """Of y = B X Aᵀ with the columns of X one after the other, as NumPy's nested loops would count them."""
    (m1, n1), (m2, n2) = first, second

    def product(rows, inner, columns):
        return sum(1 for _ in range(rows * columns) for _ in range(2 * inner - 1))  # products, and additions between

    b_first = product(m2, n2, n1) + product(m2, n1, m1)
    a_first = product(n2, n1, m1) + product(m2, n2, m1)
    assert b_first != a_first
    expected = sums * min(b_first, a_first) + (sums - 1) * m1 * m2
    assert kronecker_flops(m1 * m2, n1 * n2, KroneckerShape(m1, n1, sums)) == expected


def test_a_first_factor_may_be_a_row_or_a_column():
    assert parse_kronecker("1x48") == KroneckerShape(1, 48, 1)
    assert parse_kronecker("48×1", 2) == KroneckerShape(48, 1, 2)


@pytest.mark.parametrize("sums", [1, 2])
@pytest.mark.parametrize("max_flops", [None, "42%"])
def test_it_is_the_best_of_all_combinations(sums, max_flops):
    model = bert()
    dense = 2 * (4 * 15 * WIDTH + 15 * FFN + 23 * WIDTH)
    bound = 10**9 if max_flops is None else int(0.42 * dense)
    tried = every_combination(sums)
    for target in ("70%", "85%"):
        settings = FactorizeConfig(target_params=target, max_flops=max_flops, sums=sums)
        found = search(model, settings)
        most = int(float(target[:-1]) / 100 * count_parameters(build_reference(model.config)))
        inside = [each for each in tried if each[0] <= most and each[1] <= bound]
        best = min(error for _, _, error in inside)
        free = min(each[2] for each in tried if each[0] <= most)
        assert (best > free) == (max_flops is not None)  # the bound makes a difference
        total = 2 * (4 * WIDTH * WIDTH + 2 * WIDTH * FFN) + TOKENS * WIDTH
        assert found[0].relative_error == pytest.approx((best / total) ** 0.5, rel=1e-4)
        assert [each.relative_error for each in found] == sorted(each.relative_error for each in found)
        for each in found:
            summary = summarize(model.config, each.settings, "kronecker")  # counted on the model, not by the search
            assert summary["student_params"] == each.params <= most
            assert summary["flops_per_token"] == each.flops_per_token <= bound
            assert each.flops_share == each.flops_per_token / dense


def test_the_larger_factor_suits_a_gpu_where_the_matrix_is_wide():
    def listed(m, n):
        found = options.Group(label="", m=m, n=n, sums=1, members={"": False}).costs().choices
        return {(each.m1, each.n1) for each in found if each is not None}

    wide = listed(1200, 600)
    assert wide == {
        (m1, n1)
        for m1, n1 in itertools.product(divisors(1200), divisors(600))
        if (m1 % 8 == n1 % 8 == 0 and m1 * n1 >= 1200 * 600 // (m1 * n1))
        or (1200 // m1 % 8 == 600 // n1 % 8 == 0 and m1 * n1 <= 1200 * 600 // (m1 * n1))
        if m1 * n1 + 1200 * 600 // (m1 * n1) < 1200 * 600
    }
    assert (2, 3) in wide
    assert (3, 2) not in wide, "600 / 2 = 300 is no multiple of 8"
    assert (3, 2) in listed(240, 600), "narrow matrices have all shapes"
    assert (3, 3) in listed(297, 297), "where no shape suits, all are tried"


def test_errors_of_few_layers_stand_for_all(monkeypatch):
    """Layers that are all alike: three of them tell the error of seven exactly."""
    model = bert(layers=7)
    layers = model.bert.encoder.layer
    for layer in layers[1:]:
        layer.load_state_dict(layers[0].state_dict())
    settings = FactorizeConfig(target_params="70%")
    found = search(model, settings)[0]
    monkeypatch.setattr(options, "SAMPLED_LAYERS", 7)
    assert search(model, settings)[0].relative_error == pytest.approx(found.relative_error, rel=1e-5)
    monkeypatch.setattr(options, "EXACT_SIDE", 0)  # the randomized SVD
    state = torch.get_rng_state()
    assert search(model, settings)[0].relative_error == pytest.approx(found.relative_error, rel=1e-3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("settings", "said"), [
    ({"target_params": "20%", "embedding_columns": 2}, "20% .*out of reach.*2 embedding columns.* raise the target"),
    ({"target_params": "50%", "max_flops": "1%"}, "max_flops 1%.*less than"),
    ({"target_params": "50%", "max_flops": "half"}, "max_flops 'half'.*30%"),
    ({"target_params": "50%", "embedding_columns": 3}, "3 columns.*1, 2, 4, 8"),
])  # fmt: skip
def test_refuses_in_one_sentence(settings, said):
    with pytest.raises(UserError, match=f"^.*{said}.*$"):
        search(bert(), FactorizeConfig(**settings))


@pytest.mark.parametrize("max_flops", [None, "40%"])
def test_out_of_reach_names_the_nearest_that_is_in_reach(max_flops):
    model = bert()
    with pytest.raises(UserError) as caught:
        search(model, FactorizeConfig(target_params="300", max_flops=max_flops))
    nearest = str(caught.value).split("reach is ")[1].split(" parameters")[0].replace(",", "")
    assert search(model, FactorizeConfig(target_params=nearest, max_flops=max_flops))[0].params == int(nearest)
    with pytest.raises(UserError, match="out of reach"):
        search(model, FactorizeConfig(target_params=str(int(nearest) - 1), max_flops=max_flops))


def test_command_prints_candidates_and_writes_nothing(tmp_path, capsys):
    bert().save_pretrained(tmp_path / "teacher")
    words = ["compress", "--model", str(tmp_path / "teacher"), "--dry_run", "--candidates"]
    search_for = ["--method", "kronecker", "--target_params", "70%"]
    assert main([*words, *search_for, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])  # DeepSpeed may say a word when it is loaded
    first = printed["candidates"][0]
    assert first["params"] == printed["student_params"] <= 0.7 * printed["teacher_params"]
    assert first["settings"] == printed["settings"]
    assert main([*words, *search_for]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "attention 8x8" in lines[0]
    assert len(lines) > 10
    assert f"{first['params']:,}" in lines[1]
    assert main([*words, "--rank", "3"]) == 2
    assert "--method kronecker and --target_params" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["teacher"]
    assert main([*words[:3], *search_for, "--output", str(tmp_path / "student")]) == 0
    assert (tmp_path / "student/config.json").is_file()
