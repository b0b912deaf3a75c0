from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from llmdistill.data.collate import collate
from llmdistill.data.instruct import Encoded
from llmdistill.data.sampler import TrainLoader, _permutation, global_batch_indices, rank_micro_batches


def indices(step: int, *, seed: int = 3, size: int = 10, batch: int = 4) -> list[int]:
    return global_batch_indices(seed=seed, step=step, dataset_size=size, global_batch_size=batch)


@pytest.mark.parametrize("seed", [0, 3])
def test_each_epoch_is_a_permutation_and_batches_straddle_epochs(seed: int) -> None:
    walked = [index for step in range(15) for index in indices(step, seed=seed)]
    epochs = [walked[start : start + 10] for start in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6, "each epoch has its own order"


def test_a_batch_larger_than_the_set() -> None:
    batch = indices(0, size=3, batch=8)
    assert sorted(batch[:3]) == sorted(batch[3:6]) == [0, 1, 2]
    assert sorted(batch[6:] + indices(1, size=3, batch=8)[:1]) == [0, 1, 2]


def test_seed_and_step_alone_decide() -> None:
    expected = [indices(step) for step in range(8)]
    for step in (5, 0, 7, 2):
        _permutation.cache_clear()
        random.seed(step)
        np.random.seed(step)
        torch.manual_seed(step)
        state = torch.random.get_rng_state()
        assert indices(step) == expected[step]
        assert torch.equal(torch.random.get_rng_state(), state)
    assert indices(0, seed=0) != indices(0, seed=1), "0 is a seed like any other"
    assert indices(0, seed=0, size=1000, batch=1000) != list(range(1000)), "0 does not mean unshuffled"


@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 24), (1, 4), (2, 12), (2, 3), (4, 2), (3, 1), (8, 3)])
def test_ranks_and_micro_batches_make_up_the_global_batch(world_size: int, micro_batch_size: int) -> None:
    batch = indices(1, size=100, batch=24)
    by_rank = [
        rank_micro_batches(batch, rank=rank, world_size=world_size, micro_batch_size=micro_batch_size)
        for rank in range(world_size)
    ]
    assert {len(parts) for parts in by_rank} == {24 // (world_size * micro_batch_size)}
    assert {len(part) for parts in by_rank for part in parts} == {micro_batch_size}
    # Accumulation step by accumulation step, rank by rank, the order is that of the global batch.
    assert [index for parts in zip(*by_rank, strict=True) for part in parts for index in part] == batch


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(AssertionError):
        rank_micro_batches(list(range(10)), rank=0, world_size=2, micro_batch_size=2)


def test_loader_collates_this_ranks_share() -> None:
    items = [Encoded([n] * (1 + n % 4), [n, 99]) for n in range(10)]

    def loader(rank: int, world_size: int, micro: int) -> TrainLoader[Encoded]:
        return TrainLoader(
            items,
            collate=collate,
            pad_token_id=0,
            seed=3,
            global_batch_size=4,
            micro_batch_size=micro,
            rank=rank,
            world_size=world_size,
        )

    expected = indices(5)
    for rank in range(2):
        batches = loader(rank, 2, 1).micro_batches(5)
        wanted = [collate([items[expected[rank]]], 0), collate([items[expected[2 + rank]]], 0)]
        assert len(batches) == 2
        for batch, want in zip(batches, wanted, strict=True):
            assert torch.equal(batch.input_ids, want.input_ids)
            assert torch.equal(batch.labels, want.labels)
        shown = loader(rank, 2, 1).micro_batch_items(5)
        assert shown == [[items[expected[rank]]], [items[expected[2 + rank]]]]
    [whole] = loader(0, 1, 4).micro_batches(5)
    assert whole.input_ids.shape[0] == 4
    assert loader(0, 1, 4).micro_batch_items(5) == [[items[index] for index in expected]]
