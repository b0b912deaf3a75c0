"""All factors of a weighted factorization, and the ranks that a student takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from llmdistill.students.start.weighted import GRADIENT_DAMPING, INPUT_DAMPING, WeightedSVD
from llmdistill.students.start.weighted_embedding import WeightedTable
from llmdistill.students.start.weighted_kronecker import WeightedKronecker


@dataclass(frozen=True, kw_only=True)
class WeightedFactors:
    """The ranks of a weighted factorization and the factors of the matrices."""

    ranks: Mapping[str, int]
    """Rank by the name of the linear in the base model; all other linears stay dense."""
    factors: Mapping[str, WeightedSVD]
    predicted_loss: float
    """The sum of the costs of all lowered ranks, per token; see `WeightedSVD.costs`."""
    others: Mapping[str, WeightedKronecker | WeightedTable] = field(default_factory=dict)
    """Other factors by the name in the base model: Kronecker products, and a low-rank token embedding."""
    held_out: Mapping[str, float] = field(default_factory=dict)
    """The divergence from the teacher on data that the calibration did not see, by allocation; empty if not checked."""

    def factors_of(self, name: str) -> WeightedSVD | WeightedKronecker | WeightedTable | None:
        """Return the factors of a module by its name in the base model; None if there are none."""
        return self.others[name] if name in self.others else self.factors.get(name)

    @property
    def table(self) -> WeightedTable | None:
        """The factors of the token embedding; None if it stays dense, or is not weighted."""
        return next((factors for factors in self.others.values() if isinstance(factors, WeightedTable)), None)

    @property
    def tokens(self) -> int:
        """The number of tokens of the calibration data, over all ranks."""
        return max((factors.tokens for factors in self._iterate()), default=0)

    def _iterate(self) -> Iterator[WeightedSVD | WeightedKronecker | WeightedTable]:
        return chain(self.factors.values(), self.others.values())

    @property
    def seconds(self) -> float:
        """The time to measure all matrices and to decompose them, now or when their factors were saved."""
        return sum(svd.seconds for svd in self.factors.values())

    def at(self, device: torch.device) -> WeightedFactors:
        """Return the same with the leading factors on a device, if it is a GPU with room for them; see `held_at`."""
        if device.type == "cpu":
            return self
        chosen = {name: self.factors[name].leading(rank) for name, rank in self.ranks.items() if name in self.factors}
        return replace(self, factors=held_at(chosen, device))

    def warning(self) -> str | None:
        """Return a warning if the data cannot fill the widest matrix; None if they can."""
        widest = max((factors.widest for factors in self._iterate()), default=0)
        if self.tokens >= widest:
            return None
        return (
            f"the calibration data have {self.tokens:,} tokens, fewer than the {widest:,} columns of a matrix: "
            f"directions that they do not show count only by the damping ({INPUT_DAMPING:g} of the mean for inputs, "
            f"{GRADIENT_DAMPING:g} for gradients); give more calibration.examples"
        )

    def spectra(self, points: int = 32) -> dict[str, dict[str, Any]]:
        """Return, by matrix, its shape [m, n] and at most `points` pairs [rank, cost] of `WeightedSVD.costs`.

        The ranks go from 0 to the largest that was decomposed, ever further apart.
        """
        spectra = {}
        for name, svd in self.factors.items():
            costs = svd.costs()
            ranks = np.unique(np.geomspace(1, len(costs), min(points, len(costs))).round().astype(int)) - 1
            spectra[name] = {"shape": list(svd.shape), "costs": [[rank, costs[rank]] for rank in ranks.tolist()]}
        return spectra

    def with_ranks(self, ranks: Mapping[str, int]) -> WeightedFactors:
        """Return the same factors with other ranks."""
        loss = sum(svd.costs()[ranks[name]] for name, svd in self.factors.items() if name in ranks)
        loss += sum(factors.cost for factors in self.others.values())
        return replace(self, ranks=ranks, predicted_loss=loss)

    def with_losses(self, losses: Mapping[str, float]) -> WeightedFactors:
        """Return the same ranks at the costs that `predict_losses` gives; a matrix's other ranks cost in proportion."""
        costs = {name: self.factors[name].costs()[self.ranks[name]] for name in losses}
        # A matrix that costs nothing at its rank gives no ratio, and keeps its own costs.
        ratios = {name: losses[name] / cost for name, cost in costs.items() if cost > 0 and losses[name] > 0}
        return replace(self, factors=RescaledFactors(self.factors, ratios)).with_ranks(self.ranks)


NOTHING = WeightedFactors(ranks={}, factors={}, predicted_loss=0.0)
"""Lowers no rank."""


def held_at(factors: Mapping[str, WeightedSVD], device: torch.device) -> Mapping[str, WeightedSVD]:
    """Return the factors on a GPU if half of its free memory holds all of them, else where they are.

    Factors that stay on the host, or on the disk, are copied for each batch that needs them.
    """
    if device.type == "cpu":
        return factors
    room, held = torch.cuda.mem_get_info(device)[0] // 2, dict[str, WeightedSVD]()
    for name, svd in factors.items():
        room -= 4 * len(svd.values) * (sum(svd.shape) + 1)
        if room < 0:
            return factors
        held[name] = svd.to(device)
    return held


class RescaledFactors(Mapping[str, WeightedSVD]):
    """Factors whose costs are multiplied by a ratio; a matrix is read from `factors` on access."""

    def __init__(self, factors: Mapping[str, WeightedSVD], ratios: Mapping[str, float]) -> None:
        self._factors, self._ratios = factors, ratios

    def __getitem__(self, name: str) -> WeightedSVD:
        svd = self._factors[name]
        return replace(svd, scale=svd.scale * self._ratios.get(name, 1.0))

    def __iter__(self) -> Iterator[str]:
        return iter(self._factors)

    def __len__(self) -> int:
        return len(self._factors)
