"""The distributions of several teachers as the logits of one: averaged, or for each position those of its own teacher.

For teachers with the weights w and the probabilities p, all at temperature 1:

    probabilities       log Σ w p, the mixture
    log_probabilities   Σ w log p, the geometric mean; a softmax scales it to a distribution again

A temperature softens the average, as it would soften one teacher. The second is at any temperature also the average of
the softened log-probabilities.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from llmdistill.batch import SeveralHeads
from llmdistill.losses.other_tokens import exact_logits


def averaged_logits(teachers: SeveralHeads, here: slice) -> Tensor:
    """Return the logits of the average at some positions, (n, V), at least fp32."""
    if teachers.places is not None:
        # Each position has its own teacher. The places are in order, so a teacher's rows of a chunk are a slice.
        parts, order = [], []
        for head, places in zip(teachers.heads, teachers.places, strict=True):
            places_n: np.ndarray = places.numpy()
            first, end = np.searchsorted(places_n, [here.start, here.stop]).tolist()
            parts.append(exact_logits(head, slice(first, end)))
            order.append(places_n[first:end] - here.start)
        rows_n = torch.from_numpy(np.argsort(np.concatenate(order))).to(parts[0].device)
        return torch.cat(parts).index_select(0, rows_n)
    average_nV: Tensor | None = None
    for head, weight in zip(teachers.heads, teachers.weights, strict=True):
        log_p_nV = exact_logits(head, here).log_softmax(-1)
        if teachers.average == "probabilities":
            weighted_nV = log_p_nV.add_(math.log(weight))
            average_nV = weighted_nV if average_nV is None else torch.logaddexp(average_nV, weighted_nV, out=average_nV)
        else:
            weighted_nV = log_p_nV.mul_(weight)
            average_nV = weighted_nV if average_nV is None else average_nV.add_(weighted_nV)
    assert average_nV is not None, "there is no teacher"
    return average_nV
