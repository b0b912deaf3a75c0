from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from transformers import PreTrainedTokenizerFast
from word_models import word_tokenizer

from llmdistill.batch import IGNORE_INDEX
from llmdistill.data.pairs import EncodedPair, PairExample, collate_pairs, encode_pairs
from llmdistill.data.sampler import scoring_batches
from llmdistill.errors import UserError

CLS, SEP = 0, 1
A, B, C, D = 3, 4, 5, 6


def tokenizer(*, segments: bool = True) -> PreTrainedTokenizerFast:
    """One token a letter; [CLS] is 0, [SEP] 1 and [PAD] 2."""
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * segments
    return word_tokenizer(["[CLS]", "[SEP]", "[PAD]", *"abcd", "[UNK]"], letters=True, model_input_names=names)


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
@pytest.mark.parametrize("world_size", [1, 3, 5])
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
