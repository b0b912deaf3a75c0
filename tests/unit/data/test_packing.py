"""Several examples in a row: who stands where, and that none sees another."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from llmdistill.batch import IGNORE_INDEX
from llmdistill.data.collate import Encoded, collate_packed, pack

X = IGNORE_INDEX


def test_rows_masks_positions_and_labels() -> None:
    items = [Encoded([5, 6, 7], [8, 2]), Encoded([9], [3, 2]), Encoded([4, 4], [6])]
    batch = collate_packed(items, pad_token_id=0, max_length=8)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 2, 0], [9, 3, 2, 4, 4, 6]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 2, 2, 2]]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 0, 1, 2]]
    assert batch.labels.tolist() == [[X, X, X, 8, 2, X], [X, 3, 2, X, X, 6]]


def test_the_first_token_of_an_example_is_no_label() -> None:
    batch = collate_packed([Encoded([], [5, 6, 2]), Encoded([], [7, 2])], pad_token_id=0, max_length=8)
    assert batch.labels.tolist() == [[X, 6, 2, X, 2]]


@pytest.mark.parametrize("seed", range(5))
def test_every_example_stands_in_one_row_that_holds_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, int(rng.integers(1, 25))).tolist()
    rows = pack(lengths, 32)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    filled = [sum(lengths[index] for index in row) for row in rows]
    assert max(filled) <= 32
    assert all(filled)
    assert len(rows) * max(filled) <= len(lengths) * max(lengths), "never more positions than with one in a row"


@pytest.mark.parametrize("seed", range(5))
def test_few_examples_take_nearly_the_fewest_positions(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(2, 12, 5).tolist()
    placings = (
        [[index for index in range(5) if places[index] == row] for row in set(places)]
        for places in itertools.product(range(5), repeat=5)
    )
    filled = ([sum(lengths[index] for index in row) for row in rows] for rows in placings)
    fewest = min(len(sums) * max(sums) for sums in filled if max(sums) <= 20)
    taken = [sum(lengths[index] for index in row) for row in pack(lengths, 20)]
    # Filling the emptiest with the longest next makes the longest row at most 4/3 of the best (Graham 1969).
    assert fewest <= len(taken) * max(taken) <= 4 / 3 * fewest


def test_first_fit_decreasing() -> None:
    lengths = [4, 8, 1, 4, 2, 1]
    assert pack(lengths, 10) == [[1, 4], [0, 3, 2, 5]], "20 tokens need two rows of 10, and fill them"
