from collections import Counter
from dataclasses import fields
from itertools import chain

import numpy as np
import pytest
import torch
from hostile import refuses
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast
from word_models import word_tokenizer

from llmdistill.batch import IGNORE_INDEX, Batch
from llmdistill.data.corpus import Corpus
from llmdistill.data.masking import Masking
from llmdistill.data.sampler import SequenceLoader, Share, global_batch_indices
from llmdistill.data.text import MixedSequences, TextSequences, mixture_counts, validation_batches

from support import check_steps

PAD, UNK, CLS, SEP, MASK, EOS = range(6)
NAMES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>")
STOP, FIRST, SIZE = 9, 10, 4000
"""The id of the word that ends sentences, the first id of the others, and the end of the ids."""
MARKS = [("[CLS]", CLS), ("[SEP]", SEP)]


def words(*, types=True, without=(), **template):
    """A tokenizer whose word w10 has the id 10, with the marks of BERT or of another template."""
    vocabulary = [*NAMES, *(f"w{number}" for number in range(len(NAMES), SIZE))]
    vocabulary[STOP] = "w."
    names = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
    tokenizer = word_tokenizer(vocabulary, eos_token="</s>", model_input_names=names)
    for role in without:
        setattr(tokenizer, role, None)
    if template:
        backend = tokenizer.backend_tokenizer
        backend.post_processor = processors.TemplateProcessing(**template, special_tokens=MARKS)
    return tokenizer


def corpus_of(*documents: list[list[int]]) -> Corpus:
    segments = [segment for document in documents for segment in document]
    return Corpus(
        np.array(list(chain.from_iterable(segments)), np.uint16),
        np.cumsum([0, *map(len, segments)]),
        np.cumsum([0, *map(len, documents)]),
    )


def numbered(*shapes: list[int]) -> Corpus:
    """Documents of segments of these lengths, each token another."""
    numbers = iter(range(FIRST, SIZE))
    return corpus_of(*[[[next(numbers) for _ in range(length)] for length in shape] for shape in shapes])


PAIRS = {"pairs": True, "next_sentence": True}
MANY = numbered([3, 7, 12], [40], [5], [30, 1, 1, 60, 9], [2, 2], [25, 25])


def sequences(corpus=MANY, tokenizer=None, **changes):
    settings = {"causal": False, "max_length": 16, **changes}
    tokenizer = words() if tokenizer is None else tokenizer
    choice = {name: settings.pop(name) for name in ("mask_share", "whole_words") if name in settings}
    masking = None if settings.pop("causal") else Masking.of(tokenizer, **choice)
    return TextSequences(corpus, tokenizer, masking=masking, **settings)


def loader(source: TextSequences | MixedSequences, seed: int = 3, size: int = 4) -> SequenceLoader:
    return SequenceLoader(source, Share(seed=seed, global_batch_size=size, micro_batch_size=size))


def in_order(source, **changes):
    """All sequences in the order of the text."""
    return validation_batches(source, **{"limit": 10**6, "batch_size": 4, **changes})


def rows(batches):
    """The tokens of each sequence, as they were before masking."""
    whole = []
    for batch in batches:
        ids = torch.where(batch.labels != IGNORE_INDEX, batch.labels, batch.input_ids)
        whole += [row[mask == 1].tolist() for row, mask in zip(ids, batch.attention_mask, strict=True)]
    return whole


def packed(room: int, between: list[int]) -> list[list[int]]:
    """The text MANY with a separator between documents, cut into pieces, from the definition."""
    stream: list[int] = []
    for number in range(len(MANY.documents) - 1):
        first, last = (int(MANY.segments[MANY.documents[number + each]]) for each in (0, 1))
        stream += (between if number else []) + MANY.tokens[first:last].tolist()
    pieces = [stream[start : start + room] for start in range(0, len(stream), room)]
    return [piece for piece in pieces if len(piece) == room or len(piece) >= 8]


