"""Texts of several languages, sampled by a power of their sizes, against the formula of XLM."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest
from transformers import BertTokenizerFast

from llmdistill.data.corpus import tokenize
from llmdistill.data.mixture import MixedSequences, mixture_counts
from llmdistill.data.sampler import SequenceLoader, Share
from llmdistill.data.text import TextSequences

LENGTH = 10
SIZES = {"de": 30, "en": 200, "sw": 4}
TOTAL = sum(SIZES.values())
WORDS = {name: [f"{name}{number}" for number in range(size + 1)] for name, size in SIZES.items()}
"""A word for each sequence, and one of a last document that is too short because no separator follows it."""


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Each language has documents of seven times one word, a sequence of ten tokens each, with no other's word."""
    folder = tmp_path_factory.mktemp("texts")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *(word for words in WORDS.values() for word in words)]))
    tokenizer = BertTokenizerFast(vocab=str(folder / "vocab.txt"))
    found = {}
    for name, words in WORDS.items():
        text = folder / f"{name}.txt"
        text.write_text("\n\n".join(" ".join([word] * (LENGTH - 3)) for word in words), encoding="utf-8")
        corpus = tokenize(text, tokenizer, cache_dir=folder)
        # The start token, seven words, the separator after the document, and the one after the sequence: ten tokens.
        found[name] = TextSequences(corpus, tokenizer, objective="masked", max_length=LENGTH, mask_share=0.3)
    assert {name: len(part) for name, part in found.items()} == SIZES
    return found


def seen(mixed: MixedSequences, steps: range, seed: int = 5) -> list[int]:
    """The first unmasked word of each sequence of some steps, in order."""
    loader = SequenceLoader(mixed, Share(seed=seed, global_batch_size=4, micro_batch_size=4))
    batches = [batch for step in steps for batch in loader.micro_batches(step)]
    found = []
    for batch in batches:
        shown = np.where(batch.labels.numpy() >= 0, batch.labels.numpy(), batch.input_ids.numpy())
        found += [int(Counter(row[row > 4].tolist()).most_common(1)[0][0]) for row in shown]
    return found


@cache
def language(word: int) -> str:
    ends = np.cumsum([len(words) for words in WORDS.values()]) + 5
    return list(SIZES)[int(np.searchsorted(ends, word, side="right"))]


@pytest.mark.parametrize("exponent", [0.0, 0.3, 1.0])
def test_an_epoch_has_the_shares_of_the_formula(parts, exponent):
    mixed = MixedSequences(parts, exponent)
    assert len(mixed) == TOTAL
    weights = {name: (size / TOTAL) ** exponent for name, size in SIZES.items()}

    found = Counter(language(word) for word in seen(mixed, range(TOTAL // 4)))

    for name, weight in weights.items():
        assert abs(found[name] - TOTAL * weight / sum(weights.values())) <= 4, name  # up to 3 belong to the next epoch
    assert all(f"{size / TOTAL:.1%} of the text" in mixed.report() for size in SIZES.values())


def test_a_text_is_seen_whole_before_anything_comes_again(parts):
    mixed = MixedSequences(parts, 0.3)

    words = seen(mixed, range(2 * TOTAL // 4))

    for (name, size), count in zip(SIZES.items(), mixed.counts, strict=True):
        times = Counter(word for word in words if language(word) == name)
        full, rest = divmod(2 * count, size)
        assert set(times.values()) <= {full - 1, full, full + 1, full + 2}, name
        if full == 0:
            assert len(times) >= rest - 4
    # The first epoch sees all regions of the large text and not its beginning alone.
    gaps = np.diff(sorted(word for word in words[:TOTAL] if language(word) == "en"))
    assert gaps.max() < 8 * gaps.mean()
    # The batches depend on seed and step alone.
    assert seen(mixed, range(40, 60)) == words[160:240]
    assert seen(mixed, range(0, 20), seed=6) != words[:80]


def test_the_same_places_of_two_texts_have_different_masks(parts):
    # One sequence, drawn as the part of each number.
    masks = {tuple((parts["en"].read(0, 0, 3, number).labels >= 0).tolist()) for number in range(12)}
    assert len(masks) > 3


def test_counts_add_up_and_leave_nobody_out():
    for sizes in ([1000, 1], [3, 3, 3], [1, 1], [10**9, 10**6, 5], [7]):
        for exponent in (0.0, 0.3, 1.0):
            counts = mixture_counts(sizes, exponent)
            assert sum(counts) == sum(sizes)
            assert min(counts) >= 1
            wanted = [sum(sizes) * size**exponent / sum(each**exponent for each in sizes) for size in sizes]
            assert all(abs(count - share) <= 1 for count, share in zip(counts, wanted, strict=True)), (sizes, exponent)
