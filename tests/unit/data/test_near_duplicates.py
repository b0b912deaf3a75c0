"""Near-duplicates, against the comparison of every pair."""

import random

import pytest

from llmdistill.data.near_duplicates import NGRAM, NearDuplicates


def pieces(tokens):
    return {tuple(tokens[at : at + NGRAM]) for at in range(max(1, len(tokens) - NGRAM + 1))}


def brute_force(texts, threshold):
    """For each text the first kept one with this Jaccard index, or None."""
    kept, found = [], []
    for tokens in texts:
        own = pieces(tokens)
        hits = [n for n, other in enumerate(kept) if len(own & other) / len(own | other) >= threshold - 1e-12]
        found.append(hits[0] if hits else None)
        if not hits:
            kept.append(own)
    return found


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.7, 0.9, 1.0])
def test_exactly_the_pairs_of_this_jaccard_index_are_found(threshold):
    draw = random.Random(3)
    texts = [[draw.randrange(12) for _ in range(draw.randrange(14))] for _ in range(60)]
    for _ in range(240):  # texts of which some tokens are others
        tokens = list(draw.choice(texts))
        for _ in range(draw.randrange(4)):
            tokens.insert(draw.randrange(len(tokens) + 1), draw.randrange(12))
        texts.append(tokens)
    near = NearDuplicates(threshold)
    found = [near.add(tokens) for tokens in texts]
    assert found == brute_force(texts, threshold)
    assert 20 < sum(hit is not None for hit in found) < 280


def test_a_text_that_is_one_threshold_away_counts():
    near = NearDuplicates(0.5)
    assert near.add([1, 2, 3, 4, 5]) is None
    # Two of four pieces are common: 234 and 345.
    assert near.add([2, 3, 4, 5, 6]) == 0
    assert near.add([3, 4, 5, 6, 7]) is None, "a duplicate is not compared with"