class TestDecoders:
    @pytest.mark.parametrize("max_length", [8, 219, 220, 500])
    def test_pieces_are_plain_tokens_with_the_end_token_between_documents(self, max_length):
        """Of the 227 tokens 219 leave a rest of eight, which is kept, and 220 one of seven, which is not."""
        batches = in_order(sequences(causal=True, max_length=max_length))
        assert rows(batches) == packed(max_length, [EOS])
        for batch in batches:
            assert batch.token_type_ids is None, "a decoder has no segments"
            assert torch.equal(batch.labels, batch.input_ids.masked_fill(batch.attention_mask == 0, IGNORE_INDEX))
            assert (batch.input_ids[batch.attention_mask == 0] == PAD).all()

    def test_the_start_token_stands_before_each_piece_where_the_tokenizer_puts_one(self):
        tokenizer = words(single="[CLS] $A")
        tokenizer.bos_token = "[CLS]"
        expected = [[CLS, *piece] for piece in packed(15, [EOS])]
        batches = in_order(sequences(tokenizer=tokenizer, causal=True))
        assert rows(batches) == expected
        for batch in batches:
            is_text = (batch.attention_mask == 1) & (batch.input_ids != CLS)
            assert torch.equal(batch.labels, batch.input_ids.masked_fill(~is_text, IGNORE_INDEX)), "it is no label"


class TestEncoders:
    @pytest.mark.parametrize("max_length", [8, 224])
    def test_pieces_stand_between_start_and_separator(self, max_length):
        batches = in_order(sequences(max_length=max_length, mask_share=0.25))
        assert rows(batches) == [[CLS, *piece, SEP] for piece in packed(max_length - 2, [SEP])]
        for batch in batches:
            assert not batch.token_type_ids.any()
            assert batch.targets is None
            chosen = batch.labels != IGNORE_INDEX
            is_word = torch.where(chosen, batch.labels, batch.input_ids) >= FIRST
            assert (is_word | ~chosen).all(), "only words are masked"
            assert chosen.sum(1).tolist() == [round(0.25 * int(number)) for number in is_word.sum(1)]
            assert ((batch.input_ids[chosen] == MASK) | (batch.input_ids[chosen] >= len(NAMES))).all()
        assert in_order(sequences(tokenizer=words(types=False)))[0].token_type_ids is None

    def test_without_start_and_separator_the_first_place_is_not_masked(self):
        batches = in_order(sequences(tokenizer=words(without=("cls_token", "sep_token")), mask_share=0.9))
        assert rows(batches) == packed(16, [])
        assert all((batch.labels[:, 0] == IGNORE_INDEX).all() for batch in batches)

    def test_whole_words(self):
        vocabulary = {**{name: number for number, name in enumerate(NAMES)}, "a": 6, "##b": 7}
        backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **words().special_tokens_map)
        settings = {"whole_words": True, "max_length": 62, "mask_share": 0.5}
        [batch] = in_order(sequences(corpus_of([[6, 7, 7] * 20]), tokenizer, **settings))
        labels = batch.labels[0, 1:-1].reshape(20, 3)
        assert ((labels != IGNORE_INDEX).sum(1) % 3 == 0).all()
        assert (labels[:, 0] != IGNORE_INDEX).sum() == 10


class TestOrder:
    def test_is_that_of_the_sampler(self):
        source = sequences(causal=True)
        pieces = rows(in_order(source))
        for step in range(2 * len(pieces)):
            indices = global_batch_indices(seed=3, step=step, dataset_size=len(pieces), global_batch_size=4)
            assert rows(loader(source).micro_batches(step)) == [pieces[index] for index in indices]

    @pytest.mark.parametrize("kind", [{"causal": True}, {}, PAIRS])
    def test_seed_and_step_alone_decide(self, kind):
        source = sequences(**kind)

        def made(step, seed=3):
            [batch] = loader(source, seed).micro_batches(step)
            values = [getattr(batch, each.name) for each in fields(Batch)]
            return [value.tolist() if isinstance(value, torch.Tensor) else value for value in values]

        assert check_steps(made)[0] != made(0, seed=4)

    def test_each_epoch_masks_other_tokens_even_within_a_batch(self):
        source = loader(sequences(numbered([60]), max_length=62, mask_share=0.3), size=6)
        batches = [batch for step in range(3) for batch in source.micro_batches(step)]
        masks = {tuple(row) for batch in batches for row in (batch.labels != IGNORE_INDEX).tolist()}
        assert len(masks) == 18, "one sequence, eighteen epochs"


