"""Texts of several languages, sampled by a power of their sizes, against the formula of XLM."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from transformers import BertTokenizerFast

from llmdistill.data.corpus import tokenize
from llmdistill.data.mixture import MixedSequences, mixture_counts
from llmdistill.data.sampler import SequenceLoader, Share
from llmdistill.data.text import TextSequences

LENGTH = 10
DOCUMENTS = {"de": 60, "en": 400, "sw": 7}
WORDS = {name: [f"{name}{number}" for number in range(count)] for name, count in DOCUMENTS.items()}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextSequences]:
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


def language(word: int) -> str:
    ends = np.cumsum(list(DOCUMENTS.values())) + 5
    return list(DOCUMENTS)[int(np.searchsorted(ends, word, side="right"))]


@pytest.mark.parametrize("exponent", [0.0, 0.3, 0.7, 1.0])
def test_an_epoch_has_the_shares_of_the_formula(parts: dict[str, TextSequences], exponent: float) -> None:
    mixed = MixedSequences(parts, exponent)
    sizes = {name: len(part) for name, part in parts.items()}
    total = sum(sizes.values())
    assert len(mixed) == total
    weights = {name: (size / total) ** exponent for name, size in sizes.items()}

    found = Counter(language(word) for word in seen(mixed, range(total // 4)))

    for name, weight in weights.items():
        assert abs(found[name] - total * weight / sum(weights.values())) <= 4, name  # up to 3 belong to the next epoch
    assert sum(mixed.counts) == total
    shares = [f"{sizes[name] / total:.1%} of the text" for name in sizes]
    assert all(share in mixed.report() for share in shares)


def test_a_text_is_seen_whole_before_anything_comes_again(parts: dict[str, TextSequences]) -> None:
    mixed = MixedSequences(parts, 0.3)
    total, sizes = len(mixed), [len(part) for part in parts.values()]

    words = seen(mixed, range(2 * total // 4))

    for name, size, count in zip(parts, sizes, mixed.counts, strict=True):
        times = Counter(word for word in words if language(word) == name)
        full, rest = divmod(2 * count, size)
        assert set(times.values()) <= {full - 1, full, full + 1, full + 2}, name
        if full == 0:
            assert len(times) >= rest - 4
    # The first epoch sees all regions of the large text and not its beginning alone.
    first = sorted(word for word in seen(mixed, range(total // 4)) if language(word) == "en")
    gaps = np.diff(first)
    assert gaps.max() < 8 * gaps.mean()


def test_the_batches_depend_on_seed_and_step_alone(parts: dict[str, TextSequences]) -> None:
    mixed = MixedSequences(parts, 0.3)
    assert seen(mixed, range(40, 60)) == seen(mixed, range(0, 60))[160:]
    assert seen(mixed, range(0, 20)) != seen(mixed, range(0, 20), seed=6)


def test_the_same_places_of_two_texts_have_different_masks(parts: dict[str, TextSequences]) -> None:
    masks = {
        tuple((parts["en"].read(0, 0, 3, number).labels >= 0).tolist()) for number in range(12)
    }  # of one sequence of the same lengths, drawn as the part of that number
    assert len(masks) > 3


def test_counts_add_up_and_leave_nobody_out() -> None:
    for sizes in ([1000, 1], [3, 3, 3], [1, 1], [10**9, 10**6, 5], [7]):
        for exponent in (0.0, 0.3, 1.0):
            counts = mixture_counts(sizes, exponent)
            assert sum(counts) == sum(sizes)
            assert min(counts) >= 1
            wanted = [sum(sizes) * size**exponent / sum(each**exponent for each in sizes) for size in sizes]
            assert all(abs(count - share) <= 1 for count, share in zip(counts, wanted, strict=True)), (sizes, exponent)
