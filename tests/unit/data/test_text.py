from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hostile import refuses
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from llmdistill.batch import IGNORE_INDEX, Batch
from llmdistill.data.corpus import Corpus
from llmdistill.data.sampler import SequenceLoader, Share, global_batch_indices
from llmdistill.data.text import TextSequences, validation_batches
from llmdistill.errors import UserError

PAD, UNK, CLS, SEP, MASK, EOS = range(6)
NAMES = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>")
FIRST = 10
"""The first id of an ordinary word; the one before it ends sentences."""
STOP = FIRST - 1
SIZE = 4000

BERT = "[CLS] $A [SEP] $B:1 [SEP]:1"
ROBERTA = "[CLS] $A [SEP] [SEP] $B [SEP]"


def words(
    pair: str = BERT, *, types: bool = True, without: Sequence[str] = (), single: str = "", more: Sequence[str] = ()
) -> Any:
    """A tokenizer whose word w10 has the id 10, and the first of `more` the id SIZE."""
    vocabulary = {name: number for number, name in enumerate(NAMES)}
    vocabulary |= {f"w{number}": number for number in range(len(NAMES), SIZE)} | {"w.": STOP}
    del vocabulary[f"w{STOP}"]
    vocabulary |= {name: number for number, name in enumerate(more, start=SIZE)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single=single or pair.partition(" $B")[0], pair=pair, special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    roles |= {"mask_token": "[MASK]", "eos_token": "</s>"}
    kept = {role: name for role, name in roles.items() if role not in without}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **kept)
    tokenizer.model_input_names = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
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


SHARE = [field.name for field in fields(Share)]
PAIRS = {"pairs": True, "next_sentence": True}
MANY = [[3, 7, 12], [40], [5], [30, 1, 1, 60, 9], [2, 2], [25, 25]]


def loader(corpus: Corpus, tokenizer: Any = None, **changes: Any) -> SequenceLoader:
    settings: dict[str, Any] = {"objective": "masked", "max_length": 16, "seed": 3}
    settings |= {"global_batch_size": 4, "micro_batch_size": 4, **changes}
    share = Share(**{key: settings.pop(key) for key in SHARE if key in settings})
    return SequenceLoader(TextSequences(corpus, words() if tokenizer is None else tokenizer, **settings), share)


def rows(batches: list[Batch]) -> list[list[int]]:
    """The tokens of each sequence, as they were before masking."""
    whole = []
    for batch in batches:
        ids = torch.where(batch.labels != IGNORE_INDEX, batch.labels, batch.input_ids)
        whole += [row[mask == 1].tolist() for row, mask in zip(ids, batch.attention_mask, strict=True)]
    return whole


def in_order(corpus: Corpus, tokenizer: Any = None, **changes: Any) -> list[Batch]:
    """All sequences in the order of the text."""
    settings: dict[str, Any] = {"objective": "masked", "max_length": 16, "limit": 10**6, "batch_size": 4, **changes}
    taken = {key: settings.pop(key) for key in ("limit", "batch_size", "rank", "world_size") if key in settings}
    sequences = TextSequences(corpus, words() if tokenizer is None else tokenizer, **settings)
    return validation_batches(sequences, **taken)


def same(one: Batch, other: Batch) -> bool:
    names = ("input_ids", "attention_mask", "labels", "token_type_ids", "targets")
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    return all(first is second is None or torch.equal(first, second) for first, second in pairs)


def packed(corpus: Corpus, room: int, between: list[int]) -> list[list[int]]:
    """The text with a separator between documents, cut into pieces, from the definition."""
    stream: list[int] = []
    for number in range(len(corpus.documents) - 1):
        first, last = (int(corpus.segments[corpus.documents[number + each]]) for each in (0, 1))
        stream += (between if number else []) + corpus.tokens[first:last].tolist()
    pieces = [stream[start : start + room] for start in range(0, len(stream), room)]
    return [piece for piece in pieces if len(piece) == room or len(piece) >= 8]


class TestDecoders:
    @pytest.mark.parametrize("max_length", [8, 219, 220, 500])
    def test_pieces_are_plain_tokens_with_the_end_token_between_documents(self, max_length: int) -> None:
        """Of the 227 tokens 219 leave a rest of eight, which is kept, and 220 one of seven, which is not."""
        corpus = numbered(*MANY)
        batches = in_order(corpus, objective="next", max_length=max_length)
        assert rows(batches) == packed(corpus, max_length, [EOS])
        for batch in batches:
            assert batch.token_type_ids is None, "a decoder has no segments"
            assert batch.targets is None
            expected = batch.input_ids.masked_fill(batch.attention_mask == 0, IGNORE_INDEX)
            assert torch.equal(batch.labels, expected)
            assert (batch.input_ids[batch.attention_mask == 0] == PAD).all()

    def test_the_start_token_stands_before_each_piece_where_the_tokenizer_puts_one(self) -> None:
        tokenizer = words(single="[CLS] $A")
        tokenizer.bos_token = "[CLS]"
        corpus = numbered(*MANY)
        expected = [[CLS, *piece] for piece in packed(corpus, 15, [EOS])]
        assert rows(in_order(corpus, tokenizer, objective="next")) == expected


