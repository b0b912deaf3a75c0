"""Warns, once for each finding, about a loss that jumps, a term that is always zero, and a term that hardly teaches."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

SPIKE = 2.0
"""A loss over this multiple of the median of the steps before it, and over all of them, is a spike."""
WINDOW = 50
"""Steps that a loss is compared with."""
_FEWEST = 20
"""Steps before anything is said: the first losses differ much."""
_MOST_SPIKES = 5
"""Spikes that are named; a run with more of them has one cause."""
SMALL = 1e-3
"""Share of the gradient below which a term hardly teaches."""
HARDLY_TEACHES = "it hardly teaches: give it a larger weight, or the weight 0 to save its time"
"""What to do about such a term."""


class LossWatch:
    """Watches the terms of a run's loss step by step, on the host."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights` are those of the terms; a term of weight 0 is not watched."""
        self._weights = weights
        self._before: deque[float] = deque(maxlen=WINDOW)
        self._always_zero = {name for name, weight in weights.items() if weight != 0}
        self._steps = self._spikes = 0

    def add(self, step: int, values: Mapping[str, float]) -> list[str]:
        """Return the warnings about a step, from the finite values of its terms."""
        warnings = []
        self._steps += 1
        self._always_zero -= {name for name, value in values.items() if value != 0}
        if self._steps == _FEWEST and self._always_zero:
            names = ", ".join(sorted(self._always_zero))
            warnings.append(
                f"term {names} was 0 in each of the first {_FEWEST} steps: it teaches nothing; check the labels, or "
                "give it the weight 0"
            )
        loss = sum(weight * values[name] for name, weight in self._weights.items())
        if len(self._before) >= _FEWEST and self._spikes < _MOST_SPIKES:
            usual = median(self._before)
            if loss > SPIKE * usual and loss > max(self._before):
                self._spikes += 1
                last = "; further ones are not named" if self._spikes == _MOST_SPIKES else ""
                warnings.append(
                    f"the loss jumped to {loss:.4g} at step {step}, {_times(loss, usual)} the median of the "
                    f"{len(self._before)} steps before it: if it does not come back, lower train.learning_rate{last}"
                )
        self._before.append(loss)
        return warnings


def _times(loss: float, usual: float) -> str:
    return f"{loss / usual:.1f} times" if usual > 0 else "above"


def small_terms(gradients: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each term whose gradient, by its norm, is under a thousandth of the sum of all norms."""
    total = math.fsum(gradients.values())
    return {name: norm / total for name, norm in gradients.items() if norm < SMALL * total}
