import itertools

import numpy as np
import pytest
import torch

from llmdistill.batch import IGNORE_INDEX
from llmdistill.data.collate import Encoded, collate, collate_packed, pack_rows, sample_id
from llmdistill.data.pairs import EncodedPair, collate_pairs

END = 2
X = IGNORE_INDEX


def test_right_padding_labels_and_mask():
    """The end token is learned and seen where it doubles as padding."""
    batch = collate([Encoded([5, END, 7], [8, END]), Encoded([5], [9, END])], pad_token_id=END)
    assert batch.input_ids.tolist() == [[5, END, 7, 8, END], [5, 9, END, END, END]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.labels.tolist() == [[X, X, X, 8, END], [X, 9, END, X, X]]
    assert {batch.input_ids.dtype, batch.attention_mask.dtype, batch.labels.dtype} == {torch.int64}


def test_where_the_parts_end_counts_and_segments_do():
    assert sample_id([1, 2], [3]) != sample_id([1], [2, 3]) != sample_id([1, 2, 3])
    assert Encoded([1], [2, 3]).sample_id == sample_id([1], [2, 3])
    first, second = EncodedPair([1, 2, 3], [0, 0, 1], 1), EncodedPair([1, 2, 3], [0, 1, 1], 1)
    one, other = collate_pairs([first, second], 0).sample_ids
    assert one != other
    # They are kept in files: another hash would make every cache useless.
    assert sample_id([1, 2, 3]) == 4371673759061385723


def test_rows_masks_positions_and_labels():
    items = [Encoded([5, 6, 7], [8, 2]), Encoded([9], [3, 2]), Encoded([4, 4], [6])]
    batch = collate_packed(items, pad_token_id=0, max_length=8)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 2, 0], [9, 3, 2, 4, 4, 6]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 2, 2, 2]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 0, 1, 2]]
    assert batch.labels.tolist() == [[X, X, X, 8, 2, X], [X, 3, 2, X, X, 6]]


def test_the_first_token_of_an_example_is_no_label():
    batch = collate_packed([Encoded([], [5, 6, 2]), Encoded([], [7, 2])], pad_token_id=0, max_length=8)
    assert batch.labels.tolist() == [[X, 6, 2, X, 2]]


@pytest.mark.parametrize("seed", range(5))
def test_few_examples_take_nearly_the_fewest_positions(seed):
    lengths = np.random.default_rng(seed).integers(2, 12, 5).tolist()
    rows = [np.bincount(places, lengths) for places in itertools.product(range(5), repeat=5)]
    fewest = min(np.count_nonzero(sums) * sums.max() for sums in rows if sums.max() <= 20)
    packed = pack_rows(lengths, 20)
    assert sorted(itertools.chain(*packed)) == list(range(5)), "each stands in one row"
    taken = [sum(lengths[index] for index in row) for row in packed]
    assert max(taken) <= 20
    # Filling the emptiest with the longest next makes the longest row at most 4/3 of the best (Graham 1969).
    assert fewest <= len(taken) * max(taken) <= 4 / 3 * fewest


def test_first_fit_decreasing():
    lengths = [4, 8, 1, 4, 2, 1]
    assert pack_rows(lengths, 10) == [[1, 4], [0, 3, 2, 5]], "20 tokens need two rows of 10, and fill them"
