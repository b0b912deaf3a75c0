"""Samples in which each row has random numbers of its own, so that no row depends on the others of its batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import transformers
from torch import Tensor


class RowDraws(transformers.LogitsProcessor):
    """Draws the next token of each row from the softmax of its logits, with one random number for each row and token.

    The number depends only on the row's seed and on how many tokens the row has drawn before, so the row's tokens do
    not depend on the other rows of the batch.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        """Draw for rows with these seeds, of 64 bits and none below 0."""
        self._seeds = np.array(seeds, dtype=np.uint64)
        self._drawn = np.zeros_like(self._seeds)
        self._rows = np.arange(len(seeds))

    def expect(self, rows: Sequence[int]) -> None:
        """Expect the logits of these rows from now on, in this order.

        Before the first call they are those of all rows, in the order of the seeds.
        """
        self._rows = np.array(rows)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return logits, (B, V), that are 0 at the token that was drawn and -inf at all others."""
        rows = self._rows
        bits_B = split_mix_64(self._seeds[rows], self._drawn[rows])
        self._drawn[rows] += np.uint64(1)
        uniforms_B = torch.from_numpy((bits_B >> np.uint64(11)) / 2**53)  # float64 holds 53 bits
        tokens_B = tokens_at(scores, uniforms_B.to(scores.device, non_blocking=True))
        return torch.full_like(scores, -torch.inf).scatter_(-1, tokens_B[:, None], 0)


def split_mix_64(seeds_B: np.ndarray, places_B: np.ndarray) -> np.ndarray:
    """Return the output of SplitMix64 (Steele, Lea and Flood 2014) for each seed at its place, from 0; all uint64."""
    bits_B = seeds_B + (places_B + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)  # modulo 2**64
    bits_B = (bits_B ^ bits_B >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    bits_B = (bits_B ^ bits_B >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return bits_B ^ bits_B >> np.uint64(31)


def tokens_at(logits_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Return each row's first token, (B,), whose cumulative probability exceeds the row's number in [0, 1).

    A token of probability 0 is never returned.
    """
    # In fp32, as the exponential takes four times as long in float64. Then whole numbers, because float64 adds those
    # below 2**53 without rounding: a GPU adds in parallel, and rounded sums could grow at a token of probability 0.
    weights_BV = logits_BV.softmax(-1, dtype=torch.float32).double().mul_(2**52).floor_()
    sums_BV = weights_BV.cumsum(-1)
    tokens_B1 = torch.searchsorted(sums_BV, uniforms_B[:, None] * sums_BV[:, -1:], right=True)
    return tokens_B1[:, 0].clamp_max(logits_BV.shape[-1] - 1)  # logits that are NaN lead beyond the last token


class RowSamples(RowDraws):
    """Draws after the logits were divided by a temperature and cut to top-k and top-p, in this order."""

    def __init__(self, seeds: Sequence[int], *, temperature: float, top_p: float, top_k: int = 0) -> None:
        super().__init__(seeds)
        self._temperature, self._top_p, self._top_k = temperature, top_p, top_k

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See RowDraws."""
        logits_BV = scores.float() / self._temperature
        if 0 < self._top_k < logits_BV.shape[-1]:
            least_B1 = logits_BV.topk(self._top_k).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
        return super().__call__(input_ids, cut_to_top_p(logits_BV, self._top_p))


def cut_to_top_p(logits_BV: Tensor, top_p: float, most: int = 1024) -> Tensor:
    """Return logits with -inf but for the smallest set of tokens whose total probability is at least top_p.

    On a CPU only the `most` likely tokens are sorted where they are enough.
    """
    if top_p >= 1:
        return logits_BV
    probs_BV = logits_BV.softmax(-1)
    vocabulary = probs_BV.shape[-1]
    # On a GPU the host would wait for the check whether they are enough.
    most = min(most, vocabulary) if logits_BV.device.type == "cpu" else vocabulary
    top_BK, tokens_BK = probs_BV.topk(most)
    if most < vocabulary and bool((top_BK.sum(-1) < top_p).any()):
        top_BK, tokens_BK = probs_BV.sort(descending=True)
    # A token stays if those before it are less than top_p, so that the first one always does.
    stays_BK = top_BK.cumsum(-1) - top_BK < top_p
    kept_BV = torch.zeros_like(logits_BV, dtype=torch.bool).scatter(-1, tokens_BK, stays_BK)
    return logits_BV.masked_fill(~kept_BV, -torch.inf)