class TestPairs:
    def drawn(self, corpus, epochs, **changes):
        """(first segment, second segment, target) of each sequence of some epochs."""
        source = sequences(corpus, **PAIRS, **changes)
        batch = source.batch(range(epochs * len(source)), seed=3)
        found = []
        for ids, types, target in zip(
            rows([batch]), batch.token_type_ids.tolist(), batch.targets.tolist(), strict=True
        ):
            edge = ids.index(SEP)
            assert ids[0] == CLS
            assert ids[-1] == SEP
            assert types[: len(ids)] == [0] * (edge + 1) + [1] * (len(ids) - edge - 1)
            found.append((ids[1:edge], ids[edge + 1 : -1], target))
        return found

    def test_second_segments_follow_or_come_from_another_document(self):
        ends = MANY.segments[MANY.documents]
        document = {int(token): int(np.searchsorted(ends, place, "right")) for place, token in enumerate(MANY.tokens)}
        targets = []
        for first, second, target in self.drawn(MANY, 60):
            assert min(len(first), len(second)) > 0
            assert len(first) + len(second) <= 13
            for part in (first, second):
                assert part == list(range(part[0], part[0] + len(part))), "what follows one another in the text"
                assert len({document[token] for token in part}) == 1
            if target == 0:
                assert second[0] == first[-1] + 1
            else:
                assert document[first[0]] != document[second[0]]
            targets.append(target)
        assert len(targets) > 1000
        assert np.mean(targets) == pytest.approx(0.5, abs=0.06)

    def test_all_the_text_is_learned(self):
        assert len(self.drawn(MANY, 1)) == sum(-(-np.diff(MANY.segments[MANY.documents]) // 13))
        learned = {token for first, second, target in self.drawn(MANY, 30) for token in first + second}
        assert learned == set(MANY.tokens.tolist())

    def test_a_tenth_is_shorter(self):
        # Two lines of half the room each, so that only the draw makes a pair shorter.
        pairs = self.drawn(numbered(*[[50, 50]] * 20), 60, max_length=103)
        lengths = np.array([len(first) + len(second) for first, second, target in pairs])
        assert (lengths < 100).mean() == pytest.approx(0.1, abs=0.03)
        short = lengths[lengths < 100]
        assert short.min() < 15
        assert short.mean() == pytest.approx(51, abs=10), "drawn from 2 up"
        starts = Counter((first[0] - FIRST) % 100 == 0 for first, second, _ in pairs if len(first) + len(second) < 50)
        assert starts[False] > 5 * starts[True], "and anywhere in the span"

    def test_the_first_segment_ends_where_a_line_does(self):
        pairs = self.drawn(numbered([4, 5, 3], [4, 5, 3]), 200)
        lengths = Counter(len(first) for first, second, _ in pairs if len(first) + len(second) == 12)
        assert set(lengths) == {4, 9}
        assert min(lengths.values()) > 100, "each end is as likely"

    def test_a_single_line_is_parted_at_a_sentence_or_in_the_middle(self):
        sentences = [*range(20, 24), STOP, *range(24, 27), STOP, 27, 28, STOP]
        plain = list(range(100, 112))
        pairs = self.drawn(corpus_of([sentences], [plain]), 200)
        by_start = {start: Counter(len(p[0]) for p in pairs if p[0][0] == start and p[2] == 0) for start in (20, 100)}
        assert {5, 9} <= set(by_start[20]), "not behind the last sentence, where nothing follows"
        assert by_start[20].total() * 0.8 < by_start[20][5] + by_start[20][9]
        assert by_start[100].total() * 0.8 < by_start[100][6]
        ends_early = [*range(30, 35), STOP, 36]
        pairs = self.drawn(corpus_of([ends_early], [plain]), 60)
        whole = [
            first for first, second, target in pairs if first[0] == 30 and target == 0 and len(first + second) == 7
        ]
        assert {len(first) for first in whole} == {6}, "a single token may follow"

    def test_neither_beginning_nor_length_tells_what_the_second_segment_is(self):
        pairs = self.drawn(numbered(*[[6, 6]] * 30), 60)
        for kind in (0, 1):
            seconds = [second for first, second, target in pairs if target == kind]
            assert np.mean([len(second) for second in seconds]) == pytest.approx(5.6, abs=0.25)
            # The second lines begin at 6, 18, 30 ...
            assert np.mean([(second[0] - FIRST) % 12 == 6 for second in seconds]) > 0.85

    def test_other_templates(self):
        tokenizer = words(pair="[CLS] $A [SEP] [SEP] $B [SEP]")
        for ids in rows(in_order(sequences(tokenizer=tokenizer, **PAIRS))):
            edge = ids.index(SEP)
            assert ids[edge : edge + 2] == [SEP, SEP]
            assert ids.count(SEP) == 3
            assert len(ids) <= 16


class TestMixture:
    """Texts of several languages, sampled by a power of their sizes, against the formula of XLM."""

    SIZES = np.array([30, 200, 4])

    def seen(self, mixed: MixedSequences, steps: range, seed: int = 5) -> list[int]:
        """The sequences of some steps in order, by their numbers among those of all languages."""
        batches = [batch for step in steps for batch in loader(mixed, seed).micro_batches(step)]
        return [(token - FIRST) // 10 for batch in batches for token in batch.input_ids[:, 0].tolist()]

    def test_a_text_is_seen_whole_before_anything_comes_again(self):
        ends, total = np.cumsum(self.SIZES), int(self.SIZES.sum())
        tokens = np.split(np.arange(FIRST, FIRST + 10 * total), 10 * ends[:-1])
        texts = {str(each[0]): corpus_of([each.tolist()]) for each in tokens}
        parts = {name: sequences(text, causal=True, max_length=10) for name, text in texts.items()}
        mixed = MixedSequences(parts, 0.3)
        walked = self.seen(mixed, range(2 * total // 4))
        for end, size, count in zip(ends, self.SIZES, mixed.counts, strict=True):
            times = Counter(number for number in walked if end - size <= number < end)
            full = 2 * count // size
            assert set(times.values()) <= {full - 1, full, full + 1, full + 2}
            assert len(times) >= min(size, 2 * count) - 4
        gaps = np.diff([30, *sorted(number for number in walked[:total] if 30 <= number < 230), 230])
        assert gaps.max() < 8 * gaps.mean(), "the first epoch sees all regions of a large text"
        assert self.seen(mixed, range(40, 60)) == walked[160:240], "seed and step alone decide"
        assert self.seen(mixed, range(20), seed=6) != walked[:80]

    def test_the_same_places_of_two_texts_have_different_masks(self):
        source = sequences(mask_share=0.3)
        mixed = MixedSequences({"one": source, "other": source}, 1.0)
        batch = mixed.batch(range(len(mixed)), seed=0)
        masks = {str(each) for each in zip(rows([batch]), (batch.labels != IGNORE_INDEX).tolist(), strict=True)}
        assert len(masks) > 0.75 * len(mixed)

    @pytest.mark.parametrize("exponent", [0.0, 0.3, 1.0])
    @pytest.mark.parametrize("sizes", [[1000, 1], [3, 3, 3], [10**9, 10**6, 5]])
    def test_counts_add_up_and_leave_nobody_out(self, sizes, exponent):
        counts = mixture_counts(sizes, exponent)
        assert sum(counts) == sum(sizes)
        assert min(counts) >= 1
        wanted = [sum(sizes) * size**exponent / sum(each**exponent for each in sizes) for size in sizes]
        assert counts == pytest.approx(wanted, abs=1)

    def test_what_tiny_texts_are_given_the_largest_one_lacks(self):
        assert mixture_counts([10, 1, 1, 1], 3.0) == [10, 1, 1, 1]
        assert mixture_counts([2, 10, 1, 12], 5.0) == [1, 7, 1, 16]


@pytest.mark.parametrize(("ranks", "batch_size"), [(2, 4), (3, 1), (7, 2)])
def test_every_sequence_is_validated_once_and_ranks_keep_step(ranks, batch_size):
    source = sequences()
    shares = [in_order(source, rank=rank, world_size=ranks, batch_size=batch_size) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    walked = [batch for turn in zip(*shares, strict=True) for batch in turn]
    assert rows(walked) == rows(in_order(source))
    assert all(1 <= len(batch.input_ids) <= 2 * batch_size for batch in walked)
    assert rows(in_order(source, limit=5)) == rows(in_order(source))[:5]


def test_fewer_sequences_than_ranks_are_refused():
    said = "data.valid has 2 sequences of 16 tokens (at most data.text.valid_sequences 2) for 3 ranks: give a longer"
    refuses(said, in_order, sequences(), limit=2, world_size=3)


@pytest.mark.parametrize(
    ("corpus", "without", "settings", "said"),
    [
        (MANY, ["mask_token"], {}, "data.kind text of an encoder needs a mask token, and this"),
        (MANY, ["sep_token"], PAIRS, "data.text.pairs needs cls_token and sep_token, and this"),
        (MANY, ["eos_token", "sep_token"], {"causal": True}, "no end token; set eos_token"),
        (numbered([7]), [], {}, "the text has only 7 tokens; give at least 8"),
        (numbered([70], [1]), [], PAIRS, "the text has only one"),
    ],
    ids=range(5),
)
def test_texts_and_tokenizers_that_do_not_fit(corpus, without, settings, said):
    refuses(said, sequences, corpus, words(without=without), **settings)
