"""The attention distributions of a layer, and how far those of two models are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llmdistill.data.pairs import EncodedPair, collate_pairs
from llmdistill.losses.attention import repeat_heads
from llmdistill.models.families import is_causal, shape_of
from llmdistill.tasks.item_outputs import scoring_forward


@torch.no_grad()
def attention_maps(model: PreTrainedModel, items: Sequence[EncodedPair], *, layer: int) -> list[Tensor]:
    """Return the logarithms of a layer's attention distributions on each text: (H, T, T), fp64, -inf where not seen.

    They are computed from queries and keys, for stock and factorized models alike, and in logarithms, so that no share
    is rounded to 0. The model must be in evaluation mode; `layer` counts from 0.
    """
    maps, window = [], shape_of(model.config).windows[layer]
    with scoring_forward(model, {"query": frozenset({layer}), "key": frozenset({layer})}) as forward:
        for item in items:
            # One text alone has no padding, so that any id will do.
            taps = forward(collate_pairs([item], pad_token_id=0).to(model.device)).taps
            query_HTD = taps.query[layer][0].double()
            key_HTD = repeat_heads(taps.key[layer], len(query_HTD))[0].double()  # heads of a group share a key
            scores_HTT = query_HTD @ key_HTD.transpose(1, 2) * taps.scaling[layer]
            visible_TT = torch.ones(scores_HTT.shape[1:], dtype=torch.bool, device=scores_HTT.device)
            if is_causal(model.config):
                visible_TT = visible_TT.tril()
            if window is not None:  # the last `window` keys, that of the query included
                visible_TT = visible_TT.triu(1 - window)
            maps.append(scores_HTT.masked_fill(~visible_TT, -math.inf).log_softmax(-1).cpu())
    return maps


def mean_map(log_HTT: Tensor) -> Tensor:
    """Return the logarithm of the mean distribution over heads: (1, T, T)."""
    return log_HTT.logsumexp(0, keepdim=True) - math.log(len(log_HTT))


def map_divergence(teacher_HTT: Tensor, student_HTT: Tensor) -> Tensor:
    """Return KL(A^T‖A^S) of each head in nats, mean over the queries (MiniLM eq. 5), of logarithms: (H,)."""
    shares_HTT = teacher_HTT.exp()
    # Where the teacher sees no key the term is 0, but 0 · -inf would be nan.
    terms_HTT = torch.where(shares_HTT > 0, shares_HTT * (teacher_HTT - student_HTT), 0.0)
    return terms_HTT.sum(-1).mean(-1)
