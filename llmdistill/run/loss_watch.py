"""Warns, once for each finding, of a loss that diverges or jumps, and of terms that teach nothing, little or all."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

SPIKE = 2.0
"""A loss over this multiple of the median of the steps before it, and over all of them, is a spike."""
WINDOW = 50
"""Steps that a loss is compared with."""
DIVERGED = 100.0
"""A loss over this multiple of the lowest one before it has diverged, where that one is taken to be 0.1 or more: a
student that starts as its teacher has a loss of nearly 0."""
_LEAST = 0.1
LOWEST = "lowest_loss"
"""Key in a row of the log whose loss has diverged: the lowest loss of a step before it."""
_FEWEST = 20
"""Steps before anything is said: the first losses differ much."""
_MOST_SPIKES = 5
"""Spikes that are named; a run with more of them has one cause."""
SMALL = 1e-3
"""Share of the gradient below which a term hardly teaches."""
LARGE = 0.8
"""Share of the gradient above which a term leaves little to the others."""


class LossWatch:
    """Watches the terms of a run's loss step by step, on the host."""

    def __init__(self, weights: Mapping[str, float], rows: Sequence[Mapping[str, float]] = ()) -> None:
        """`weights` are those of the terms; a term of weight 0 is not watched. `rows` are those of the log so far."""
        self._weights = weights
        self._lowest = min((row.get(LOWEST, row["loss"]) for row in rows if "loss" in row), default=math.inf)
        self._diverged = False
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
        if self.of_row(loss) and not self._diverged:
            self._diverged = True
            warnings.append(
                f"the loss is {loss:.4g} at step {step}, {_times(loss, self._lowest)} the lowest one before it: the "
                "student diverges; stop the run, and lower train.learning_rate or warm up for longer"
            )
        self._lowest = min(self._lowest, loss)
        if not self._diverged and len(self._before) >= _FEWEST and self._spikes < _MOST_SPIKES:
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

    def of_row(self, loss: float) -> dict[str, float]:
        """Return what a row of the log says of a loss that has diverged, nothing for any other loss."""
        return {LOWEST: self._lowest} if loss > DIVERGED * max(self._lowest, _LEAST) else {}


def diverged(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the warning for the report of a run whose last loss in its log had diverged; none for other runs."""
    last = next((row for row in reversed(rows) if "loss" in row), {})
    if LOWEST not in last:
        return []
    return [
        f"the training diverged: the loss is {last['loss']:.4g} at its last step, "
        f"{_times(last['loss'], last[LOWEST])} the lowest one ({last[LOWEST]:.4g}); train again with a lower "
        "train.learning_rate or a longer warm-up"
    ]


def _times(loss: float, usual: float) -> str:
    if usual <= 0:
        return "above"
    return f"{loss / usual:.1f} times" if loss < 1e5 * usual else f"{loss / usual:.1g} times"


def uneven_terms(gradients: Mapping[str, float]) -> dict[str, tuple[float, str]]:
    """Return each term with too small or too large a share of the gradient: the share, and what to do about it.

    Args:
        gradients: the norm of each term's gradient, of which the shares are those in the sum.
    """
    total, found = math.fsum(gradients.values()), {}
    for name, norm in gradients.items():
        if norm < SMALL * total:
            remedy = "it hardly teaches: give it a larger weight, or the weight 0 to save its time"
            found[name] = norm / total, remedy
        elif norm > LARGE * total and len(gradients) > 1:
            remedy = (
                "it leaves little to the others: give it a smaller weight, or, if it is the squared error of a method "
                "whose setting scale is plain, set that to token (--makd.scale token)"
            )
            found[name] = norm / total, remedy
    return found
