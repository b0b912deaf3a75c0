"""Mean and standard deviation over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Spread(NamedTuple):
    """Mean and sample standard deviation over seeds."""

    mean: float
    std: float | None
    """None for one seed, which has no standard deviation."""
    values: list[float]

    def to_dict(self) -> dict[str, float | None]:
        return {"mean": self.mean, "std": self.std}


def spread(values: Sequence[float]) -> Spread:
    std = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), std, list(values))


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean, the standard deviation and the value of each seed as plain JSON values."""
    return {**spread(values).to_dict(), "seeds": list(values)}


def show_seeds(value: Mapping[str, Any], decimals: int = 1) -> str:
    """Format a result of `over_seeds`: the mean, with the standard deviation if there are several seeds."""
    mean, std = value["mean"], value["std"]
    return f"{mean:.{decimals}f}" + ("" if std is None else f" ± {std:.{decimals}f}")


def count_seeds(count: int) -> str:
    """Return what a table's scores are, for its title."""
    return f"mean ± standard deviation over {count} seeds" if count > 1 else "one seed"
