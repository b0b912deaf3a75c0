"""Several examples in a row: who stands where, and that none sees another."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tiny import SETTINGS, tiny_model

from llmdistill.batch import IGNORE_INDEX
from llmdistill.data.collate import Encoded, collate, collate_packed, pack
from llmdistill.models.families import FAMILIES

X = IGNORE_INDEX


def test_rows_masks_positions_and_labels() -> None:
    items = [Encoded([5, 6, 7], [8, 2]), Encoded([9], [3, 2]), Encoded([4, 4], [6])]
    batch = collate_packed(items, pad_token_id=0, max_length=8)
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 2, 0], [9, 3, 2, 4, 4, 6]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 2, 2, 2]]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0], [0, 1, 2, 0, 1, 2]]
    assert batch.labels.tolist() == [[X, X, X, 8, 2, X], [X, 3, 2, X, X, 6]]
    tensors = (batch.input_ids, batch.attention_mask, batch.labels, batch.position_ids)
    assert {tensor.dtype for tensor in tensors} == {torch.int64}


def test_the_first_token_of_an_example_is_no_label() -> None:
    batch = collate_packed([Encoded([], [5, 6, 2]), Encoded([], [7, 2])], pad_token_id=0, max_length=8)
    assert batch.labels.tolist() == [[X, 6, 2, X, 2]]


def test_packed_and_padded_count_the_same() -> None:
    rng = np.random.default_rng(0)
    items = [Encoded([1] * int(a), [2] * int(b)) for a, b in rng.integers(1, 20, (17, 2))]
    packed, padded = collate_packed(items, 0, max_length=50), collate(items, 0)
    assert packed.counts() == padded.counts()
    assert packed.input_ids.numel() < padded.input_ids.numel()
    assert sorted(packed.input_ids[packed.labels != X].tolist()) == sorted(
        padded.input_ids[padded.labels != X].tolist()
    )


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


PACKED = [name for name in SETTINGS if FAMILIES[name].causal and not FAMILIES[name].own_mask]
SOME_LAYERS: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "smollm3": {"no_rope_layer_interval": 2},
}
"""Settings of which only some layers have sliding windows or positions."""


def test_every_decoder_is_tried() -> None:
    assert set(PACKED) == {name for name, family in FAMILIES.items() if family.causal and not family.own_mask}


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_example_gives_the_logits_that_it_gives_alone(name: str) -> None:
    model = tiny_model(name, scale=5.0, **SOME_LAYERS.get(name, {}))
    torch.manual_seed(0)
    items = [Encoded(torch.randint(2, 60, (n,)).tolist(), [3, 1]) for n in (5, 7, 3, 9, 1)]
    batch = collate_packed(items, pad_token_id=1, max_length=16)
    assert len(batch.input_ids) == 3 > int((batch.attention_mask == 0).any())
    compared = 0
    with torch.no_grad():
        packed = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        assert packed.isfinite().all(), "padding sees padding"
        for row, (ids, mask) in enumerate(zip(batch.input_ids, batch.attention_mask, strict=True)):
            for number in range(1, int(mask.max()) + 1):
                alone = model(input_ids=ids[mask == number][None], use_cache=False).logits[0]
                torch.testing.assert_close(packed[row][mask == number], alone, rtol=1e-5, atol=1e-5)
                compared += 1
    assert compared == len(items)
