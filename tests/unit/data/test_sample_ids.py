"""Sample ids travel from the example to the batch, and depend on nothing but the tokens."""

from __future__ import annotations

import pytest

from llmdistill.data.collate import Encoded, collate, collate_packed, sample_id
from llmdistill.data.pairs import EncodedPair, collate_pairs
from llmdistill.data.sampler import TrainLoader

from support import train_loader

ITEMS = [Encoded([3, 4][: 1 + n % 2], [5 + n, 2]) for n in range(12)]


def loader(**changes: int) -> TrainLoader[Encoded]:
    settings = {"seed": 1, "global_batch_size": 4, "micro_batch_size": 2, **changes}
    return train_loader(ITEMS, pad_token_id=0, collate=collate, **settings)


def test_each_row_has_the_id_of_its_example():
    batch = collate(ITEMS, 0)
    assert batch.sample_ids == tuple((sample_id(item.prompt_ids, item.response_ids),) for item in ITEMS)
    assert len({row for row in batch.sample_ids}) == len(ITEMS)
    for row, item in zip(batch.input_ids, ITEMS, strict=True):
        assert row[: len(item)].tolist() == [*item.prompt_ids, *item.response_ids]


def test_a_packed_row_has_the_ids_of_its_examples_in_order():
    batch = collate_packed(ITEMS, 0, max_length=9)
    by_id = {item.sample_id: item for item in ITEMS}
    assert sorted(number for row in batch.sample_ids for number in row) == sorted(by_id)
    for ids, tokens, mask in zip(batch.sample_ids, batch.input_ids, batch.attention_mask, strict=True):
        expected = [token for number in ids for token in by_id[number].prompt_ids + by_id[number].response_ids]
        assert tokens[mask != 0].tolist() == expected
    assert any(len(ids) > 1 for ids in batch.sample_ids)


@pytest.mark.parametrize("split", [{"micro_batch_size": 4}, {"micro_batch_size": 1}, {"world_size": 2}])
def test_the_ids_of_a_step_do_not_depend_on_ranks_or_micro_batches(split):
    for step in range(5):
        expected = {ids for batch in loader().micro_batches(step) for ids in batch.sample_ids}
        ranks = range(split.get("world_size", 1))
        found = {
            ids
            for rank in ranks
            for batch in loader(**split, **({"rank": rank} if len(ranks) > 1 else {})).micro_batches(step)
            for ids in batch.sample_ids
        }
        assert found == expected


def test_where_the_parts_end_counts_and_segments_do():
    assert sample_id([1, 2], [3]) != sample_id([1], [2, 3]) != sample_id([1, 2, 3])
    first, second = EncodedPair([1, 2, 3], [0, 0, 1], 1), EncodedPair([1, 2, 3], [0, 1, 1], 1)
    one, other = collate_pairs([first, second], 0).sample_ids
    assert one != other
    assert 0 <= one[0] < 2**63


def test_ids_stay_what_they_are():
    """They are kept in files: another hash would make every cache useless."""
    assert sample_id([1, 2, 3]) == 4371673759061385723
