"""Mean and standard deviation over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """Mean and sample standard deviation over seeds; the standard deviation is 0 for one seed."""

    mean: float
    std: float
    values: list[float]

    def to_dict(self) -> dict[str, float]:
        """Return the mean and the standard deviation as plain JSON values."""
        return {"mean": self.mean, "std": self.std}

    def shown(self, decimals: int = 1) -> str:
        """Return "mean ± standard deviation" as text, or the mean alone for a single seed."""
        return plus_minus(self.mean, self.std if len(self.values) > 1 else None, decimals)


def spread(values: Sequence[float]) -> Spread:
    """Return the mean and the sample standard deviation of the values."""
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, list(values))


def plus_minus(mean: float, std: float | None, decimals: int = 1) -> str:
    """Return "mean ± standard deviation" as text, or the mean alone if std is None."""
    return f"{mean:.{decimals}f}" + ("" if std is None else f" ± {std:.{decimals}f}")