class TestEncoders:
    @pytest.mark.parametrize("max_length", [8, 224])
    def test_pieces_stand_between_start_and_separator(self, max_length: int) -> None:
        corpus = numbered(*MANY)
        batches = in_order(corpus, max_length=max_length)
        assert rows(batches) == [[CLS, *piece, SEP] for piece in packed(corpus, max_length - 2, [SEP])]
        for batch in batches:
            assert batch.token_type_ids is not None
            assert not batch.token_type_ids.any()
            assert batch.targets is None
        assert in_order(corpus, words(types=False))[0].token_type_ids is None

    def test_without_start_and_separator_the_first_place_is_not_masked(self) -> None:
        corpus = numbered(*MANY)
        batches = in_order(corpus, words(without=("cls_token", "sep_token")), mask_share=0.9)
        assert rows(batches) == packed(corpus, 16, [])
        assert all((batch.labels[:, 0] == IGNORE_INDEX).all() for batch in batches)

    def test_the_number_of_masked_words_and_what_is_never_masked(self) -> None:
        tokenizer = words()
        special_ids = torch.tensor(tokenizer.all_special_ids)
        for batch in in_order(numbered(*MANY), tokenizer, max_length=50, mask_share=0.2):
            chosen = batch.labels != IGNORE_INDEX
            special = torch.isin(torch.where(chosen, batch.labels, batch.input_ids), special_ids)
            assert not (chosen & (special | (batch.attention_mask == 0))).any()
            maskable = (~special & (batch.attention_mask == 1)).sum(1)
            assert chosen.sum(1).tolist() == [max(1, round(0.2 * int(number))) for number in maskable]
            hidden = batch.input_ids[chosen]
            assert ((hidden == MASK) | ~torch.isin(hidden, special_ids)).all()

    def test_whole_words(self) -> None:
        tokenizer = words(more=("##b",))
        [batch] = in_order(
            corpus_of([[FIRST, SIZE, SIZE] * 20]), tokenizer, whole_words=True, max_length=62, mask_share=0.5
        )
        labels = batch.labels[0, 1:-1].reshape(20, 3)
        assert ((labels != IGNORE_INDEX).sum(1) % 3 == 0).all()
        assert (labels[:, 0] != IGNORE_INDEX).sum() == 10


class TestOrder:
    KINDS = ({"objective": "next"}, {}, PAIRS)

    def test_is_that_of_the_sampler(self) -> None:
        corpus = numbered(*MANY)
        source, pieces = loader(corpus, objective="next"), rows(in_order(corpus, objective="next"))
        for step in range(2 * len(pieces)):
            indices = global_batch_indices(seed=3, step=step, dataset_size=len(pieces), global_batch_size=4)
            assert rows(source.micro_batches(step)) == [pieces[index] for index in indices]

    @pytest.mark.parametrize("kind", KINDS)
    def test_seed_and_step_alone_decide(self, kind: dict[str, Any]) -> None:
        corpus = numbered(*MANY)
        source = loader(corpus, **kind)
        expected = [source.micro_batches(step)[0] for step in range(12)]
        state = torch.random.get_rng_state()
        for step in (5, 5, 0, 11, 2):
            random.seed(step)
            np.random.seed(step)
            assert same(source.micro_batches(step)[0], expected[step])
            assert same(loader(corpus, **kind).micro_batches(step)[0], expected[step])
        assert torch.equal(torch.random.get_rng_state(), state)
        assert not same(loader(corpus, seed=4, **kind).micro_batches(0)[0], expected[0])

    def test_each_epoch_masks_other_tokens_even_within_a_batch(self) -> None:
        source = loader(numbered([60]), max_length=62, mask_share=0.3, global_batch_size=6, micro_batch_size=6)
        masks = {
            tuple((row != IGNORE_INDEX).tolist()) for step in range(3) for row in source.micro_batches(step)[0].labels
        }
        assert len(masks) == 18, "one sequence, eighteen epochs"


