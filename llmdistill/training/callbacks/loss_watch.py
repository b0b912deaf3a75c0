"""Warns, once for each finding, of a loss that diverges or jumps, and of terms that contribute nothing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, ClassVar

from llmdistill.runtime.terminal import warn_main
from llmdistill.training.callbacks.base import TrainState

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
"""Steps before the first warning: the first losses differ much."""
_MOST_SPIKES = 5
"""Spikes that are named; a run with more of them has one cause."""


class LossWatch:
    """Watches the terms of a run's loss step by step, on the host."""

    reads: ClassVar[tuple[str, ...]] = ("known_terms",)
    gives: ClassVar[tuple[str, ...]] = ("lowest_loss",)

    def __init__(self, weights: Mapping[str, float], rows: Sequence[Mapping[str, float]] = ()) -> None:
        """`weights` are those of the terms; a term of weight 0 is not watched. `rows` are those of the log so far."""
        self._weights = weights
        self.lowest = min((row.get(LOWEST, row["loss"]) for row in rows if "loss" in row), default=math.inf)
        self._diverged = False
        self._before: deque[float] = deque(maxlen=WINDOW)
        self._always_zero = {name for name, weight in weights.items() if weight != 0}
        self._steps = self._spikes = 0

    def after_step(self, state: TrainState) -> None:
        """See Callback: warn on rank 0."""
        for terms in state.known_terms:
            for warning in self.add(terms.step, terms.values):
                warn_main(warning)
        state.lowest_loss = self.lowest

    def figures(self) -> dict[str, Any]:
        """See Accumulator."""
        return {
            "lowest": None if self.lowest == math.inf else self.lowest,
            "diverged": self._diverged,
            "before": [*self._before],
            "always_zero": sorted(self._always_zero),
            "steps": self._steps,
            "spikes": self._spikes,
        }

    def restore(self, figures: Mapping[str, Any]) -> None:
        """See Accumulator."""
        self.lowest = math.inf if figures["lowest"] is None else figures["lowest"]
        self._diverged, self._steps, self._spikes = (figures[key] for key in ("diverged", "steps", "spikes"))
        self._before.extend(figures["before"])
        self._always_zero &= {*figures["always_zero"]}

    def add(self, step: int, values: Mapping[str, float]) -> list[str]:
        """Return the warnings about a step, from the finite values of its terms."""
        warnings = []
        self._steps += 1
        self._always_zero -= {name for name, value in values.items() if value != 0}
        if self._steps == _FEWEST and self._always_zero:
            names = ", ".join(sorted(self._always_zero))
            warnings.append(
                f"term {names} was 0 in each of the first {_FEWEST} steps: it contributes nothing; check the labels, "
                "or give it the weight 0"
            )
        loss = sum(weight * values[name] for name, weight in self._weights.items())
        if is_diverged(loss, self.lowest) and not self._diverged:
            self._diverged = True
            warnings.append(
                f"the loss is {loss:.4g} at step {step}, {_times(loss, self.lowest)} the lowest one before it: the "
                "student diverges; stop the run, and lower train.learning_rate or warm up for longer"
            )
        # After the comparison, and of every step: the lowest loss is also what a row of the log is compared with.
        self.lowest = min(self.lowest, loss)
        if not self._diverged and len(self._before) >= _FEWEST and self._spikes < _MOST_SPIKES:
            usual = median(self._before)
            # The median ignores the spikes before it, and the maximum allows for a loss that is noisy anyway.
            if loss > SPIKE * usual and loss > max(self._before):
                self._spikes += 1
                last = "; further ones are not named" if self._spikes == _MOST_SPIKES else ""
                warnings.append(
                    f"the loss jumped to {loss:.4g} at step {step}, {_times(loss, usual)} the median of the "
                    f"{len(self._before)} steps before it: if it does not come back, lower train.learning_rate{last}"
                )
        self._before.append(loss)
        return warnings


def is_diverged(loss: float, lowest: float) -> bool:
    """Whether a loss has diverged from the lowest one before it. The row of the log then has that one, as LOWEST."""
    return loss > DIVERGED * max(lowest, _LEAST)


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
