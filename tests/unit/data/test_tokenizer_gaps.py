"""What a teacher was taught otherwise than its student, in the tokens that both read."""

from __future__ import annotations

import copy

import pytest
from byte_tokenizers import byte_level

from llmdistill.data.chat import tokenizer_gaps

TURNS = "{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
BASE = byte_level(300, end="<stop>", start="<begin>")
CHAT = f"<begin>{TURNS}"


def changed(template: str | None = None, **changes: object):
    tokenizer = copy.deepcopy(BASE)
    tokenizer.chat_template = template
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def without_start():
    tokenizer = byte_level(300, end="<stop>")
    tokenizer.bos_token = tokenizer.eos_token
    return tokenizer


@pytest.mark.parametrize(
    ("teacher", "student", "expected"),
    [
        (BASE, BASE, []),
        (changed(CHAT), changed(CHAT), []),
        (changed(CHAT + "<stop>"), BASE, ["the student has none"]),
        (changed(CHAT), changed(TURNS), ["the student has another one"]),
        (BASE, changed(CHAT), []),
        (BASE, changed(eos_token="<begin>"), ["end with '<begin>', those of the teacher with '<stop>'"]),
        (BASE, without_start(), ["begin with '<begin>' for the teacher alone, and here without it for both"]),
        (without_start(), BASE, ["begin with '<begin>' for the student alone, and here with it for both"]),
    ],
)
def test_gaps_are_named_with_what_comes_of_them(teacher, student, expected):
    found = tokenizer_gaps(teacher, student)
    assert len(found) == len(expected), found
    assert all(part in gap for part, gap in zip(expected, found, strict=True)), found