class TestPairs:
    def sequences(self, corpus: Corpus, epochs: int, **changes: Any) -> list[Any]:
        """(first segment, second segment, target) of each sequence of some epochs."""
        settings: dict[str, Any] = {"objective": "masked", "max_length": 16, **PAIRS}
        source = TextSequences(corpus, words(), **{**settings, **changes})
        batch = source.batch(range(epochs * len(source)), seed=3)
        assert batch.token_type_ids is not None
        assert batch.targets is not None
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

    def test_second_segments_follow_or_come_from_another_document(self) -> None:
        corpus = numbered(*MANY)
        ends = np.asarray(corpus.segments[corpus.documents])
        document = {int(token): int(np.searchsorted(ends, place, "right")) for place, token in enumerate(corpus.tokens)}
        targets = []
        for first, second, target in self.sequences(corpus, 60):
            assert first
            assert second
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

    def test_all_the_text_is_learned(self) -> None:
        corpus = numbered(*MANY)
        assert len(self.sequences(corpus, 1)) == sum(-(-sum(shape) // 13) for shape in MANY)
        learned = {token for first, second, target in self.sequences(corpus, 30) for token in first + second}
        assert learned == set(corpus.tokens.tolist())

    def test_a_tenth_is_shorter(self) -> None:
        # Two lines of half the room each, so that only the draw makes a pair shorter.
        pairs = self.sequences(numbered(*[[50, 50]] * 20), 60, max_length=103)
        lengths = np.array([len(first) + len(second) for first, second, target in pairs])
        assert (lengths < 100).mean() == pytest.approx(0.1, abs=0.03)
        short = lengths[lengths < 100]
        assert short.min() < 15
        assert short.mean() == pytest.approx(51, abs=10), "drawn from 2 up"
        starts = Counter((first[0] - FIRST) % 100 == 0 for first, second, _ in pairs if len(first) + len(second) < 50)
        assert starts[False] > 5 * starts[True], "and anywhere in the span"

    def test_the_first_segment_ends_where_a_line_does(self) -> None:
        corpus = numbered([4, 5, 3], [4, 5, 3])
        full = [pair for pair in self.sequences(corpus, 200) if len(pair[0]) + len(pair[1]) == 12]
        assert set(map(len, (first for first, _, _ in full))) == {4, 9}
        assert min(Counter(len(first) for first, _, _ in full).values()) > 100, "each end is as likely"

    def test_a_single_line_is_parted_at_a_sentence_or_in_the_middle(self) -> None:
        sentences = [*range(20, 24), STOP, *range(24, 27), STOP, 27, 28, STOP]
        plain = list(range(100, 112))
        pairs = self.sequences(corpus_of([sentences], [plain]), 200)
        by_start = {start: Counter(len(p[0]) for p in pairs if p[0][0] == start and p[2] == 0) for start in (20, 100)}
        assert {5, 9} <= set(by_start[20]), "not behind the last sentence, where nothing follows"
        assert by_start[20].total() * 0.8 < by_start[20][5] + by_start[20][9]
        assert by_start[100].total() * 0.8 < by_start[100][6]

    def test_neither_beginning_nor_length_tells_what_the_second_segment_is(self) -> None:
        corpus = numbered(*[[6, 6]] * 30)
        pairs = self.sequences(corpus, 60)
        for kind in (0, 1):
            seconds = [second for first, second, target in pairs if target == kind]
            assert np.mean([len(second) for second in seconds]) == pytest.approx(5.6, abs=0.25)
            # The second lines begin at 6, 18, 30 ...
            assert np.mean([(second[0] - FIRST) % 12 == 6 for second in seconds]) > 0.85

    def test_other_templates(self) -> None:
        corpus = numbered(*MANY)
        for ids in rows(in_order(corpus, words(ROBERTA, types=False), **PAIRS)):
            edge = ids.index(SEP)
            assert ids[edge : edge + 2] == [SEP, SEP]
            assert ids.count(SEP) == 3
            assert len(ids) <= 16


class TestValidation:
    @pytest.mark.parametrize(("ranks", "batch_size"), [(2, 4), (3, 1), (7, 2)])
    def test_every_sequence_counts_once_and_ranks_keep_step(self, ranks: int, batch_size: int) -> None:
        corpus = numbered(*MANY)
        alone = rows(in_order(corpus))
        shares = [in_order(corpus, rank=rank, world_size=ranks, batch_size=batch_size) for rank in range(ranks)]
        assert len({len(share) for share in shares}) == 1
        walked = [batch for turn in zip(*shares, strict=True) for batch in turn]
        assert rows(walked) == alone
        assert all(1 <= len(batch.input_ids) <= 2 * batch_size for batch in walked)

    def test_only_the_first_are_looked_at(self) -> None:
        corpus = numbered(*MANY)
        assert rows(in_order(corpus, limit=5)) == rows(in_order(corpus))[:5]
        with pytest.raises(UserError, match=r"data\.valid has 2 sequences .* for 3 ranks: give a longer text"):
            in_order(corpus, limit=2, world_size=3)


@pytest.mark.parametrize(
    ("shapes", "without", "settings", "said"),
    [
        (MANY, ("mask_token",), {}, "data.kind text of an encoder needs a mask token, and this"),
        (MANY, ("cls_token",), PAIRS, "data.text.pairs needs cls_token and sep_token"),
        (MANY, ("sep_token",), PAIRS, "has no sep_token; set it"),
        (MANY, ("eos_token", "sep_token"), {"objective": "next"}, "no end token; set eos_token"),
        ([[7]], (), {}, "the text has only 7 tokens; give at least 8"),
        ([[70], [1]], (), PAIRS, "the text has only one"),
    ],
)
def test_texts_and_tokenizers_that_do_not_fit(
    shapes: list[list[int]], without: tuple[str, ...], settings: dict[str, Any], said: str
) -> None:
    refuses(said, loader, numbered(*shapes), words(without=without), **settings)
