"""What the methods on the output do with words, with sequences' classes or scores, and with both."""

import math
from typing import Any

import pytest
import torch
from references import terms_of
from torch import Tensor
from torch.nn import functional

from llmdistill import losses
from llmdistill.batch import IGNORE_INDEX, Batch, Outputs, Taps
from llmdistill.methods import METHODS
from llmdistill.methods.distilbert import DistilbertConfig
from llmdistill.methods.kd import KdConfig
from llmdistill.methods.kroneckerbert import KroneckerbertConfig
from llmdistill.methods.makd import MakdConfig
from llmdistill.methods.tinybert import TinybertConfig
from llmdistill.models import heads
from llmdistill.objective import Objective

TOKENS, BOTH = Objective(), Objective(tokens=True, targets=heads.CLASSES)
CLASSES, SCORES, SPANS = (Objective(False, targets) for targets in (heads.CLASSES, heads.SCORES, heads.SPANS))

OUTPUT_ALONE: dict[str, Any] = {
    "sft": None,
    "kd": KdConfig(divergence="reverse_kl", ratio=0.25, temperature=2.0),
    "makd": MakdConfig(matrix_layers="none", layer_layers="none", logits=0.8, label=0.3, temperature=2.0),
    "distilbert": DistilbertConfig(cosine=0.0, positions="masked"),
    "tinybert": TinybertConfig(attention=0.0, hidden=0.0, embedding=0.0, soft=0.8, temperature=2.0),
    "kroneckerbert": KroneckerbertConfig(embedding=0.0, attention=0.0, ffn=0.0, logits=0.8, label=0.3, temperature=2.0),
}
WEIGHTS = {
    "sft": {"label": 1.0},
    "kd": {"reverse_kl": 0.25, "label": 0.75},
    "makd": {"logits": 0.8, "label": 0.3},
    "distilbert": {"soft": 5.0, "label": 2.0},
    "tinybert": {"soft": 0.8},
    "kroneckerbert": {"logits": 0.8, "label": 0.3},
}
"""On tokens; on sequences they are the same."""

LABELS = torch.tensor([[IGNORE_INDEX, 2, 3], [IGNORE_INDEX, IGNORE_INDEX, 1], [IGNORE_INDEX, 4, IGNORE_INDEX]])
TARGETS = {
    heads.CLASSES: torch.tensor([1, IGNORE_INDEX, 0]),
    heads.SCORES: torch.tensor([2.5, math.nan, 0.5]),
    heads.SPANS: torch.tensor([[1, 2], [IGNORE_INDEX, IGNORE_INDEX], [0, 0]]),
}
WITH_TARGET = [0, 2]


def outputs(seed: int, objective: Objective) -> Outputs:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randn(3, 3, 5, generator=generator) if objective.tokens else None
    if objective.targets is None:
        return Outputs(words, Taps())
    shape = {heads.SCORES: (3, 1), heads.CLASSES: (3, 2), heads.SPANS: (3, 2, 3)}[objective.targets]
    return Outputs(words, Taps(), sequence_logits=torch.randn(*shape, generator=generator))


def naive(method: str, name: str, student: Outputs, teacher: Outputs, objective: Objective) -> float:
    """Every term as the mean over what it counts; start and end of a span count as one half each."""
    scores = objective.targets == heads.SCORES
    if name.startswith("sequence_"):
        rows = [(student.sequence_logits[b], teacher.sequence_logits[b] if teacher else None) for b in WITH_TARGET]
        targets = TARGETS[objective.targets][WITH_TARGET]
        if objective == SPANS:
            rows = [(mine[k], None if theirs is None else theirs[k]) for mine, theirs in rows for k in (0, 1)]
            targets = targets.flatten()
    else:
        places = (LABELS >= 0).nonzero().tolist()
        rows = [(student.logits[b, i], teacher.logits[b, i] if teacher else None) for b, i in places]
        targets = LABELS[LABELS >= 0]
    if name.endswith("label"):
        if scores:
            return sum(float(row[0] - y) ** 2 for (row, _), y in zip(rows, targets, strict=True)) / len(rows)
        return float(functional.cross_entropy(torch.stack([row for row, _ in rows]), targets))
    if scores:
        return sum(float(mine - theirs) ** 2 for mine, theirs in rows) / len(rows)

    def soft(mine: Tensor, theirs: Tensor) -> float:
        q, p = (mine / 2).softmax(-1), (theirs / 2).softmax(-1)
        if method == "kd":
            return 4 * float((q * (q / p).log()).sum())
        if method == "distilbert":
            return 4 * float((p * (p / q).log()).sum())
        return -float((p * q.log()).sum())

    return sum(soft(*row) for row in rows) / len(rows)


@pytest.mark.parametrize("objective", [TOKENS, CLASSES, SCORES, BOTH, SPANS])
@pytest.mark.parametrize("method", OUTPUT_ALONE)
def test_terms(method: str, objective: Objective, models) -> None:
    config = models.bert(2, 16, 4, 4)
    built = METHODS[method].build(OUTPUT_ALONE[method], config, config, objective)
    weights = {}
    for name, weight in WEIGHTS[method].items():
        if objective.tokens:
            weights[name] = weight
        if objective.targets is not None:
            measure = "mse" if objective == SCORES and name == "reverse_kl" else name
            weights[f"sequence_{measure}"] = weight
    assert built.weights == weights
    assert built.positions == {name: "sequences" if name.startswith("sequence_") else "labels" for name in weights}
    assert built.needs_teacher is (method != "sft")
    labels = LABELS if objective.tokens else torch.full_like(LABELS, IGNORE_INDEX)
    targets = None if objective.targets is None else TARGETS[objective.targets]
    student, batch = outputs(0, objective), Batch(LABELS.clamp_min(0), torch.ones_like(LABELS), labels, targets=targets)
    teacher = outputs(1, objective) if built.needs_teacher else None
    terms = terms_of(built, student, teacher, batch)
    assert list(terms) == list(weights)
    counts = batch.counts()
    for name, term in terms.items():
        assert term.count == counts[built.positions[name]] == (2 if name.startswith("sequence_") else 4)
        expected = naive(method, name, student, teacher, objective)
        assert (term.sum / term.count).item() == pytest.approx(expected, rel=1e-5)


def test_each_divergence_of_kd_is_its_formula() -> None:
    """Of mixtures each has its own share: GKD's beta, DistiLLM's alpha."""
    p, q = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64).softmax(-1)

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (one * (one / other).log()).sum(-1)

    mixture = 0.3 * p + 0.7 * q
    formulas = {
        "forward_kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "jsd": 0.3 * kl(p, mixture) + 0.7 * kl(q, mixture),
        "skew_forward_kl": kl(p, 0.2 * p + 0.8 * q),
        "skew_reverse_kl": kl(q, 0.2 * q + 0.8 * p),
        "tvd": (p - q).abs().sum(-1) / 2,
    }
    for name, expected in formulas.items():
        divergence = losses.DIVERGENCES[name].build(KdConfig(beta=0.3, alpha=0.2))
        torch.testing.assert_close(divergence.value(p.log(), q.log()), expected, msg=name)
