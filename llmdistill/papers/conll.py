"""Sentences with chunks in the format of CoNLL-2000 (Tjong Kim Sang and Buchholz 2000), and spans drawn of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmdistill.data.readers import text_lines
from llmdistill.errors import UserError

OUTSIDE = "O"
"""The label of words outside of chunks."""

_TAG = re.compile(r"O|(?P<place>[BI])-(?P<type>\S+)")


class Span(NamedTuple):
    """Successive words of a sentence that belong together."""

    first: int
    """The index of the first word."""
    last: int
    """The index of the last word, which belongs to the span."""
    label: str
    """The type of the chunk, such as NP; OUTSIDE for the words between two chunks."""


class Sentence(NamedTuple):
    """A sentence, cut into spans without a gap."""

    words: tuple[str, ...]
    spans: tuple[Span, ...]
    line: int
    """The line of the first word in the file; each word has a line."""


class Located(NamedTuple):
    """A span with its sentence."""

    sentence: int
    """The index of the sentence."""
    span: Span


def read_sentences(path: str | Path) -> list[Sentence]:
    """Read the sentences of a file: a line for each word, and empty lines between sentences.

    A line is a word, its part of speech and its tag, with spaces between them. The first word of a chunk has the tag
    B-TYPE, the others have I-TYPE, and words outside of chunks have O.

    Raises:
        UserError: there is no such file, no sentence in it, or a line is malformed; the message names the line.
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file; give a file of CoNLL-2000, unpacked, such as its train.txt")
    sentences: list[Sentence] = []
    words: list[str] = []
    tags: list[str] = []
    # An empty line ends the last sentence too.
    for number, line in enumerate(chain(text_lines(Path(path), newline="\n"), [""]), start=1):
        fields, place = line.split(), f"{path}:{number}"
        if fields:
            if len(fields) != 3:
                raise UserError(
                    f"{place}: {len(fields)} fields, expected word, part of speech and chunk tag; fix the line"
                )
            word, _, tag = fields
            parts = _TAG.fullmatch(tag)
            if parts is None:
                raise UserError(f"{place}: chunk tag {tag!r}, expected B-TYPE, I-TYPE or O; fix the line")
            kind, before = parts["type"], tags[-1] if tags else OUTSIDE
            if parts["place"] == "I" and before not in (f"B-{kind}", f"I-{kind}"):
                raise UserError(
                    f"{place}: chunk tag I-{kind} after {before}: a chunk begins with B-{kind}; fix the line"
                )
            words.append(word)
            tags.append(tag)
        elif words:
            sentences.append(Sentence(tuple(words), _spans(tags), number - len(words)))
            words, tags = [], []
    if not sentences:
        raise UserError(f"{path}: holds no sentence; give a file of CoNLL-2000 such as its train.txt")
    return sentences


def _spans(tags: Sequence[str]) -> tuple[Span, ...]:
    """Return the chunks, and the words between them, of the checked tags of a sentence."""
    starts = [
        index
        for index, tag in enumerate(tags)
        if tag.startswith("B-") or (tag == OUTSIDE and (index == 0 or tags[index - 1] != OUTSIDE))
    ]
    ends = [*(start - 1 for start in starts[1:]), len(tags) - 1]
    return tuple(Span(start, end, tags[start].removeprefix("B-")) for start, end in zip(starts, ends, strict=True))


def locate_spans(sentences: Sequence[Sentence]) -> list[Located]:
    return [Located(index, span) for index, sentence in enumerate(sentences) for span in sentence.spans]


def draw_spans(spans: Sequence[Located], *, chunks: int, unlabeled: int, seed: int) -> list[Located]:
    """Draw so many chunks and so many spans outside of chunks, without replacement and in random order.

    All of a kind are drawn if there are fewer. This is a pure function of the arguments.
    """
    rng = np.random.default_rng(seed)
    drawn: list[Located] = []
    for is_chunk, count in ((True, chunks), (False, unlabeled)):
        pool = [place for place in spans if (place.span.label != OUTSIDE) == is_chunk]
        drawn += [pool[index] for index in rng.permutation(len(pool))[:count]]
    # Mixed, because `cluster_score` holds out the last ones, which are to be of both kinds.
    return [drawn[index] for index in rng.permutation(len(drawn))]
