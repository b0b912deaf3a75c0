import math
from collections import Counter
from functools import partial

import pytest
import torch
from word_models import word_tokenizer

from llmdistill.batch import IGNORE_INDEX
from llmdistill.data.pairs import EncodedPair, PairExample, collate_pairs, encode_pairs
from llmdistill.data.sampler import scoring_batches
from llmdistill.data.targets import MaskedTargets, TargetExample, encode_targets
from llmdistill.errors import UserError

PAD, CLS, SEP, MASK, A, B, C, D = range(8)


def tokenizer(*, segments=True):
    """One token a letter, from A on."""
    words = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", "[UNK]"]
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * segments
    return word_tokenizer(words, letters=True, model_input_names=names)


def examples(*sentences: tuple[str, str | None], target: int | float | None = 1) -> list[PairExample]:
    return [PairExample(first, second, target, number) for number, (first, second) in enumerate(sentences)]


def test_pairs_as_tokens():
    found = encode_pairs(examples(("ab", "c"), ("a", "")), tokenizer(), 10)
    assert found == [
        EncodedPair([CLS, A, B, SEP, C, SEP], [0, 0, 0, 0, 1, 1], 1),
        EncodedPair([CLS, A, SEP, SEP], [0, 0, 0, 1], 1),
    ]
    assert encode_pairs(examples(("ab", None)), tokenizer(), 10) == [EncodedPair([CLS, A, B, SEP], [0] * 4, 1)]
    without = encode_pairs(examples(("ab", "c"), target=None), tokenizer(segments=False), 10)
    assert without == [EncodedPair([CLS, A, B, SEP, C, SEP], None, None)]


def test_the_longer_sentence_is_cut():
    long_first, long_second = encode_pairs(examples(("abcdabcd", "bc"), ("ab", "cdcdcd")), tokenizer(), 8)
    assert long_first.input_ids == [CLS, A, B, C, SEP, B, C, SEP]
    assert long_second.input_ids == [CLS, A, B, SEP, C, D, C, SEP]
    [single] = encode_pairs(examples(("abcdabcd", None)), tokenizer(), 5)
    assert single.input_ids == [CLS, A, B, C, SEP]
    for sentences, limit in ((("a", "b"), 5), (("a", None), 3)):
        assert len(encode_pairs(examples(sentences), tokenizer(), limit)[0].input_ids) == limit
        with pytest.raises(UserError, match=f"max_length is {limit - 1}: the tokenizer's own marks take"):
            encode_pairs(examples(sentences), tokenizer(), limit - 1)


def test_batches_of_classes_and_of_scores():
    items = [EncodedPair([5, 6, 7], [0, 0, 1], 2), EncodedPair([8], [1], None)]
    batch = collate_pairs(items, pad_token_id=9)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.token_type_ids.tolist() == [[0, 0, 1], [1, 0, 0]]
    assert batch.labels.tolist() == [[IGNORE_INDEX] * 3] * 2
    assert (batch.targets.dtype, batch.targets.tolist()) == (torch.int64, [2, IGNORE_INDEX])
    scores = collate_pairs([EncodedPair([5], None, None), EncodedPair([5], None, 2.5)], pad_token_id=9)
    assert scores.token_type_ids is None
    assert scores.targets.dtype == torch.float32
    assert scores.targets.tolist() == pytest.approx([math.nan, 2.5], nan_ok=True)


COLLATE = partial(collate_pairs, pad_token_id=0)


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize("world_size", [3, 5])
def test_every_item_is_scored_once_whatever_the_ranks(world_size, kind):
    items = [EncodedPair([7] * (1 + n % 4), None, kind(n)) for n in range(10)]
    shares = [scoring_batches(items, COLLATE, batch_size=3, rank=r, world_size=world_size) for r in range(world_size)]
    assert len({len(share) for share in shares}) == 1, "every rank makes the same number of forward passes"
    seen: list[int] = []
    for share in shares:
        widths = [batch.input_ids.shape[1] for indices, batch in share if indices]
        assert widths == sorted(widths)
        for indices, batch in share:
            seen += indices
            if indices:
                assert batch.targets.tolist() == indices, "an item's target is its place here"
                assert batch.attention_mask.sum(1).tolist() == [1 + index % 4 for index in indices]
            else:
                assert not batch.has_target().any()
                assert batch.input_ids.shape == (3, 1)
    assert sorted(seen) == list(range(10))


def test_rows_with_targets_are_cut_and_counted():
    rows = [TargetExample("abcd", "d", "abc"), TargetExample("abc", None, "ab")]
    found = encode_targets(rows, tokenizer(), max_source=6, max_target=3)
    assert [item.source_ids for item in found.items] == [[CLS, A, B, SEP, D, SEP], [CLS, A, B, C, SEP]]
    assert [item.target_ids for item in found.items] == [[A, B, C], [A, B, SEP]], "a cut target has no end"
    assert (found.cut_sources, found.cut_targets) == (1, 1)


def masked(share: float, *, segments: bool = True) -> MaskedTargets:
    rows = [TargetExample("abcdefg", "h", "abcdefghi"), TargetExample("ab", None, "cd")]
    words = tokenizer(segments=segments)
    items = encode_targets(rows, words, max_source=12, max_target=12).items
    return MaskedTargets(items, words, mask_share=share)


def test_only_tokens_of_the_target_are_predicted():
    sequences = masked(0.7)
    whole = masked(1.0).items
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
    batch = masked(1.0).batch([1, 0], seed=0)
    assert batch.visible_until[0].tolist() == [4, 4, 4, 4, 5, 6, 7, *[21] * 14], "padding sees all"
    assert batch.visible_until[1].tolist() == [11] * 11 + list(range(12, 22))
    assert batch.token_type_ids[0].tolist() == [0] * 4 + [1] * 3 + [0] * 14
    assert batch.attention_mask.sum(1).tolist() == [7, 21]
    assert masked(1.0, segments=False).batch([0], seed=0).token_type_ids is None


def test_masks_depend_on_seed_epoch_and_index_alone():
    sequences = masked(0.5)
    one, again = sequences.batch([4], seed=1), sequences.batch([4, 5], seed=1)
    assert torch.equal(one.input_ids[0], again.input_ids[0, :21])
    rows = {tuple(sequences.batch([place], seed).labels[0].tolist()) for place in (0, 2, 4) for seed in (0, 1)}
    assert len(rows) > 3
