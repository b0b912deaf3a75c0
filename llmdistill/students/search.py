"""Searches Kronecker shapes for a number of parameters: the combination with the smallest error on the weights.

As in KroneckerBERT §3.6 all matrices of one size have one shape, transposed matrices have the transposed shape, and
attention and feed-forward are separate. The options of each such group are every pair of divisors, and dense; the
options of the token embedding are all divisors of the width. The search minimizes the mean squared error over all
entries of the matrices and of the table, where the error of each group is a share of its own mean square: the absolute
size of entries means little in a model whose norms rescale the outputs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from llmdistill.config import FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.models.configs import load_config
from llmdistill.models.load import load_model
from llmdistill.progress import progress
from llmdistill.students.counting import build_reference, count_parameters, layer_linears
from llmdistill.students.install import token_embedding
from llmdistill.students.kronecker import dense_flops
from llmdistill.students.options import Group, Options, Table, drop_dominated, make_groups
from llmdistill.students.sizes import DENSE, check_factorization, parse_target, plan_embedding

CANDIDATES = 10
"""Number of the best combinations that are reported."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A combination of shapes."""

    shapes: dict[str, str]
    """Shape of the first factor by group, for a matrix with at least as many outputs as inputs; or dense."""
    embedding_columns: int
    """Columns of the factorized token embedding; 1 keeps the table as it is."""
    params: int
    """Number of parameters of the model that papers count."""
    flops_per_token: int
    """FLOPs of the linears of the layers, by eq. 7."""
    flops_share: float
    """The FLOPs as a share of the teacher's."""
    relative_error: float
    """Root of the mean squared error, where the error of each group is a share of its mean square: 0 to 1."""
    settings: FactorizeConfig
    """Settings that make this student: shapes by module pattern instead of a target."""

    def row(self) -> dict[str, Any]:
        """Return the candidate as plain JSON values."""
        values = asdict(self)
        settings = {key: values["settings"][key] for key in ("shapes", "sums", "embedding_columns")}
        return {**values, "settings": settings}


def needs_search(settings: FactorizeConfig, method: str) -> bool:
    """Return whether these settings leave the sizes to `search`, which reads the weights."""
    return method == "kronecker" and settings.target_params is not None


@torch.no_grad()
def search(
    model: PreTrainedModel | Path | str, settings: FactorizeConfig, *, device: torch.device | None = None
) -> list[Candidate]:
    """Return the combinations of shapes within target_params and max_flops that have the smallest error, best first.

    The errors of linears are measured on a few layers, from their largest singular values by a randomized SVD; the
    error of the embedding is exact. Raises UserError if settings do not fit the model, or if no combination reaches the
    target; the message then gives the smallest possible number. The weights of a folder or hub name are read only after
    these checks.
    """
    check_factorization(settings, "kronecker")
    assert settings.target_params is not None
    reference = build_reference(model.config if isinstance(model, PreTrainedModel) else load_config(model))
    plan_embedding(reference, settings, "kronecker")
    linears = layer_linears(reference)
    all_flops = sum(dense_flops(m, n) for m, n in linears.values())
    most_flops = math.inf
    if settings.max_flops is not None:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*%\s*", settings.max_flops)
        if match is None or not 0 < float(match[1]) <= 100:
            raise UserError(f"max_flops {settings.max_flops!r} is no share of the teacher's FLOPs: write 30%")
        most_flops = int(float(match[1]) / 100 * all_flops)
    _, embedding = token_embedding(reference)
    fixed = count_parameters(reference) - sum(m * n for m, n in linears.values()) - embedding.weight.numel()
    target = parse_target(settings.target_params, count_parameters(reference))

    vocabulary, width = embedding.weight.shape
    groups = make_groups(reference, linears, settings.sums)
    table = Table(vocabulary=vocabulary, width=width, columns=settings.embedding_columns)
    parts: list[Table | Group] = [table, *groups]
    costs = [part.costs() for part in parts]

    # No combination may have so few parameters, or so few FLOPs.
    fewest = sum(float(options.costs[1].min()) for options in costs)
    if fewest > most_flops:
        raise UserError(
            f"max_flops {settings.max_flops} is out of reach: with {settings.sums} sum(s) no shapes take less than "
            f"{fewest / all_flops:.2%} of the teacher's FLOPs; raise it"
        )
    # Without weights the error is the number of parameters, so the best combination is the smallest one.
    smallest = [drop_dominated(options, with_flops=settings.max_flops is not None) for options in costs]
    _, least_totals = combine(smallest, math.inf, most_flops, count=1)
    nearest = fixed + int(least_totals[0][0])
    if nearest > target:
        columns = "" if settings.embedding_columns is None else f", {settings.embedding_columns} embedding columns"
        bound = "" if settings.max_flops is None else f" and {settings.max_flops} of its FLOPs"
        raise UserError(
            f"target_params {settings.target_params} ({target:,}) is out of reach: with {settings.sums} sum(s)"
            f"{columns}{bound} the nearest that shapes of this model reach is {nearest:,} parameters; raise the target"
        )

    # The choices of each group that fit if all other groups take their smallest choice.
    # Rows 0 and 1 of the costs are parameters and FLOPs; the error (2) has no limit.
    least = [options.costs[:2].min(axis=1) for options in costs]
    room = np.array([target - fixed, most_flops]) - np.sum(least, axis=0)
    fits = [(options.costs[:2] <= (room + own)[:, None]).all(0) for options, own in zip(costs, least, strict=True)]
    fitting = [options.only(np.nonzero(fit)[0]) for options, fit in zip(costs, fits, strict=True)]
    if not isinstance(model, PreTrainedModel):
        model = load_model(model, dtype="auto", head="saved")
    pairs = zip(progress(parts, "Shapes", "groups of matrices"), fitting, strict=True)
    measured = [part.errors(choices, model, device) for part, choices in pairs]
    entries = count_parameters(reference) - fixed
    best = [drop_dominated(options, with_flops=settings.max_flops is not None) for options in measured]
    chosen, totals = combine(best, target - fixed, most_flops)
    return [
        Candidate(
            shapes={group.label: _text(best[k + 1].choices[pick[k + 1]]) for k, group in enumerate(groups)},
            embedding_columns=best[0].choices[pick[0]],
            params=fixed + int(total[0]),
            flops_per_token=int(total[1]),
            flops_share=float(total[1] / all_flops),
            relative_error=float((max(total[2], 0.0) / entries) ** 0.5),
            settings=_settings(settings, groups, best, pick),
        )
        for pick, total in zip(chosen, totals, strict=True)
    ]


