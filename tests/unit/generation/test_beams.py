import itertools
import math
from unittest.mock import Mock

import pytest
import torch
from tiny import tiny_model
from torch import Tensor

from llmdistill.config import WritingConfig
from llmdistill.data.targets import EncodedTarget, Marks, collate_targets
from llmdistill.generation.beams import MaskedSteps, penalty, search, write_targets
from llmdistill.step.forward import TappedModel
from llmdistill.step.taps import Recorder

PAD, START, END, MASK = range(4)
WORDS = 9
FORBIDDEN = (PAD, START, MASK)
SOURCES = [[START, 5, 6, END], [START, 7, END], [START, 8, 5, 4, 4, END]]
MARKS = [Marks(START, END, MASK, PAD, has_segments, FORBIDDEN) for has_segments in (False, True)]
NEVER = torch.tensor([word in FORBIDDEN for word in range(WORDS)])


def encoder(kind="bert", seed=0):
    settings = {"vocab_size": WORDS, "max_position_embeddings": 20, "initializer_range": 1.5, "pad_token_id": PAD}
    return tiny_model(kind, seed=seed, num_attention_heads=2, **settings).double()


def log_probs(model, source, written, *, segments):
    """Of the next token, by the forward pass of training: source, text and mask in one row, without anything kept."""
    batch = collate_targets([EncodedTarget(list(source), [*written, MASK])], MARKS[segments])
    tapped = TappedModel(model, Recorder(model, {}))
    logits = tapped(batch).logits
    tapped.remove()
    return logits[0, -1].log_softmax(-1)


def written(model, settings, **options):
    given = {"marks": MARKS[True], "batch_size": 2, "sharded": False} | options
    return write_targets(model, SOURCES, settings, **given)


class Table:
    """Steps whose probabilities depend on the source, the length and the last token, drawn at random."""

    def __init__(self, seed: int, beams: int, lengths: int) -> None:
        scores = 1.5 * torch.randn(len(SOURCES), lengths, WORDS, WORDS, generator=torch.Generator().manual_seed(seed))
        self.log_probs = scores.double().log_softmax(-1)
        self.beams, self.length, self.sources = beams, 0, torch.arange(len(SOURCES)).repeat_interleave(beams)

    def __call__(self, parents_N: Tensor | None, newest_N: Tensor | None) -> Tensor:
        last = torch.zeros_like(self.sources) if newest_N is None else newest_N
        assert parents_N is None or (parents_N // self.beams == self.sources).all(), "a row goes on in its own source"
        self.length += 1
        return self.log_probs[self.sources, self.length - 1, last]


def naive(table, source, settings):
    """The search with lists: as many beams go on beside those that end; with enough of them it tries every text."""
    words = sorted({*range(WORDS)} - set(FORBIDDEN))
    live, best, alpha = [(0.0, [0])], (-math.inf, [0]), settings.length_penalty
    for length in range(1, settings.max_length + 1):
        found = [
            (total + float(table.log_probs[source, length - 1, text[-1], word]), [*text, word])
            for total, text in live
            for word in words
            if word != END or length > settings.min_length
        ]
        found.sort(reverse=True)
        ended = [(total / penalty(length, alpha), text) for total, text in found[: settings.beams] if text[-1] == END]
        best = max(best, *ended) if ended else best
        live = [(total, text) for total, text in found if text[-1] != END][: settings.beams]
    return max(best, (live[0][0] / penalty(settings.max_length, alpha), live[0][1]))[1][1:]


@pytest.mark.parametrize(("beams", "alpha", "least"), [(2, 3.0, 0), (3, 3.0, 0), (125, 0.6, 0), (125, 0.0, 2)])
def test_it_is_the_search_with_lists(beams, alpha, least):
    settings = WritingConfig(beams=beams, length_penalty=alpha, max_length=4, min_length=least)
    lengths = set()
    for seed in range(6):
        table = Table(seed, beams, settings.max_length)
        expected = [naive(table, source, settings) for source in range(len(SOURCES))]
        assert search(table, settings, batch_size=len(SOURCES), end=END, forbidden=NEVER) == expected
        lengths |= {len(text) for text in expected if text[-1] == END}
    assert len(lengths) > 1, "texts of several lengths, which end"


def test_no_ngram_occurs_twice():
    model = encoder(seed=2)
    settings = {"beams": 3, "length_penalty": 0.0, "max_length": 9, "min_length": 8}

    def repeats(text):
        pairs = list(itertools.pairwise(text))
        return len(set(pairs)) < len(pairs)

    free, bound = (written(model, WritingConfig(no_repeat_ngram_size=size, **settings)) for size in (0, 2))
    assert any(map(repeats, free))
    assert not any(map(repeats, bound))


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_kept_keys_and_values_give_what_training_computes(kind):
    """Rows of several lengths, parents that swap rows: each prediction is that of the whole row, computed anew."""
    model, segments = encoder(kind), kind == "bert"
    beams = 2
    with torch.no_grad():
        step = MaskedSteps(model, SOURCES, MARKS[segments], beams)
        texts = [[] for _ in range(len(SOURCES) * beams)]
        parents = newest = None
        for turn in range(4):
            found = step(parents, newest)
            for row, text in enumerate(texts):
                expected = log_probs(model, SOURCES[row // beams], text, segments=segments)
                torch.testing.assert_close(found[row], expected, rtol=1e-9, atol=1e-9)
            parents = torch.tensor([2 * (row // 2) + (row + turn) % 2 for row in range(len(texts))])
            newest = torch.tensor([4 + (3 * row + turn) % 5 for row in range(len(texts))])
            texts = [[*texts[parent], int(word)] for parent, word in zip(parents, newest, strict=True)]
    assert len({tuple(text) for text in texts}) > 2


@pytest.mark.parametrize("stops", [False, True])
def test_batches_and_a_search_that_must_go_on_change_nothing(stops):
    """As with a sharded model, whose ranks go on until the last one is done."""
    model = encoder()
    settings = WritingConfig(beams=3, length_penalty=1.0, max_length=6)
    all_done = Mock(side_effect=lambda done: done and stops)
    with torch.no_grad():
        step = MaskedSteps(model, SOURCES, MARKS[True], settings.beams)
    texts = search(step, settings, batch_size=len(SOURCES), end=END, forbidden=NEVER, all_done=all_done)
    assert (all_done.call_count == settings.max_length) == (not stops)
    for batch_size, sharded in ((1, False), (2, True)):
        assert written(model, settings, batch_size=batch_size, sharded=sharded) == texts


def test_the_penalty_is_that_of_gnmt():
    assert penalty(7, 0.7) == pytest.approx(2**0.7)
    assert penalty(1, 0.7) == 1
