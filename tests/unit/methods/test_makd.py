from dataclasses import asdict

import pytest

from llmdistill.errors import UserError
from llmdistill.methods.layers import parse_layers
from llmdistill.methods.makd import MATRIX_TERMS, TERMS, MakdConfig, build_makd

ALL = {1, 2, 3, 4, 5}
SOME = MakdConfig(matrix_layers="1-2,4", layer_layers="5", value=0.0, hidden=0.0)
WEIGHTED = MakdConfig(matrix_layers="3", layer_layers="all", query=2.0, ffn_up=0.5, attention=3.0, hidden=0.25)
PLAIN = MakdConfig(matrix_layers="all", layer_layers="none", logits=1.5, label=0.75, temperature=2.0, scale="plain")
VARIANTS = {
    "default": (MakdConfig(), {1, 2}, {3, 4, 5}),
    "some layers": (SOME, {1, 2, 4}, {5}),
    "weighted": (WEIGHTED, {3}, ALL),
    "plain": (PLAIN, ALL, set()),
}
"""Settings, the layers of the matrices, and the layers of attention and hidden states."""


@pytest.fixture(scope="module", params=["llama", "mistral", "bert"])
def pair(request: pytest.FixtureRequest, models):
    """Two models of one shape, whose 5 layers have a lower half of 2."""
    config = models.families[request.param](5, 16, 4, 2)
    return models.Pair(config, config)


@pytest.mark.parametrize(("settings", "matrix", "layer"), VARIANTS.values(), ids=VARIANTS)
def test_terms_and_taps_are_those_of_the_settings(pair, settings: MakdConfig, matrix: set, layer: set) -> None:
    """MaKD eq. 12-18."""
    method = build_makd(settings, pair.teacher_config, pair.student_config)
    student, _ = pair.seen
    weights = {name: weight for name, weight in asdict(settings).items() if name in TERMS and weight}
    of_matrices, of_layers = ([(number - 1, number - 1) for number in numbers] for numbers in (matrix, layer))
    places = {name: of_matrices for name in MATRIX_TERMS if (name, 0) in student.flat}
    places |= {"attention": of_layers, "hidden": of_layers}
    places = {name: pairs for name, pairs in places.items() if pairs and name in weights}
    expected = {
        name: pair.attention_kl(pairs, "student_teacher")
        if name == "attention"
        else pair.feature_error(name, pairs, settings.scale)
        for name, pairs in places.items()
    }
    expected |= {name: mean for name, mean in pair.output_terms(settings.temperature).items() if name in weights}
    assert method.weights == {name: weights[name] for name in expected}
    assert pair.means(method) == pytest.approx(expected, rel=1e-4)
    taps: dict[str, set[int]] = {}
    for name, pairs in places.items():
        for aspect in ("query", "key") if name == "attention" else (name,):
            taps.setdefault(aspect, set()).update(layer for layer, _ in pairs)
    assert method.student_taps == method.teacher_taps == taps


def test_layers_are_the_students_and_the_map_says_which_teach_them(models) -> None:
    pair = models.Pair(models.bert(5, 16, 4, 4), models.bert(3, 16, 4, 4))
    settings = MakdConfig(teacher_layers="5,0,2", matrix_layers="all", layer_layers="2-3")
    means = pair.means(build_makd(settings, pair.teacher_config, pair.student_config))
    for name in ("query", "key", "value"):
        assert means[name] == pytest.approx(pair.feature_error(name, [(0, 4), (2, 1)], "token"), rel=1e-4)
    assert means["hidden"] == pytest.approx(pair.feature_error("hidden", [(2, 1)], "token"), rel=1e-4)
    assert means["attention"] == pytest.approx(pair.attention_kl([(2, 1)], "student_teacher"), rel=1e-4)


@pytest.mark.parametrize(("spec", "num_layers", "expected"), [
    ("lower", 5, (0, 1)), ("upper", 5, (2, 3, 4)), ("lower", 1, ()), ("upper", 1, (0,)),
    ("all", 3, (0, 1, 2)), ("none", 3, ()), ("6, 1 - 2", 6, (0, 1, 5)), ("2,2,1-2", 2, (0, 1)),
])  # fmt: skip
def test_layers(spec: str, num_layers: int, expected: tuple[int, ...]) -> None:
    assert parse_layers(spec, num_layers, key="k") == expected


@pytest.mark.parametrize("spec", ["0", "5", "3-2", "1,,2", "middle"])
def test_what_is_no_list_of_layers(spec: str) -> None:
    with pytest.raises(UserError, match=r"makd\.matrix_layers is .* 4 layers"):
        parse_layers(spec, 4, key="makd.matrix_layers")
