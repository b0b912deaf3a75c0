"""Cuts sequences out of a corpus: packed one after the other, or as pairs of segments."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from transformers import PreTrainedTokenizerBase

from llmdistill.batch import IGNORE_INDEX
from llmdistill.data.begin import begin_tokens
from llmdistill.data.collate import sample_id
from llmdistill.data.corpus import Corpus
from llmdistill.data.masking import vocabulary_mask
from llmdistill.errors import UserError

_SHORTEST = 8
"""A rest of the text with fewer tokens is dropped."""
_SHORT_SHARE = 0.1
"""Share of the pairs that are made shorter than the maximum (BERT's short_seq_prob)."""
_SENTENCE_ENDS = (".", "!", "?", "。", "！", "？", "।", "۔", "؟")


@dataclass(frozen=True)
class TextSequence:
    """The tokens of one sequence, special tokens included."""

    ids: np.ndarray
    """(T,) int64."""
    labels: np.ndarray
    """(T,) int64."""
    second: int
    """Start of the second segment; the length of the sequence if there is no second segment."""
    target: int = IGNORE_INDEX
    """0 where the second segment follows the first, 1 where it does not."""

    @cached_property
    def sample_id(self) -> int:
        return sample_id(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


def cut_sequences(
    corpus: Corpus, tokenizer: PreTrainedTokenizerBase, max_length: int, *, masked: bool, pairs: bool
) -> PackedText | SegmentPairs:
    """Cut a corpus into sequences of up to max_length tokens, including the tokenizer's special tokens.

    For decoders the documents follow one another with the end token between them, and each sequence begins with the
    tokenizer's `begin_tokens`, which are no labels. For encoders, whose tokens are `masked`, the separator is between
    the documents, and each sequence has the start token before it and the separator after it; with pairs each sequence
    is two segments. The rest of the text makes a shorter sequence; a rest of less than 8 tokens is dropped.

    Raises:
        UserError: the text is too short, or the tokenizer lacks a token that decoders or encoders need.
    """
    assert max_length >= _SHORTEST
    name = type(tokenizer).__name__
    if not masked:
        assert not pairs, "a decoder learns each next token"
        ends = (tokenizer.eos_token_id, tokenizer.sep_token_id)
        between = next((token for token in ends if token is not None), None)
        if between is None:
            raise UserError("the tokenizer has no end token; set eos_token in its tokenizer_config.json")
        # A model that was trained with a begin token works badly without it.
        return PackedText(corpus, max_length, start=begin_tokens(tokenizer), end=[], between=[between])
    if tokenizer.mask_token_id is None:
        raise UserError(
            f"data.kind text of an encoder needs a mask token, and this {name} has none; "
            "set mask_token in its tokenizer_config.json"
        )
    start = [] if tokenizer.cls_token_id is None else [tokenizer.cls_token_id]
    end = [] if tokenizer.sep_token_id is None else [tokenizer.sep_token_id]
    if not pairs:
        return PackedText(corpus, max_length, start=start, end=end, between=end)
    if not start or not end:
        raise UserError(
            f"data.text.pairs needs cls_token and sep_token, and this {name} has no "
            f"{'sep_token' if start else 'cls_token'}; set it in its tokenizer_config.json, or pairs to false"
        )
    # RoBERTa separates the two segments by two separators, BERT by one.
    between = end * max(1, tokenizer.num_special_tokens_to_add(pair=True) - 2)
    sentence_ends = vocabulary_mask(tokenizer, lambda token: token.endswith(_SENTENCE_ENDS))
    return SegmentPairs(corpus, max_length, start=start, end=end, between=between, sentence_ends=sentence_ends)


class PackedText:
    """Documents one after the other, with a separator between them, cut into pieces of the same length."""

    def __init__(
        self, corpus: Corpus, max_length: int, *, start: list[int], end: list[int], between: list[int]
    ) -> None:
        self._corpus = corpus
        self._start, self._end, self._between = start, end, between
        self._room = max_length - len(start) - len(end)
        self._total = corpus.first_token(corpus.num_documents) + (corpus.num_documents - 1) * len(between)
        full, rest = divmod(self._total, self._room)
        self._size = full + (rest >= _SHORTEST)
        if self._size == 0:
            raise UserError(f"the text has only {self._total} tokens; give at least {_SHORTEST}")

    def __len__(self) -> int:
        return self._size

    def read(self, index: int, rng: np.random.Generator) -> TextSequence:
        start = index * self._room
        stop = min(start + self._room, self._total)
        text = np.empty(stop - start, np.int64)
        # Separators (one token at most) everywhere; the documents are then copied over them.
        text[:] = self._between[0] if self._between else 0
        # Bisect over the mapped offsets: an array of these numbers would take memory on every rank.
        documents = range(self._corpus.num_documents)
        document = bisect_right(documents, start, key=self._begin) - 1
        while document < len(documents) and self._begin(document) < stop:
            before = document * len(self._between)
            first = max(self._begin(document), start)
            last = min(self._corpus.first_token(document + 1) + before, stop)
            if first < last:  # otherwise the piece begins with the separator after the document
                text[first - start : last - start] = self._corpus.tokens[first - before : last - before]
            document += 1
        ids = np.concatenate([np.array(self._start, np.int64), text, np.array(self._end, np.int64)])
        labels = ids.copy()
        labels[: len(self._start)] = IGNORE_INDEX
        return TextSequence(ids, labels, len(ids))

    def _begin(self, document: int) -> int:
        """Return the start of a document, counting the separators before it."""
        return self._corpus.first_token(document) + document * len(self._between)


class SegmentPairs:
    """Two segments in each sequence: the second follows the first or comes from another document.

    This follows BERT's create_pretraining_data.py: pairs of up to max_length tokens, a tenth of them shorter; the end
    of A is drawn among the ends of lines, and B is from another document half of the time. There are these differences.
    A document is cut into spans of nearly the same length, and each span gives one pair in an epoch. So each epoch has
    the same number of pairs, any pair can be made without those before it, and no text is lost because of lines that
    are too long. A span of a single line is split at the end of a sentence, or else in the middle. A B from another
    document begins at a place where such a split would be there, and it is as long as the text that followed A, unless
    its document ends before. So the beginning of B does not show whether it follows A, and its length hardly does.
    """

    def __init__(
        self,
        corpus: Corpus,
        max_length: int,
        *,
        start: list[int],
        end: list[int],
        between: list[int],
        sentence_ends: np.ndarray,
    ) -> None:
        self._corpus = corpus
        self._start, self._end, self._between = start, end, between
        self._sentence_ends = sentence_ends
        self._room = max_length - len(start) - len(between) - len(end)
        lengths = np.diff(np.asarray(corpus.segments)[corpus.documents])
        # A single token makes no pair.
        counts = np.where(lengths > 1, -(-lengths // self._room), 0)
        self._spans = np.concatenate([[0], np.cumsum(counts)])
        if np.count_nonzero(counts) < 2:
            raise UserError(
                "data.text.pairs takes the second segment from another document half of the time, and the text has "
                "only one; end documents with an empty line (in rows each row is one), or set it to false"
            )

    def __len__(self) -> int:
        return int(self._spans[-1])

    def read(self, index: int, rng: np.random.Generator) -> TextSequence:
        document, start, stop = self._locate_span(index)
        if rng.random() < _SHORT_SHARE:
            length = min(int(rng.integers(2, self._room + 1)), stop - start)  # at least a token for each segment
            start += int(rng.integers(stop - start - length + 1))
            stop = start + length
        parting = self._draw_parting(start, stop, rng)
        tokens = self._corpus.tokens
        first, second, target = tokens[start:parting], tokens[parting:stop], 0
        if rng.random() < 0.5:
            # Draw among the spans of all other documents: skip over those of this one.
            own = int(self._spans[document + 1] - self._spans[document])
            elsewhere = int(rng.integers(len(self) - own))
            other, start, stop = self._locate_span(elsewhere if elsewhere < self._spans[document] else elsewhere + own)
            begin = self._draw_parting(start, stop, rng)
            target, second = 1, tokens[begin : min(begin + len(second), self._corpus.first_token(other + 1))]
        head = np.concatenate([self._start, first, self._between])
        ids = np.concatenate([head, second, self._end]).astype(np.int64)
        return TextSequence(ids, ids, len(head), target)  # the masking replaces the labels

    def _locate_span(self, index: int) -> tuple[int, int, int]:
        """Return the document of a pair, and the start and end of its text among the tokens."""
        document = int(np.searchsorted(self._spans, index, side="right")) - 1
        count = int(self._spans[document + 1] - self._spans[document])
        place = index - int(self._spans[document])
        begin, end = self._corpus.first_token(document), self._corpus.first_token(document + 1)
        return document, begin + (end - begin) * place // count, begin + (end - begin) * (place + 1) // count

    def _draw_parting(self, start: int, stop: int, rng: np.random.Generator) -> int:
        """Draw the end of the first segment in a span: at the end of a line, else of a sentence, else in the middle."""
        segments = self._corpus.segments
        inside = segments[np.searchsorted(segments, start, "right") : np.searchsorted(segments, stop, "left")]
        if len(inside) == 0:
            # + 1: the second segment begins after the end of the sentence; the last token is no end, because it would
            # leave none.
            inside = start + 1 + np.flatnonzero(self._sentence_ends[self._corpus.tokens[start : stop - 1]])
        return int(rng.choice(inside)) if len(inside) else (start + stop) // 2
