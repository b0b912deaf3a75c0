"""Finds texts that nearly repeat earlier ones, by the n-grams of tokens that they share."""

from __future__ import annotations

import math
from collections.abc import Sequence

NGRAM = 3
"""Tokens of an n-gram."""


class NearDuplicates:
    """The texts so far, and which of them a further one nearly repeats.

    Two texts are near-duplicates if the Jaccard index of their sets of n-grams is at least a threshold. The search is
    exact, and compares few pairs (prefix filtering, Chaudhuri et al. 2006): with the n-grams of each set in one order,
    two sets that share so many of them share one among the first of each.
    """

    def __init__(self, threshold: float) -> None:
        """Two texts are near-duplicates from this Jaccard index on, over 0 and up to 1."""
        self._threshold = threshold
        self._sets: list[frozenset[tuple[int, ...]]] = []
        self._by_prefix: dict[tuple[int, ...], list[int]] = {}
        """For each n-gram, the texts among whose first ones it is."""

    def add(self, tokens: Sequence[int]) -> int | None:
        """Add a text; return the number (from 0) of an earlier one that it nearly repeats, and None if there is none.

        A near-duplicate is counted and not added. A text that is shorter than an n-gram is one n-gram.
        """
        unordered = {tuple(tokens[at : at + NGRAM]) for at in range(max(1, len(tokens) - NGRAM + 1))}
        # Any order of all n-grams will do. Vocabularies number rare tokens last, and few texts share a rare n-gram.
        ngrams = sorted(unordered, key=lambda ngram: (-max(ngram, default=0), ngram))
        # The overlap of two sets with this Jaccard index is at least this share of each of them. The small number is
        # for products such as 0.7 * 10, which is over 7.
        least = math.ceil(self._threshold * len(ngrams) - 1e-9)
        prefix, own = ngrams[: len(ngrams) - least + 1], frozenset(ngrams)
        for number in sorted({number for ngram in prefix for number in self._by_prefix.get(ngram, ())}):
            other = self._sets[number]
            if len(own & other) >= self._threshold * len(own | other) - 1e-9:
                return number
        for ngram in prefix:
            self._by_prefix.setdefault(ngram, []).append(len(self._sets))
        self._sets.append(own)
        return None
