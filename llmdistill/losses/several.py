"""The distributions of several teachers as the logits of one: averaged, or for each position those of its own teacher.

For teachers with the weights w and the probabilities p, all at temperature 1:

    probabilities       log Σ w p, the mixture
    log_probabilities   Σ w log p, the geometric mean; a softmax scales it to a distribution again

A temperature softens the average, as it would soften one teacher. The second is at any temperature also the average of
the softened log-probabilities.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from llmdistill.batch import HeadInputs
from llmdistill.losses.head import cut
from llmdistill.losses.other_tokens import exact_logits


class SeveralHeads(NamedTuple):
    """What several teachers say of N positions: their distributions are averaged, or each position has its own."""

    heads: tuple[HeadInputs, ...]
    """Of each teacher its rows, all N of them, or those of its own positions."""
    weights: tuple[float, ...] = ()
    """Of each teacher its weight in the average, over 0; they add up to 1."""
    average: Literal["probabilities", "log_probabilities"] = "probabilities"
    """What is averaged; the average of log-probabilities is scaled to a distribution again."""
    places: tuple[Tensor, ...] | None = None
    """Of each teacher the positions that are its own, (n,) int64 in ascending order, on the CPU; together 0 to N - 1.
    None if all positions are averaged."""

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.heads[0].rows) if self.places is None else sum(map(len, self.places))

    def cut(self, vocabulary: int | None) -> SeveralHeads:
        """Return the same with the first `vocabulary` tokens alone."""
        return self._replace(heads=tuple(cut(head, vocabulary) for head in self.heads))

    def logits_at(self, here: slice) -> Tensor:
        """Return the logits of some positions, (n, V), at least fp32."""
        if self.places is not None:
            # Each position has its own teacher. The places are in order, so a teacher's rows of a chunk are a slice.
            parts, order = [], []
            for head, places in zip(self.heads, self.places, strict=True):
                places_n: np.ndarray = places.numpy()
                first, end = np.searchsorted(places_n, [here.start, here.stop]).tolist()
                parts.append(exact_logits(head, slice(first, end)))
                order.append(places_n[first:end] - here.start)
            # The parts stand teacher by teacher; this is the order of the positions.
            rows_n = torch.from_numpy(np.argsort(np.concatenate(order))).to(parts[0].device, non_blocking=True)
            return torch.cat(parts).index_select(0, rows_n)
        average_nV: Tensor | None = None
        for head, weight in zip(self.heads, self.weights, strict=True):
            # At temperature 1: a divergence softens the average, not what goes into it.
            log_p_nV = exact_logits(head, here).log_softmax(-1)
            if self.average == "probabilities":
                # log Σ w p, one teacher after the other: only two tensors of logits exist at a time.
                weighted_nV = log_p_nV.add_(math.log(weight))
                if average_nV is not None:
                    torch.logaddexp(average_nV, weighted_nV, out=weighted_nV)
                average_nV = weighted_nV
            else:
                weighted_nV = log_p_nV.mul_(weight)
                # Not a distribution yet; the softmax of whoever takes these logits makes it one.
                average_nV = weighted_nV if average_nV is None else average_nV.add_(weighted_nV)
        assert average_nV is not None, "there is no teacher"
        return average_nV
