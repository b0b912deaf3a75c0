"""What the methods on the output do with words, with sequences' classes or scores, and with both."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from references import terms_of
from torch import Tensor
from torch.nn import functional

from llmdistill.batch import IGNORE_INDEX, Batch, Outputs, Taps
from llmdistill.methods import METHODS
from llmdistill.methods.distilbert import DistilbertConfig
from llmdistill.methods.kd import KdConfig
from llmdistill.methods.kroneckerbert import KroneckerbertConfig
from llmdistill.methods.makd import MakdConfig
from llmdistill.methods.tinybert import TinybertConfig
from llmdistill.objective import Objective

TOKENS, CLASSES, SCORES = Objective(), Objective(tokens=False, sequences="classes"), Objective(False, "scores")
BOTH = Objective(tokens=True, sequences="classes")
SPANS = Objective(tokens=False, sequences="spans")

MAKD = MakdConfig(matrix_layers="none", layer_layers="none", logits=0.8, label=0.3, temperature=2.0)
TINYBERT = TinybertConfig(attention=0.0, hidden=0.0, embedding=0.0, soft=0.8, temperature=2.0)
KRONECKERBERT = KroneckerbertConfig(embedding=0.0, attention=0.0, ffn=0.0, logits=0.8, label=0.3, temperature=2.0)
DISTILBERT = DistilbertConfig(cosine=0.0, positions="masked")
WEIGHTS = {
    ("sft", TOKENS): {"label": 1.0},
    ("sft", CLASSES): {"sequence_label": 1.0},
    ("sft", SCORES): {"sequence_label": 1.0},
    ("sft", BOTH): {"label": 1.0, "sequence_label": 1.0},
    ("kd", TOKENS): {"reverse_kl": 0.25, "label": 0.75},
    ("kd", CLASSES): {"sequence_reverse_kl": 0.25, "sequence_label": 0.75},
    ("kd", SCORES): {"sequence_mse": 0.25, "sequence_label": 0.75},
    ("kd", BOTH): {"reverse_kl": 0.25, "sequence_reverse_kl": 0.25, "label": 0.75, "sequence_label": 0.75},
    ("makd", TOKENS): {"logits": 0.8, "label": 0.3},
    ("makd", CLASSES): {"sequence_logits": 0.8, "sequence_label": 0.3},
    ("makd", SCORES): {"sequence_logits": 0.8, "sequence_label": 0.3},
    ("makd", BOTH): {"logits": 0.8, "sequence_logits": 0.8, "label": 0.3, "sequence_label": 0.3},
    ("distilbert", TOKENS): {"soft": 5.0, "label": 2.0},
    ("distilbert", CLASSES): {"sequence_soft": 5.0, "sequence_label": 2.0},
    ("distilbert", SCORES): {"sequence_soft": 5.0, "sequence_label": 2.0},
    ("distilbert", BOTH): {"soft": 5.0, "sequence_soft": 5.0, "label": 2.0, "sequence_label": 2.0},
    ("tinybert", TOKENS): {"soft": 0.8},
    ("tinybert", CLASSES): {"sequence_soft": 0.8},
    ("tinybert", SCORES): {"sequence_soft": 0.8},
    ("tinybert", BOTH): {"soft": 0.8, "sequence_soft": 0.8},
    ("kroneckerbert", TOKENS): {"logits": 0.8, "label": 0.3},
    ("kroneckerbert", CLASSES): {"sequence_logits": 0.8, "sequence_label": 0.3},
    ("kroneckerbert", SCORES): {"sequence_logits": 0.8, "sequence_label": 0.3},
    ("kroneckerbert", BOTH): {"logits": 0.8, "sequence_logits": 0.8, "label": 0.3, "sequence_label": 0.3},
}
WEIGHTS |= {(method, SPANS): WEIGHTS[method, CLASSES] for method in dict.fromkeys(name for name, _ in WEIGHTS)}
"""A span is two classes, the tokens of its start and its end."""
every_case = pytest.mark.parametrize(
    ("method", "objective"), WEIGHTS, ids=[f"{m}-{o.tokens}-{o.sequences}" for m, o in WEIGHTS]
)

LABELS = torch.tensor([[IGNORE_INDEX, 2, 3], [IGNORE_INDEX, IGNORE_INDEX, 1], [IGNORE_INDEX, 4, IGNORE_INDEX]])
TARGETS = {
    "classes": torch.tensor([1, IGNORE_INDEX, 0]),
    "scores": torch.tensor([2.5, math.nan, 0.5]),
    "spans": torch.tensor([[1, 2], [IGNORE_INDEX, IGNORE_INDEX], [0, 0]]),
}
WITH_TARGET = [0, 2]


def outputs(seed: int, objective: Objective) -> Outputs:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randn(3, 3, 5, generator=generator)
    shape = {"scores": (3, 1), "classes": (3, 2), "spans": (3, 2, 3), None: (3, 2)}[objective.sequences]
    sequences = torch.randn(*shape, generator=generator)
    return Outputs(
        words if objective.tokens else None,
        Taps(),
        sequence_logits=None if objective.sequences is None else sequences,
    )


def make_batch(objective: Objective) -> Batch:
    labels = LABELS if objective.tokens else torch.full_like(LABELS, IGNORE_INDEX)
    targets = None if objective.sequences is None else TARGETS[objective.sequences]
    return Batch(LABELS.clamp_min(0), torch.ones_like(LABELS), labels, targets=targets)


def build(method: str, objective: Objective, bert: Any) -> Any:
    settings = {
        "kd": KdConfig(divergence="reverse_kl", ratio=0.25, temperature=2.0),
        "makd": MAKD,
        "distilbert": DISTILBERT,
        "tinybert": TINYBERT,
        "kroneckerbert": KRONECKERBERT,
    }
    config = bert(2, 16, 4, 4)
    return METHODS[method].build(settings.get(method), config, config, objective)


def naive(method: str, name: str, student: Outputs, teacher: Outputs, objective: Objective) -> float:
    """Every term as the mean over what it counts; start and end of a span count as one half each."""
    scores = objective.sequences == "scores"
    if name.startswith("sequence_"):
        rows = [(student.sequence_logits[b], teacher.sequence_logits[b] if teacher else None) for b in WITH_TARGET]
        targets = TARGETS[objective.sequences][WITH_TARGET]
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
        cross = -float((p * q.log()).sum())
        return {
            "kd": 4 * float((q * (q / p).log()).sum()),
            "makd": cross,
            "tinybert": cross,
            "kroneckerbert": cross,
            "distilbert": 4 * float((p * (p / q).log()).sum()),
        }[method]

    return sum(soft(*row) for row in rows) / len(rows)


@every_case
def test_terms(method: str, objective: Objective, models) -> None:
    built = build(method, objective, models.bert)
    assert built.weights == WEIGHTS[method, objective]
    assert built.positions == {
        name: "sequences" if name.startswith("sequence_") else "labels" for name in built.weights
    }
    assert built.needs_teacher is (method != "sft")
    assert not built.projections
    student, batch = outputs(0, objective), make_batch(objective)
    teacher = outputs(1, objective) if built.needs_teacher else None
    terms = terms_of(built, student, teacher, batch)
    assert list(terms) == list(built.weights)
    counts = batch.counts()
    for name, term in terms.items():
        assert term.count == (2 if name.startswith("sequence_") else 4)
        assert term.count == counts[built.positions[name]]
        expected = naive(method, name, student, teacher, objective)
        assert (term.sum / term.count).item() == pytest.approx(expected, rel=1e-5)


def test_the_students_own_answers_are_no_labels(models) -> None:
    batch = replace(make_batch(TOKENS), own_answers=True)
    for method in ("sft", "kd", "makd", "distilbert"):
        built = build(method, TOKENS, models.bert)
        assert "label" in built.weights
        assert "label" not in terms_of(built, outputs(0, TOKENS), outputs(1, TOKENS), batch)


def test_makd_without_the_output_learns_from_the_layers_alone(models) -> None:
    config = models.bert(2, 16, 4, 4)
    method = METHODS["makd"].build(MakdConfig(logits=0.0), config, config, BOTH)
    assert set(method.positions.values()) == {"tokens"}
