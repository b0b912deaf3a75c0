"""The settings that a study tries, and the choice among them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmdistill.experiments.trials import Result

Score = Callable[[Result], float]
"""The score of a finished trial; higher is better."""


def points(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination of a grid's values, by dotted key; the values of the last key change first."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


@dataclass(frozen=True)
class Choice:
    """The settings that a study chose."""

    settings: Mapping[str, Any]
    results: list[Result]
    """The finished trials of these settings, one per seed."""
    best: Result
    """The trial with the best score; the first one if several are equal."""


def by_settings(results: Sequence[Result]) -> list[list[Result]]:
    """Return the finished trials, grouped by their settings; each group has one trial per seed."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result.metrics is not None:
            groups.setdefault(repr(dict(result.trial.settings)), []).append(result)
    return list(groups.values())


def choose(results: Sequence[Result], score: Score) -> Choice | None:
    """Choose the settings with the best mean score over seeds, the first if several are equal.

    If trials failed, only the settings with the most finished seeds are compared. A single combination of settings
    with a single seed needs no score. Returns None if every trial failed.
    """
    groups = by_settings(results)
    if not groups:
        return None
    most = max(map(len, groups))
    groups = [group for group in groups if len(group) == most]
    chosen = groups[0] if len(groups) == 1 else max(groups, key=lambda group: statistics.fmean(map(score, group)))
    best = chosen[0] if len(chosen) == 1 else max(chosen, key=score)
    return Choice(chosen[0].trial.settings, chosen, best)


def may_be_best(results: Sequence[Result], score: Score, seeds: int) -> list[Result]:
    """Return the trials that may still be the best: the best so far, and the best of settings that lack seeds.

    `seeds` is the number of seeds of each combination of settings.
    """
    groups = by_settings(results)
    leaders = [max(group, key=score) for group in groups if len(group) < seeds]
    choice = choose([result for group in groups if len(group) == seeds for result in group], score)
    return leaders if choice is None else [*leaders, choice.best]
