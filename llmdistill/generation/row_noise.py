"""Samples in which each row has random numbers of its own, so that no row depends on the others of its batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers
from torch import Tensor


class RowNoise(transformers.LogitsProcessor):
    """Adds Gumbel noise to the logits: the argmax of logits + noise is a sample of the softmax at temperature 1.

    Each row has its own random stream, so its sample does not depend on the other rows of the batch.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self._seeds, self._device = seeds, device
        self._streams: dict[int, torch.Generator] = {}
        self._rows: Sequence[int] = range(len(seeds))

    def take(self, rows: Sequence[int]) -> None:
        """Expect the logits of these rows from now on, in this order; at first of all, as the seeds are."""
        self._rows = rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the logits of the next token, (B, V), with noise added."""
        for row in self._rows:
            if row not in self._streams:
                self._streams[row] = torch.Generator(self._device).manual_seed(self._seeds[row])
        draws = [torch.rand(scores.shape[-1], generator=self._streams[row], device=scores.device) for row in self._rows]
        # torch.rand may return 0, whose logarithm is -inf; both logarithms need an argument over 0.
        tiny = torch.finfo(torch.float32).tiny
        # Gumbel noise is -log(-log u).
        return scores.float() - (-torch.stack(draws).clamp_min(tiny).log()).clamp_min(tiny).log()


class RowSamples(RowNoise):
    """Adds this noise to logits that are divided by a temperature and cut to top-k and top-p, in this order."""

    def __init__(
        self, seeds: Sequence[int], device: torch.device, *, temperature: float, top_p: float, top_k: int = 0
    ) -> None:
        super().__init__(seeds, device)
        self._temperature, self._top_p, self._top_k = temperature, top_p, top_k

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the logits of the next token, (B, V), cut and with noise added."""
        logits_BV = scores.float() / self._temperature
        if 0 < self._top_k < logits_BV.shape[-1]:
            least_B1 = logits_BV.topk(self._top_k).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
        return super().__call__(input_ids, cut_to_top_p(logits_BV, self._top_p))


def cut_to_top_p(logits_BV: Tensor, top_p: float, most: int = 1024) -> Tensor:
    """Return logits with -inf but for the smallest set of tokens whose total probability is at least top_p.

    Only the `most` likely tokens are sorted where they are enough.
    """
    if top_p >= 1:
        return logits_BV
    probs_BV = logits_BV.softmax(-1)
    most = min(most, logits_BV.shape[-1])
    top_BK, tokens_BK = probs_BV.topk(most)
    if bool((top_BK.sum(-1) < top_p).any()):
        top_BK, tokens_BK = probs_BV.sort(descending=True)
    # A token stays if those before it are less than top_p, so that the first one always does.
    stays_BK = top_BK.cumsum(-1) - top_BK < top_p
    kept_BV = torch.zeros_like(logits_BV, dtype=torch.bool).scatter(-1, tokens_BK, stays_BK)
    return logits_BV.masked_fill(~kept_BV, -torch.inf)
