"""What a bench prints: a line for each figure with its target and whether it is met, and all of them as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import torch
from benching import Measured, Settings, time_ratio


@dataclass(frozen=True)
class Line:
    measure: str
    value: float
    target: float | None = None
    detail: str = ""
    """What the value is made of, such as seconds on both sides."""
    unit: str = ""
    at_least: bool = False
    """Whether the target is a floor, not a ceiling."""

    def verdict(self, *, quick: bool) -> str:
        """ok, miss, or neither: targets are set for the full sizes alone."""
        if self.target is None or quick or math.isnan(self.value):
            return ""
        return "ok" if (self.value >= self.target if self.at_least else self.value <= self.target) else "MISS"


class Table:
    """The lines of a run, printed as they come."""

    def __init__(self, settings: Settings) -> None:
        self._quick, self.figures = settings.quick, dict[str, float]()
        where = torch.cuda.get_device_name() if settings.device == "cuda" else f"{settings.threads} threads"
        sizes = "quick sizes, for which the targets are not meant" if settings.quick else "full sizes"
        times = f"median of {settings.repeats} by {settings.clock} time"
        self.say(f"torch {torch.__version__}, {settings.device} ({where}), {sizes}, {times}")
        self.say(f"{'measure':<58} {'value':>9} {'target':>9} {'':<5} detail")

    def say(self, text: str) -> None:
        print(text, flush=True)

    def add(self, line: Line) -> None:
        self.figures[line.measure] = line.value
        sign = "≥" if line.at_least else "≤"
        target = "" if line.target is None else f"{sign} {line.target:.3g}{line.unit}"
        value = f"{line.value:.2e}" if 0 < abs(line.value) < 1e-3 else f"{line.value:.3f}"
        verdict = line.verdict(quick=self._quick)
        self.say(f"{line.measure:<58} {value + line.unit:>9} {target:>9} {verdict:<5} {line.detail}")

    def time(self, measure: str, one: Measured, other: Measured, target: float | None = None) -> None:
        self.add(Line(measure, time_ratio(one, other), target, in_seconds(one, other)))

    def memory(self, measure: str, one: Measured, other: Measured, target: float | None = None) -> None:
        detail = f"{one.bytes / 1e6:.0f} MB / {other.bytes / 1e6:.0f} MB"
        self.add(Line(measure, one.bytes / other.bytes, target, detail))

    def finish(self) -> None:
        """Print the values by their measures, as one line of JSON: four digits, and null for what was not taken."""
        figures = {
            name: float(f"{value:.4g}") if math.isfinite(value) else None for name, value in self.figures.items()
        }
        print(json.dumps(figures), flush=True)


def in_seconds(one: Measured, other: Measured) -> str:
    return f"{one.median:.4g} s / {other.median:.4g} s"