def combine(
    options: Sequence[Options], most_params: float, most_flops: float, count: int = CANDIDATES
) -> tuple[list[tuple[int, ...]], list[NDArray[np.float64]]]:
    """Return the best combinations of one choice per list: their indices and sums (parameters, FLOPs, squared error).

    All combinations are evaluated, for one choice of the first list at a time. If errors are equal, fewer parameters
    win.
    """
    first, *others = (group.costs for group in options)
    rest, sizes = np.zeros((3, 1)), [table.shape[1] for table in others]
    for table in others:
        # The order of np.unravel_index: the last list changes fastest.
        rest = (rest[:, :, None] + table[:, None, :]).reshape(3, -1)
    best: list[tuple[float, float, int, int]] = []
    for number in range(first.shape[1]):
        params, flops, errors = first[:, number, None] + rest
        (inside,) = np.nonzero((params <= most_params) & (flops <= most_flops))
        if len(inside) > count:
            inside = inside[np.argpartition(errors[inside], count)[:count]]
        best += [(float(errors[i]), float(params[i]), number, int(i)) for i in inside]
    best = sorted(best)[:count]
    picks = [(number, *map(int, np.unravel_index(i, sizes))) for _, _, number, i in best]
    return picks, [first[:, number] + rest[:, i] for _, _, number, i in best]


def as_table(candidates: Sequence[Mapping[str, Any]], teacher_params: int) -> str:
    """Return the rows of candidates as a text table, with one line for each combination."""
    groups = list(candidates[0]["shapes"])
    rows = [["parameters", "share", "FLOPs/token", "share", "error", *groups, "embedding columns"]]
    for row in candidates:
        figures = [f"{row['params']:,}", f"{row['params'] / teacher_params:.1%}", f"{row['flops_per_token']:,}"]
        figures += [f"{row['flops_share']:.1%}", f"{row['relative_error']:.4f}"]
        columns = "dense" if row["embedding_columns"] == 1 else str(row["embedding_columns"])
        rows.append([*figures, *row["shapes"].values(), columns])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows)


def _settings(
    settings: FactorizeConfig, groups: Sequence[Group], options: Sequence[Options], pick: Sequence[int]
) -> FactorizeConfig:
    """Return the settings that give these shapes, with one pattern for the same linear of all layers."""
    shapes = {}
    for group, option, number in zip(groups, options[1:], pick[1:], strict=True):
        choice = option.choices[number]
        for name, swapped in group.members.items():
            pattern = re.sub(r"\.\d+\.", ".*.", name)
            shapes[pattern] = _text(choice.transposed if choice is not None and swapped else choice)
    columns = options[0].choices[pick[0]]
    return replace(settings, target_params=None, max_flops=None, shapes=shapes, embedding_columns=columns)


def _text(choice: Any) -> str:
    return DENSE if choice is None else str(choice)
