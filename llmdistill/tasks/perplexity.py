"""Perplexity of several sets as one number, and as text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping


def perplexity_of(loss: float) -> float:
    """Return exp(loss), at most the largest number; the loss is in nats per token."""
    return math.exp(min(loss, 700.0))  # exp overflows from 709.8 on


def mean_perplexity(by_set: Mapping[str, float]) -> float:
    """Return the geometric mean over the sets: the perplexity of the mean of their losses."""
    return statistics.geometric_mean(by_set.values())


def show_perplexity(value: float | None) -> str:
    """Format a perplexity with three significant digits, from 1,000 on as a whole number, or as a dash if it is None.

    A model that has learned nothing has about as many as its vocabulary has tokens, one that diverged has any.
    """
    if value is None:
        return "–"
    # 999.5 is the first that three digits would round to 1,000.
    return f"{value:,.0f}" if 999.5 <= value < 1e7 else f"{value:#.3g}".rstrip(".")
