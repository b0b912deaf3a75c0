"""Several methods at once: the terms of all of them, added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from llmdistill.batch import Aspect, Batch, LossSum, Outputs, Positions, TapRequest

if TYPE_CHECKING:
    from llmdistill.methods import Method


class Combined:
    """The terms of several methods; a name that two of them share has the method's in front, as in `kd.label`."""

    def __init__(self, methods: Mapping[str, Method]) -> None:
        """Add up methods, by name."""
        shared = Counter(term for method in methods.values() for term in method.weights)
        self._methods: list[tuple[Method, dict[str, str]]] = [
            (method, {term: f"{name}.{term}" if shared[term] > 1 else term for term in method.weights})
            for name, method in methods.items()
        ]
        self.weights: Mapping[str, float] = {
            names[term]: weight for method, names in self._methods for term, weight in method.weights.items()
        }
        self.positions: Mapping[str, Positions] = {
            names[term]: position for method, names in self._methods for term, position in method.positions.items()
        }
        self.teacher_taps: TapRequest = _union(method.teacher_taps for method in methods.values())
        self.student_taps: TapRequest = _union(method.student_taps for method in methods.values())
        self.needs_teacher = any(method.needs_teacher for method in methods.values())
        self.projections: Mapping[Aspect, tuple[int, int]] = _merged(method.projections for method in methods.values())

    def __call__(self, student: Outputs, teacher: Outputs | None, batch: Batch) -> dict[str, LossSum]:
        """The terms of all methods on one batch, unweighted, under the names of `weights`."""
        return {
            names[term]: loss
            for method, names in self._methods
            for term, loss in method(student, teacher, batch).items()
        }


def _union(requests: Iterable[TapRequest]) -> dict[Aspect, frozenset[int]]:
    taps: dict[Aspect, frozenset[int]] = {}
    for request in requests:
        for aspect, layers in request.items():
            taps[aspect] = taps.get(aspect, frozenset()) | layers
    return taps


def _merged(projections: Iterable[Mapping[Aspect, tuple[int, int]]]) -> dict[Aspect, tuple[int, int]]:
    merged: dict[Aspect, tuple[int, int]] = {}
    for each in projections:
        for aspect, widths in each.items():
            assert merged.get(aspect, widths) == widths, f"two methods map {aspect} to different widths"
            merged[aspect] = widths
    return merged
