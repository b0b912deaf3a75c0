from dataclasses import replace

import pytest

from llmdistill.methods.minilm import MinilmConfig, build_minilm

LAYERS = {
    "last": (MinilmConfig(), [(1, 4)]),
    "another": (MinilmConfig(teacher_layer=2, attention=2.0, value_mse=0.5), [(1, 1)]),
    "mapped": (MinilmConfig(teacher_layers="5,2", value_mse=0.5, hidden_mse=2.0, scale="plain"), [(0, 4), (1, 1)]),
    "hidden states": (
        MinilmConfig(value_relation=0.0, hidden_relation=2.0, hidden_mse=0.5, teacher_layers="4,1"),
        [(0, 3), (1, 0)],
    ),
}
TERMS = ("attention", "value_relation", "value_mse", "hidden_relation", "hidden_mse")


def naive(pair, method, layers: list[tuple[int, int]], scale: str = "token") -> dict[str, float]:
    """MiniLM §3.1 and §3.2, and the ablations' terms, token by token and head by head, in fp64."""
    made = pair.run(method).projectors
    projectors = {name: made[name].weight.detach().double() for name in method.projections}
    heads = pair.seen[0].heads
    means = {
        "attention": lambda: pair.attention_kl(layers, "teacher_student"),
        "value_relation": lambda: pair.relation_kl(("value", "value"), layers, heads, repeated=True),
        "value_mse": lambda: pair.feature_error("value", layers, scale, projectors),
        "hidden_relation": lambda: pair.relation_kl(("hidden", "hidden"), layers, heads),
        "hidden_mse": lambda: pair.feature_error("hidden", layers, scale, projectors),
    }
    return {name: means[name]() for name in method.weights}


@pytest.mark.parametrize(("settings", "layers"), LAYERS.values(), ids=LAYERS)
def test_terms_equal_the_naive_loop(pair, settings: MinilmConfig, layers: list[tuple[int, int]]) -> None:
    method = build_minilm(settings, pair.teacher_config, pair.student_config)
    assert method.weights == {name: getattr(settings, name) for name in TERMS if getattr(settings, name)}
    assert set(method.positions.values()) == {"tokens"}
    assert pair.means(method) == pytest.approx(naive(pair, method, layers, settings.scale), rel=1e-4)


@pytest.mark.parametrize(("teacher", "student", "value_mse"), [
    ((3, 24, 6, 3), (2, 12, 6, 2), 0.0),  # value heads that do not divide each other
    ((3, 32, 4, 2), (2, 16, 4, 4), 1.0),  # 2 value heads of 8 and 4 of 4: no matrix is needed
])  # fmt: skip
def test_value_heads_of_another_number(models, teacher, student, value_mse) -> None:
    pair = models.Pair(models.llama(*teacher), models.llama(*student))
    method = build_minilm(MinilmConfig(value_mse=value_mse), pair.teacher_config, pair.student_config)
    assert not method.projections
    assert pair.means(method) == pytest.approx(naive(pair, method, [(1, 2)]), rel=1e-4)


def test_a_target_sees_the_source_and_itself_so_far(models) -> None:
    pair = models.Pair(models.bert(3, 32, 4, 4), models.bert(2, 16, 4, 4), models.targets())
    method = build_minilm(MinilmConfig(), pair.teacher_config, pair.student_config)
    expected = naive(pair, method, [(1, 2)])
    assert pair.means(method) == pytest.approx(expected, rel=1e-4)
    everything = pair.means(method, replace(pair.batch, visible_until=None))
    assert all(abs(everything[name] - value) > 1e-3 for name, value in expected.items())
