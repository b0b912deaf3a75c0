from collections import Counter

import pytest

from llmdistill.data.collate import Encoded, collate
from llmdistill.data.sampler import Mixture, Share, global_batch_indices, permute

from support import check_steps, train_loader


def indices(step: int, *, seed: int = 3, size: int = 10, batch: int = 4) -> list[int]:
    return global_batch_indices(seed=seed, step=step, dataset_size=size, global_batch_size=batch)


def test_each_epoch_is_a_permutation_and_batches_straddle_epochs():
    walked = [index for step in range(15) for index in indices(step)]
    epochs = [walked[start : start + 10] for start in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6, "each epoch has its own order"


def test_seed_and_step_alone_decide():
    def made(step: int) -> list[int]:
        permute.cache_clear()
        return indices(step)

    check_steps(made)
    assert indices(0, seed=0) != indices(0, seed=1), "0 is a seed like any other"
    assert indices(0, seed=0, size=1000, batch=1000) != list(range(1000)), "0 does not mean unshuffled"


class TestMixture:
    MIXTURE = Mixture.of([10, 3, 7], [1, 2, 1])

    def epoch(self, number: int, seed: int = 3) -> list[int]:
        batches = (
            global_batch_indices(seed=seed, step=step, dataset_size=20, global_batch_size=4, mixture=self.MIXTURE)
            for step in range(5 * number, 5 * number + 5)
        )
        return [index for batch in batches for index in batch]

    def test_an_epoch_has_the_share_of_each_weight(self):
        for number in range(6):
            parts = Counter("aaaaaaaaaabbbccccccc"[index] for index in self.epoch(number))
            assert parts == {"a": 5, "b": 10, "c": 5}

    def test_no_example_comes_again_before_all_of_its_file_came(self):
        walked = [index for number in range(6) for index in sorted(self.epoch(number))]
        for first, size in ((0, 10), (10, 3), (13, 7)):
            seen = Counter(index for index in walked if first <= index < first + size)
            assert len(seen) == size
            assert max(seen.values()) - min(seen.values()) <= 1

    def test_seed_and_step_alone_decide(self):
        def made(step: int) -> list[int]:
            permute.cache_clear()
            return global_batch_indices(seed=3, step=step, dataset_size=20, global_batch_size=6, mixture=self.MIXTURE)

        check_steps(made)
        assert self.epoch(0) != self.epoch(0, seed=4)
        assert self.epoch(0) != self.epoch(1)


ITEMS = [Encoded([n] * (1 + 7 * n % 11), [n, 99]) for n in range(40)]


def loader(items=ITEMS, **changes):
    settings = {"pad_token_id": 0, "seed": 3, "global_batch_size": 4, "micro_batch_size": 4}
    return train_loader(items, collate=collate, **{**settings, **changes})


def whole_batch(step, **changes):
    """The global batch, by the loader of one rank."""
    return [item for part in loader(**changes).micro_batch_items(step) for item in part]


def test_loader_collates_this_ranks_share_longest_first():
    drawn = [ITEMS[index] for index in indices(5, size=40, batch=8)]
    whole = whole_batch(5, global_batch_size=8)
    assert Counter(map(str, whole)) == Counter(map(str, drawn))
    assert [len(item) for item in whole] == sorted((len(item) for item in drawn), reverse=True)
    for rank in range(2):
        share = loader(global_batch_size=8, micro_batch_size=2, rank=rank, world_size=2)
        parts = [whole[start : start + 2] for start in (2 * rank, 4 + 2 * rank)]
        assert share.micro_batch_items(5) == parts
        wanted = [collate(part, 0).input_ids.tolist() for part in parts]
        assert [batch.input_ids.tolist() for batch in share.micro_batches(5)] == wanted


@pytest.mark.parametrize(("bucket_steps", "spread"), [(1, False), (5, False), (5, True)])
def test_ranks_and_micro_batches_do_not_change_what_a_step_learns(bucket_steps, spread):
    settings = {"global_batch_size": 24, "bucket_steps": bucket_steps, "spread": spread}
    settings["items"] = [Encoded([n] * (1 + 7 * n % 11), [n]) for n in range(480)]
    for step in (0, 3, 7):
        whole = whole_batch(step, micro_batch_size=24, **settings)
        for world, size in ((1, 4), (2, 3), (8, 3)):
            ranks = [loader(micro_batch_size=size, rank=rank, world_size=world, **settings) for rank in range(world)]
            parts = [part for rank in ranks for part in rank.micro_batch_items(step)]
            assert {len(part) for part in parts} == {size}
            assert Counter(map(str, whole)) == Counter(str(item) for part in parts for item in part)


def test_a_window_is_sorted_and_cut_into_its_steps():
    items = [Encoded([n] * (1 + 7 * n % 11), [n]) for n in range(64)]
    batches = [whole_batch(step, items=items, bucket_steps=4) for step in range(16)]
    assert sorted(item.prompt_ids[0] for batch in batches for item in batch) == list(range(64)), "an epoch is walked"
    orders = set()
    for window in range(4):
        steps = batches[4 * window : 4 * window + 4]
        plain = [item for step in range(4 * window, 4 * window + 4) for item in whole_batch(step, items=items)]
        assert Counter(map(str, plain)) == Counter(str(item) for batch in steps for item in batch)
        longest_first = sorted(steps, key=lambda batch: -sum(map(len, batch)))
        lengths = [len(item) for batch in longest_first for item in batch]
        assert lengths == sorted(lengths, reverse=True)
        orders.add(tuple(steps.index(batch) for batch in longest_first))
    assert len(orders) > 1, "the order of the batches is drawn anew"


def test_a_window_is_a_small_part_of_the_data_set():
    assert loader(ITEMS, bucket_steps=50).bucket_steps == 2
    assert loader(ITEMS[:3], bucket_steps=50).bucket_steps == 1
    assert len(whole_batch(3, items=ITEMS[:3], bucket_steps=50)) == 4


def test_spread_micro_batches_are_about_equally_large():
    items = sorted(ITEMS[:24], key=len, reverse=True)
    for world_size, size in ((1, 4), (2, 3)):
        settings = {"world_size": world_size, "micro_batch_size": size, "seed": 0, "global_batch_size": len(items)}
        ranks = [Share(rank=rank, spread=True, **settings).micro_batches(items) for rank in range(world_size)]
        tokens = [sum(map(len, part)) for parts in ranks for part in parts]
        assert max(tokens) - min(tokens) <= len(items[0]) - len(items[-1])


def test_a_rank_reads_its_own_examples_alone():
    """A set that is mapped into memory is not copied by every rank for the sake of the order."""
    read: list[int] = []

    class Mapped(list[Encoded]):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

        def length(self, index: int) -> int:
            return len(ITEMS[index])

    settings = {"rank": 1, "world_size": 2, "micro_batch_size": 2, "bucket_steps": 2}
    expected = loader(**settings).micro_batch_items(5)
    assert loader(Mapped(ITEMS), **settings).micro_batch_items(5) == expected
    assert len(read) == 2
