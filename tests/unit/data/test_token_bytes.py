"""Tokens as bytes, and the spans of two tokenizations, against a walk from byte to byte."""

import random

import numpy as np
import pytest
from byte_tokenizers import byte_level, sentencepiece_like
from word_models import word_tokenizer

from llmdistill.data.token_bytes import TokenBytes, equal_spans, shared_tokens
from llmdistill.errors import UserError

SCRIPTS = ("abcdefgh ,.", "абвгдежз ", "αβγδεζηθ ", "日本語中文字の ", "नमस्ते भारत ", "🙂🚀é ñ")


def cut_at_random(text: bytes, chance: random.Random) -> list[bytes]:
    """Pieces of one to five bytes, which need not end where a character does."""
    pieces, place = [], 0
    while place < len(text):
        size = chance.randint(1, 5)
        pieces.append(text[place : place + size])
        place += size
    return pieces


def spans_byte_by_byte(one: list[bytes], other: list[bytes]) -> tuple[list[int], list[int]]:
    """The spans by walking over the bytes of both texts: one ends wherever a token of each side ends."""
    ends = [{len(b"".join(side[: count + 1])) for count in range(len(side))} for side in (one, other)]
    texts = [b"".join(one), b"".join(other)]
    span_of_byte, span, place = {}, 0, 0
    while place < min(map(len, texts)) and texts[0][place] == texts[1][place]:
        span_of_byte[place] = span
        place += 1
        span += place in ends[0] and place in ends[1]
    found = []
    for side in (one, other):
        spans, place = [], 0
        for piece in side:
            place += len(piece)
            number = span_of_byte.get(place - 1, span)
            spans.append(number if number < span else -1)
        found.append(spans)
    return found[0], found[1]


def test_spans_are_those_of_a_walk_from_byte_to_byte():
    chance = random.Random(0)
    for number in range(3_000):
        text = "".join(chance.choices(SCRIPTS[number % len(SCRIPTS)], k=chance.randint(1, 30))).encode()
        one, other = cut_at_random(text, chance), cut_at_random(text, chance)
        if number % 4 == 0:  # one side ends earlier, or reads another text from some byte on
            other = other[:-1] + cut_at_random(b"?", chance)
        found = equal_spans(one, other)
        assert [each.tolist() for each in found] == list(spans_byte_by_byte(one, other)), (one, other)


@pytest.mark.parametrize("tokenizer", [byte_level(300), sentencepiece_like()], ids=["byte-level", "sentencepiece"])
@pytest.mark.parametrize("text", ["a plain text", "Ünïcödé, 日本語 🙂", "  two  spaces\n\tand more\n"])
def test_the_bytes_of_the_tokens_of_a_text_are_its_bytes(tokenizer, text):
    tokens = TokenBytes(tokenizer)
    assert b"".join(tokens.split(tokens.encode(text), text)) == text.encode()


def test_special_tokens_and_ids_without_a_token_have_no_bytes():
    tokens = TokenBytes(byte_level(300))
    assert tokens.pieces[tokens.ends[0]] == b""
    assert tokens.split([10_000]) == [b""]


def test_tokens_are_shared_by_their_bytes_and_the_end_by_its_meaning():
    one, other = TokenBytes(byte_level(300, end="<stop>")), TokenBytes(sentencepiece_like(end="</s>"))
    shared = shared_tokens(one, other)
    ends = shared.pop(one.ends[0])
    assert ends == other.ends[0]
    assert all(one.pieces[index] == other.pieces[its] != b"" for index, its in shared.items())
    assert shared.keys() == {n for n, piece in enumerate(one.pieces) if piece and piece in set(other.pieces)}
    same = shared_tokens(one, one)
    assert same == {index: index for index in range(300)}


def test_an_empty_text_has_no_spans():
    found = equal_spans([], [b"a"])
    assert [each.tolist() for each in found] == [[], [-1]]
    assert all(each.dtype == np.int64 for each in found)


def test_word_pieces_are_refused():
    with pytest.raises(UserError, match=r"tokens are no pieces of the text.*seqkd"):
        _ = TokenBytes(word_tokenizer(["[UNK]", "a"], marked=False)).pieces
