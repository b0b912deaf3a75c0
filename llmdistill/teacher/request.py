"""What a method asks of its teacher for each example, and what a cache holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmdistill.batch import POSITIONS, Positions, TapRequest


@dataclass(frozen=True, kw_only=True)
class Request:
    """The outputs of a teacher that are needed, whatever the batch."""

    positions: tuple[Positions, ...]
    """The kinds of positions at which the distributions over tokens are compared."""
    temperatures: tuple[float, ...]
    """The temperatures at which they are compared, in ascending order."""
    taps: TapRequest
    """The inner tensors."""
    sequences: bool
    """Whether the output of a classifier is needed."""

    def record(self) -> dict[str, Any]:
        """Return the request as plain JSON values."""
        return {
            "positions": list(self.positions),
            "temperatures": list(self.temperatures),
            "taps": {aspect: sorted(layers) for aspect, layers in sorted(self.taps.items()) if layers},
            "sequences": self.sequences,
        }

    def lacking(self, held: Mapping[str, Any]) -> str | None:
        """Return the first thing that this request needs and a cache does not hold, as words; None if it has all.

        `held` is the record of the cache: that of its request, with `top_k` (None if the cache holds hidden states).
        """
        for place in self.positions:
            if place not in held["positions"]:
                return f"the distributions at {place}"
        for temperature in self.temperatures:
            if held["top_k"] is not None and temperature not in held["temperatures"]:
                return f"the tail's mass at temperature {temperature:g}"
        for aspect, layers in self.taps.items():
            for layer in sorted(layers.difference(held["taps"].get(aspect, ()))):
                return "the embedding" if aspect == "embedding" else f"the {aspect} of layer {layer + 1}"
        return "the output of the classifier" if self.sequences and not held["sequences"] else None


def place_of(name: str) -> Positions:
    """Return the positions to which the rows of a kept tensor belong, from its name in `teacher.rows`."""
    first = name.partition(".")[0]
    return next((place for place in POSITIONS if place == first), "tokens")
