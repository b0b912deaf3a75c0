from __future__ import annotations

from collections import Counter

import torch
from transformers import PreTrainedTokenizerFast
from word_models import word_tokenizer

from llmdistill.batch import IGNORE_INDEX
from llmdistill.data.targets import MaskedTargets, TargetExample, encode_targets

PAD, CLS, SEP, MASK = range(4)


def tokenizer(*, segments: bool = True) -> PreTrainedTokenizerFast:
    """One token a letter, from 4 on."""
    words = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", "[UNK]"]
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * segments
    return word_tokenizer(words, marked=False, letters=True, model_input_names=names)


A, B, C, D = 4, 5, 6, 7


def test_a_row_is_source_hint_and_target():
    examples = [TargetExample("abc", "d", "ab"), TargetExample("ab", None, "c")]
    found = encode_targets(examples, tokenizer(), max_source=9, max_target=4)
    assert [item.source_ids for item in found.items] == [[CLS, A, B, C, SEP, D, SEP], [CLS, A, B, SEP]]
    assert [item.target_ids for item in found.items] == [[A, B, SEP], [C, SEP]]
    assert (found.cut_sources, found.cut_targets) == (0, 0)


def test_what_exceeds_the_limits_is_cut_and_counted():
    examples = [TargetExample("abcd", "d", "abc"), TargetExample("abc", None, "ab")]
    found = encode_targets(examples, tokenizer(), max_source=6, max_target=3)
    assert [item.source_ids for item in found.items] == [[CLS, A, B, SEP, D, SEP], [CLS, A, B, C, SEP]]
    assert [item.target_ids for item in found.items] == [[A, B, C], [A, B, SEP]], "a cut target has no end"
    assert (found.cut_sources, found.cut_targets) == (1, 1)


def made(share: float, *, segments: bool = True) -> MaskedTargets:
    examples = [TargetExample("abcdefg", "h", "abcdefghi"), TargetExample("ab", None, "cd")]
    words = tokenizer(segments=segments)
    items = encode_targets(examples, words, max_source=12, max_target=12).items
    return MaskedTargets(items, words, mask_share=share)


def test_only_tokens_of_the_target_are_predicted():
    sequences = made(0.7)
    whole = made(1.0).items
    counts: Counter[str] = Counter()
    for epoch in range(200):
        batch = sequences.batch([2 * epoch, 2 * epoch + 1], seed=3)
        for row, (start, stop) in enumerate([(11, 21), (4, 7)]):
            learned = (batch.labels[row] != IGNORE_INDEX).nonzero()[:, 0].tolist()
            assert len(learned) == round(0.7 * (stop - start))
            assert all(start <= place < stop for place in learned)
            ids = torch.tensor(whole[row].ids)
            assert torch.equal(batch.labels[row, learned], ids[learned])
            others = [place for place in range(stop) if place not in learned]
            assert torch.equal(batch.input_ids[row, others], ids[others])
            counts["end"] += stop - 1 in learned
            counts["masked"] += int((batch.input_ids[row, learned] == MASK).sum())
            counts["all"] += len(learned)
    assert 240 < counts["end"] < 320, "the end token is one of the target's: 70 % of 400"
    assert 0.75 < counts["masked"] / counts["all"] < 0.85


def test_what_each_token_sees_and_its_segment():
    batch = made(1.0).batch([1, 0], seed=0)
    assert batch.visible_until[0].tolist() == [4, 4, 4, 4, 5, 6, 7, *[21] * 14], "padding sees all"
    assert batch.visible_until[1].tolist() == [11] * 11 + list(range(12, 22))
    assert batch.token_type_ids[0].tolist() == [0] * 4 + [1] * 3 + [0] * 14
    assert batch.attention_mask.sum(1).tolist() == [7, 21]
    assert made(1.0, segments=False).batch([0], seed=0).token_type_ids is None


def test_masks_depend_on_seed_epoch_and_index_alone():
    sequences = made(0.5)
    one, again = sequences.batch([4], seed=1), sequences.batch([4, 5], seed=1)
    assert torch.equal(one.input_ids[0], again.input_ids[0, :21])
    rows = {tuple(sequences.batch([place], seed).labels[0].tolist()) for place in (0, 2, 4) for seed in (0, 1)}
    assert len(rows) > 3
