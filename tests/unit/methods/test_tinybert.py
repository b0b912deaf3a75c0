import pytest

from llmdistill.methods.tinybert import TinybertConfig, build_tinybert

LAYERS = [(0, 2), (1, 4)]
"""Of 2 against 5 layers: 2.5 is rounded to the third."""


def naive(pair, method, settings: TinybertConfig, layers: list[tuple[int, int]]) -> dict[str, float]:
    """TinyBERT eq. 7-10, token by token."""
    projectors = {name: each.weight.detach().double() for name, each in pair.run(method).projectors.items()}
    means = {
        "attention": pair.score_error(layers),
        "hidden": pair.feature_error("hidden", layers, settings.scale, projectors),
        "embedding": pair.feature_error("embedding", [(0, 0)], settings.scale, projectors),
        "soft": pair.output_terms(settings.temperature)["logits"],
    }
    return {name: means[name] for name in method.weights}


@pytest.mark.parametrize(("settings", "layers"), [
    (TinybertConfig(scale="plain"), LAYERS),
    (TinybertConfig(hidden=0.5, soft=2.0, temperature=3.0), LAYERS),
    (TinybertConfig(teacher_layers="5,1"), [(0, 4), (1, 0)]),
])  # fmt: skip
def test_terms_equal_the_naive_loop(pair, settings: TinybertConfig, layers: list[tuple[int, int]]) -> None:
    method = build_tinybert(settings, pair.teacher_config, pair.student_config)
    assert method.projections == {"hidden": (16, 32), "embedding": (16, 32)}
    names = ("attention", "hidden", "embedding", "soft")
    assert method.weights == {name: getattr(settings, name) for name in names if getattr(settings, name)}
    assert method.positions == {name: "labels" if name == "soft" else "tokens" for name in method.weights}
    assert pair.means(method) == pytest.approx(naive(pair, method, settings, layers), rel=1e-4)


def test_a_student_may_be_wider(models) -> None:
    narrow, wide = models.bert(2, 8, 4, 4), models.bert(2, 16, 4, 4)
    assert build_tinybert(TinybertConfig(), narrow, wide).projections == {"hidden": (16, 8), "embedding": (16, 8)}


def test_models_of_the_same_width_need_no_matrix(models) -> None:
    pair, settings = models.Pair(models.bert(4, 8, 4, 4), models.bert(2, 8, 4, 4)), TinybertConfig()
    method = build_tinybert(settings, pair.teacher_config, pair.student_config)
    assert not method.projections
    assert pair.means(method) == pytest.approx(naive(pair, method, settings, [(0, 1), (1, 3)]), rel=1e-4)
