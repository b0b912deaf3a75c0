from __future__ import annotations

from dataclasses import asdict

import pytest

from llmdistill.methods.kroneckerbert import KroneckerbertConfig, build_kroneckerbert
from llmdistill.objective import Objective

LAYERS = 3
INNER = ("embedding", "attention", "ffn")
OTHER = KroneckerbertConfig(
    embedding=0.5, attention=2.0, ffn=0.25, ffn_output="projection", logits=3.0, label=0.75, temperature=2.0
)


def naive(pair, settings: KroneckerbertConfig, layers: list[tuple[int, int]]) -> dict[str, float]:
    """KroneckerBERT eq. 14, token by token, in fp64."""
    output = "ffn_down" if settings.ffn_output == "projection" else "hidden"
    return {
        "embedding": pair.feature_error("embedding", [(0, 0)], settings.scale),
        "attention": pair.score_error(layers),
        "ffn": pair.feature_error(output, layers, settings.scale),
        **pair.output_terms(settings.temperature),
    }


@pytest.mark.parametrize("settings", [KroneckerbertConfig(scale="plain"), OTHER], ids=["the paper's", "others"])
@pytest.mark.parametrize("family", ["llama", "mistral", "bert"])
def test_terms_equal_the_naive_loop(models, family: str, settings: KroneckerbertConfig) -> None:
    config = models.families[family](LAYERS, 16, 4, 2)
    pair = models.Pair(config, config)
    method = build_kroneckerbert(settings, config, config)
    expected = naive(pair, settings, [(layer, layer) for layer in range(LAYERS)])
    weights = asdict(settings)
    assert method.weights == {name: weights[name] for name in expected}
    assert method.positions == {name: "tokens" if name in INNER else "labels" for name in expected}
    assert not method.projections
    assert pair.means(method) == pytest.approx(expected, rel=1e-4)


def test_a_student_of_fewer_layers_learns_from_those_of_the_map(models) -> None:
    pair = models.Pair(models.bert(5, 16, 4, 4), models.bert(2, 16, 4, 4))
    settings = KroneckerbertConfig(teacher_layers="4,1")
    method = build_kroneckerbert(settings, pair.teacher_config, pair.student_config)
    assert pair.means(method) == pytest.approx(naive(pair, settings, [(0, 3), (1, 0)]), rel=1e-4)


def test_the_labels_are_those_of_the_objective(models) -> None:
    config, settings = models.bert(LAYERS, 16, 4, 4), KroneckerbertConfig()
    stage_one = build_kroneckerbert(settings, config, config, Objective(tokens=True, sequences="classes"))
    assert list(stage_one.weights) == [*INNER, "logits", "sequence_logits", "label", "sequence_label"]
    task = build_kroneckerbert(settings, config, config, Objective(tokens=False, sequences="scores"))
    assert list(task.weights) == [*INNER, "sequence_logits", "sequence_label"]
