from __future__ import annotations

import torch

from llmdistill.batch import IGNORE_INDEX
from llmdistill.data.collate import Encoded, collate, sample_id
from llmdistill.data.pairs import EncodedPair, collate_pairs

END = 2
X = IGNORE_INDEX


def test_right_padding_labels_and_mask() -> None:
    batch = collate([Encoded([5, 6, 7], [8, END]), Encoded([5], [9, END])], pad_token_id=0)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, END], [5, 9, END, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.labels.tolist() == [[X, X, X, 8, END], [X, 9, END, X, X]]
    assert {batch.input_ids.dtype, batch.attention_mask.dtype, batch.labels.dtype} == {torch.int64}


def test_the_end_token_is_learned_where_it_doubles_as_padding() -> None:
    batch = collate([Encoded([5, END, 7], [8, END]), Encoded([5], [END])], pad_token_id=END)
    assert batch.labels.tolist() == [[X, X, X, 8, END], [X, END, X, X, X]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]


def test_where_the_parts_end_counts_and_segments_do():
    assert sample_id([1, 2], [3]) != sample_id([1], [2, 3]) != sample_id([1, 2, 3])
    first, second = EncodedPair([1, 2, 3], [0, 0, 1], 1), EncodedPair([1, 2, 3], [0, 1, 1], 1)
    one, other = collate_pairs([first, second], 0).sample_ids
    assert one != other
    assert 0 <= one[0] < 2**63


def test_ids_stay_what_they_are():
    """They are kept in files: another hash would make every cache useless."""
    assert sample_id([1, 2, 3]) == 4371673759061385723
    assert Encoded([1], [2, 3]).sample_id == sample_id([1], [2, 3])
