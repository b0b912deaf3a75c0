"""The settings that are tried on a task, and the choice among them on the dev set."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmdistill.config.glue import GlueConfig
from llmdistill.config.tasks import ProtocolName


@dataclass(frozen=True)
class Point:
    """One fine-tuning run."""

    learning_rate: float
    epochs: int
    seed: int

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"lr-{self.learning_rate:g}-epochs-{self.epochs}-seed-{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The settings that are tried, and the settings that all runs share."""

    learning_rates: tuple[float, ...]
    epochs: tuple[int, ...]
    seeds: tuple[int, ...]
    batch_size: int = 32
    max_length: int = 128
    warmup_ratio: float = 0.1
    weight_decay: float = 0.01

    def shared(self) -> dict[str, float]:
        """Return the settings that all runs share, by name."""
        return {key: getattr(self, key) for key in _SHARED}

    def trials(self) -> list[Point]:
        """Return all trials; the trials that differ only in the seed are adjacent."""
        settings = [(rate, epochs) for rate in self.learning_rates for epochs in self.epochs]
        return [Point(rate, epochs, seed) for rate, epochs in settings for seed in self.seeds]


_SHARED = ("batch_size", "max_length", "warmup_ratio", "weight_decay")

PROTOCOLS: dict[ProtocolName, Grid] = {
    # MaKD §4.1, which does not give the epochs, batch size, length, warm-up and weight decay.
    "makd": Grid(learning_rates=(1e-5, 2.3e-5, 3.5e-5, 4.8e-5), epochs=(3,), seeds=(1, 2, 3, 4, 5)),
    # MiniLMv2 appendix C.
    "minilmv2": Grid(learning_rates=(1e-5, 1.5e-5, 2e-5, 3e-5, 5e-5), epochs=(3, 5, 10), seeds=(1, 2, 3, 4)),
    # KroneckerBERT appendix A.1, "single runs"; it gives only a range of epochs, and Table 8 has the learning rate 1e-5
    # outside of the paper's own range.
    "kroneckerbert": Grid(learning_rates=(5e-5, 1e-4, 5e-4), epochs=(5, 10, 15), seeds=(1,)),
    "custom": Grid(learning_rates=(2e-5,), epochs=(3,), seeds=(1,)),
}

LONGER: dict[tuple[ProtocolName, str], tuple[int, ...]] = {
    ("minilmv2", "CoLA"): (25,),
    ("kroneckerbert", "CoLA"): (15, 20, 30),
}
"""Epochs of tasks that differ from the other tasks of the protocol (MiniLMv2 app. C, KroneckerBERT app. A.1)."""


def grid_of(config: GlueConfig, task: str) -> Grid:
    """Return the protocol's grid for a task; settings in the configuration replace those of the protocol."""
    grid = PROTOCOLS[config.protocol]
    grid = replace(grid, epochs=LONGER.get((config.protocol, task), grid.epochs))
    given: dict[str, Any] = {
        key: tuple(values)
        for key in ("learning_rates", "epochs", "seeds")
        if (values := getattr(config, key)) is not None
    }
    for key in _SHARED:
        if getattr(config, key) is not None:
            given[key] = getattr(config, key)
    return replace(grid, **given)


@dataclass(frozen=True)
class Choice:
    """The settings with the best mean score over seeds."""

    learning_rate: float
    epochs: int
    seeds: tuple[int, ...]
    best: Point
    """The trial of these settings with the best score; the first one if several are equal."""

    def trials(self) -> list[Point]:
        """Return the trials of these settings."""
        return [Point(self.learning_rate, self.epochs, seed) for seed in self.seeds]


def choose(scores: Mapping[Point, float], grid: Grid) -> Choice:
    """Choose the settings with the highest mean score, the first in the grid if several are equal.

    Only settings that have a score for every seed are compared.
    """
    groups = complete(scores, grid)
    assert groups, "no settings have all their seeds yet"
    chosen = max(groups, key=lambda group: statistics.fmean(scores[trial] for trial in group))
    best = max(chosen, key=lambda trial: scores[trial])
    return Choice(best.learning_rate, best.epochs, grid.seeds, best)


def complete(scores: Collection[Point], grid: Grid) -> list[list[Point]]:
    """Return the trials of each combination of settings that has a score for every seed."""
    return [group for group in _groups(grid) if all(trial in scores for trial in group)]


def may_be_best(scores: Mapping[Point, float], grid: Grid) -> set[Point]:
    """Return the trials whose model may still be the best: the best trial so far, and the best of unfinished settings.

    Settings are unfinished if some of their seeds have no score yet.
    """
    groups = [[trial for trial in group if trial in scores] for group in _groups(grid)]
    open_groups = [group for group in groups if 0 < len(group) < len(grid.seeds)]
    leaders = {max(group, key=lambda trial: scores[trial]) for group in open_groups}
    if any(len(group) == len(grid.seeds) for group in groups):
        leaders.add(choose(scores, grid).best)
    return leaders


def _groups(grid: Grid) -> list[list[Point]]:
    trials, size = grid.trials(), len(grid.seeds)
    return [trials[start : start + size] for start in range(0, len(trials), size)]
