"""Chooses the rank of the token embedding where it shares a number of parameters with the matrices of the layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from llmdistill.runtime.distributed import on_every, on_main
from llmdistill.students.start.weighted_embedding import WeightedTable
from llmdistill.students.start.weighted_factors import NOTHING, WeightedFactors

LEAST_GAIN = 0.1
"""The share of the divergence that a narrower embedding must save. The rows of rare tokens pay for it, so texts of
another kind lose more: SmolLM2's student of 80 % was 3 % nearer to its teacher on held-out chats, and as much nearer
after training, but farther on WikiText-2; that of 60 % was 17 % nearer, and nearer on all texts after training."""


def nearest_choice(divergences: Mapping[str, float]) -> str:
    """Return the choice with the least divergence, which is "embedding" only if it saves LEAST_GAIN."""
    raised = {key: value / (1 - LEAST_GAIN) if key == "embedding" else value for key, value in divergences.items()}
    return min(raised, key=lambda key: raised[key])


def choose_with_table(
    table: WeightedTable | None,
    choose: Callable[[WeightedTable | None], WeightedFactors],
    together: float,
    measure: Callable[[Mapping[str, WeightedFactors]], dict[str, float]],
) -> WeightedFactors | None:
    """Return the ranks of the matrices and of the token embedding that share one budget; None if it stays dense.

    Every rank must call this function; only rank 0 has a table.

    Args:
        table: the embedding's factors of all ranks, at predicted costs.
        choose: chooses ranks by the costs of a table.
        together: what lowering the matrices costs together, divided by the sum of what each costs alone.
        measure: returns the divergence of each cut.
    """

    def choose_by(ratio: float, power: float = 1.0) -> WeightedFactors | None:
        chosen = on_every(lambda: choose(None if table is None else table.times(ratio / together, power)))
        return chosen if on_main(lambda: chosen.table is not None) else None

    first = choose_by(1.0)
    if first is None:
        return None
    # The table costs more than predicted, and the more so the lower its rank: on SmolLM2 3.3 · cost^1.17 nats at ranks
    # from 320 to 512 of 576. Two ranks, one at a fourth of the other's cost, tell how much more.
    tried = dict.fromkeys(("lower", "higher"), NOTHING)  # the other ranks of a sharded teacher make the same passes
    predicted = list[float]()
    if table is not None and first.table is not None:
        lower = table.leading(first.table.rank)
        higher = table.leading(min(range(table.rank), key=lambda rank: abs(table.losses[rank] - lower.cost / 4)))
        for key, each in (("lower", lower), ("higher", higher)):
            tried[key] = replace(NOTHING, others=dict.fromkeys(first.others, each))
            predicted.append(each.cost)
    ratio, power = _fit_power(predicted, list(measure(tried).values()))
    chosen = choose_by(ratio, power)
    if chosen is None or chosen.table is None:
        return chosen
    # In the unit of the other costs, which are those of one matrix alone
    return replace(chosen, others=dict.fromkeys(chosen.others, chosen.table.times(together))).with_ranks(chosen.ranks)


def _fit_power(predicted: Sequence[float], measured: Sequence[float]) -> tuple[float, float]:
    """Return r and p with measured = r · predicted^p through two points, where a measured cost counts as no lower than
    its prediction, and p is from 1 to 2; (1, 1) without points."""
    if len(predicted) < 2 or not all(cost > 0 for cost in predicted):
        return 1.0, 1.0
    high, low = (max(pair) for pair in zip(predicted, measured, strict=True))
    power = 1.0
    if predicted[0] > predicted[1]:
        power = min(max(math.log(high / low) / math.log(predicted[0] / predicted[1]), 1.0), 2.0)
    return high / predicted[0] ** power, power
