"""What a factorization loses of a model's matrices, by their kind."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from transformers import PreTrainedModel

from llmdistill.factorize.export import merge
from llmdistill.factorize.install import matrices


@torch.no_grad()
def lost_by_kind(teacher: PreTrainedModel, student: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """Compare the matrices of a factorized student with those of its teacher; the student's factors are multiplied out.

    Returns:
        For each kind of matrix, by the last part of its name such as q_proj: `matrices`, how many there are, and
        `lost`, ``sqrt(sum ||W - W'||^2 / sum ||W||^2)`` over them, from 0 to about 1. A weighting does not make this
        smallest: it keeps what matters for the data.
    """
    names = list(student.config.quantization_config.modules)
    merge(student)
    squares: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name in names:
        ours, theirs = (matrices(each.base_model, name).float() for each in (student, teacher))
        kind = squares[name.rsplit(".", 1)[-1]]
        for mine, its in zip(*(each if each.dim() == 3 else [each] for each in (ours, theirs)), strict=True):
            kind.append((float((mine - its.to(mine.device)).square().sum()), float(its.square().sum())))
    return {
        kind: {
            "matrices": len(found),
            "lost": math.sqrt(math.fsum(a for a, _ in found) / max(math.fsum(b for _, b in found), 1e-30)),
        }
        for kind, found in squares.items()
    }


def as_lines(lost: dict[str, dict[str, Any]]) -> str:
    """Return the kinds as lines for the terminal, the one that loses most first."""
    ordered = sorted(lost.items(), key=lambda item: -item[1]["lost"])
    width = max(map(len, lost)) + 2
    lines = [f"{kind:{width}}{each['matrices']:4} matrices, {each['lost']:.1%} of their norm" for kind, each in ordered]
    return "\n".join(["lost by each kind of matrix", *(f"  {line}" for line in lines)])
