from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from llmdistill.methods import METHODS
from llmdistill.methods.kroneckerbert import KroneckerbertConfig, build_kroneckerbert
from llmdistill.objective import Objective

LAYERS = 3
INNER = ("embedding", "attention", "ffn")
OTHER = KroneckerbertConfig(
    embedding=0.5, attention=2.0, ffn=0.25, ffn_output="projection", logits=3.0, label=0.75, temperature=2.0
)


@pytest.fixture(scope="module", params=["llama", "mistral", "gpt2", "bert", "roberta"])
def pair(request: pytest.FixtureRequest, models):
    """Two models of one shape, in Llama and Mistral with half the key heads."""
    config = models.families[request.param](LAYERS, 16, 4, 2)
    return models.Pair(config, config)


def naive(pair, temperature: float, output: str, layers: list[tuple[int, int]], scale: str) -> dict[str, float]:
    """KroneckerBERT eq. 14, token by token, in fp64; `output` is the hook at the feed-forward output."""
    student, teacher = pair.seen()

    def squared(mine: torch.Tensor, theirs: torch.Tensor) -> float:
        return float((mine - theirs).square().mean() / (theirs.square().mean() if scale == "token" else 1))

    def score(seen, layer: int, h: int, b: int, i: int, j: int) -> float:
        """Eq. 9."""
        query, key = seen.per_head("query", layer, 4)[b, i, h], seen.per_head("key", layer, 4)[b, j, h]
        return float(query @ key) / seen.width**0.5

    def attention(b: int, i: int) -> float:
        keys = student.keys_of(pair.batch, b, i)
        return sum(
            (score(student, mine, h, b, i, j) - score(teacher, theirs, h, b, i, j)) ** 2 / (4 * len(keys))
            for mine, theirs in layers
            for h in range(4)
            for j in keys
        )

    def ffn(b: int, i: int) -> float:
        return sum(
            squared(student.flat[output, mine][b, i], teacher.flat[output, other][b, i]) for mine, other in layers
        )

    def embedding(b: int, i: int) -> float:
        return squared(student.embedding[b, i], teacher.embedding[b, i])

    inner = {f.__name__: pair.mean_over_tokens(f) for f in (embedding, attention, ffn)}
    return {**inner, **pair.output_terms(student, teacher, temperature)}


@pytest.mark.parametrize("settings", [KroneckerbertConfig(scale="plain"), OTHER], ids=["the paper's", "others"])
def test_terms_equal_the_naive_loop(pair, settings: KroneckerbertConfig) -> None:
    method = build_kroneckerbert(settings, pair.teacher_config, pair.student_config)
    same = [(layer, layer) for layer in range(LAYERS)]
    expected = naive(pair, settings.temperature, "ffn_down" if settings is OTHER else "hidden", same, settings.scale)
    weights = asdict(settings)
    assert method.weights == {name: weights[name] for name in expected}
    assert list(method.weights) == [*INNER, "logits", "label"]
    assert method.positions == {name: "tokens" if name in INNER else "labels" for name in expected}
    assert not method.projections
    assert pair.means(method) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("spec", "layers"), [("uniform", [(0, 2), (1, 4)]), ("4,1", [(0, 3), (1, 0)]), ("0,3", [(1, 2)])]
)
def test_a_student_of_fewer_layers_learns_from_those_of_the_map(models, spec: str, layers: list) -> None:
    pair = models.Pair(models.bert(5, 16, 4, 4), models.bert(2, 16, 4, 4))
    settings = KroneckerbertConfig(teacher_layers=spec)
    method = build_kroneckerbert(settings, pair.teacher_config, pair.student_config)
    assert pair.means(method) == pytest.approx(naive(pair, 1.0, "hidden", layers, "token"), rel=1e-4)


def test_the_labels_are_those_of_the_objective(models) -> None:
    config = models.bert(LAYERS, 16, 4, 4)
    both = Objective(tokens=True, sequences="classes")
    stage_one = METHODS["kroneckerbert"].build(KroneckerbertConfig(), config, config, both)
    assert list(stage_one.weights) == [*INNER, "logits", "sequence_logits", "label", "sequence_label"]
    task = METHODS["kroneckerbert"].build(
        KroneckerbertConfig(), config, config, Objective(tokens=False, sequences="scores")
    )
    assert list(task.weights) == [*INNER, "sequence_logits", "sequence_label"]
