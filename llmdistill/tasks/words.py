"""The words of a text in any script, and which protocol of ROUGE cuts the texts of a set into words."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from typing import Literal

import regex

Words = Literal["stemmed", "unicode"]
"""How texts are cut: as published, by rouge_score into stems of a-z and 0-9; or into the words of any script."""

WORDS: dict[Words, str] = {
    "stemmed": "F1 with stemming",
    "unicode": "F1 of Unicode words (UAX 29; characters of Han, Kana, Thai, Khmer and Lao)",
}
"""The ROUGE of these words, as reports name it."""

# Scripts without spaces between words, whose characters carry their combining marks; a long vowel is Kana too.
_CHARACTER = regex.compile(r"((?=[\p{Han}\p{Hiragana}\p{scx=Katakana}\p{Thai}\p{Khmer}\p{Lao}])\X)")
_BOUNDARY = regex.compile(r"(?V1w)\b")  # w: the boundaries of words are those of UAX 29
_IS_WORD = regex.compile(r"[\p{L}\p{N}]")
_LETTER = regex.compile(r"\p{L}")
_OTHER_LETTER = regex.compile(r"(?V1)[\p{L}--\p{Latin}--\p{Common}--\p{Inherited}]")  # V1: -- is a difference of sets


def words_for(references: Iterable[str]) -> Words:
    """Return how the texts of a set are cut, by its references alone: as published if most words are in Latin script.

    Words without letters, such as numbers, say nothing.
    """
    latin = other = 0
    for text in references:
        for word in unicode_words(text):
            if _OTHER_LETTER.search(word):
                other += 1
            elif _LETTER.search(word):
                latin += 1
    # A tie, such as a set of numbers alone, is scored as published.
    return "unicode" if other > latin else "stemmed"


def describe_words(by_set: Mapping[str, Words]) -> str:
    """Describe for reports how the texts of some sets are cut into words; set by set if they differ."""
    groups: dict[Words, list[str]] = {}
    for name, words in by_set.items():
        groups.setdefault(words, []).append(name)
    if len(groups) < 2:
        return WORDS[next(iter(groups), "stemmed")]
    return ", ".join(f"{WORDS[words]} on {' and '.join(names)}" for words, names in groups.items())


def unicode_words(text: str) -> list[str]:
    """Return the words of a text in any script, in NFC and without case.

    Words are those of Unicode's UAX 29, with their combining marks, that have a letter or a digit. Of Han, Kana, Thai,
    Khmer and Lao, which put no spaces between words, each character is one.
    """
    # Case folding decomposes some letters (U+0390 becomes three code points), so the text is composed again.
    text = unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())
    pieces: list[str] = []
    for place, part in enumerate(_CHARACTER.split(text)):
        pieces += [part] if place % 2 else _BOUNDARY.split(part)  # re.split puts the captured characters at odd places
    return [piece for piece in pieces if _IS_WORD.search(piece)]
