"""Input that nobody meant: what readers and parsers are tried with, and the one outcome besides success."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from llmdistill.errors import UserError

CASES = int(os.environ.get("LLMDISTILL_CASES", "20"))
"""Cases of each property; 400 makes more than 10,000 of all together."""
SECONDS = 60
"""A case that takes longer hangs."""


def tries(*, share: float = 1, **strategies: Any) -> Any:
    """Decorate a property: it is tried with `share` of the cases, the same ones in each run of the short form."""
    chosen = settings(
        max_examples=max(1, round(CASES * share)),
        deadline=None,
        derandomize=CASES <= 20,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: chosen(given(**strategies)(test))


def outcome(call: Callable[[], Any]) -> str | None:
    """Return the one sentence by which input is refused; None if it is taken. Nothing else may happen."""
    before = signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(SECONDS)
    try:
        call()
    except UserError as error:
        return check_sentence(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return None


def refuses(said: str, call: Any, *arguments: Any, **named: Any) -> None:
    """Check that a call is refused by one sentence, in which this is said."""
    with pytest.raises(UserError) as caught:
        call(*arguments, **named)
    assert said in str(caught.value)
    assert str(caught.value).isprintable()


def check_sentence(error: UserError) -> str:
    """Return what an error says, which is one line."""
    said = str(error)
    assert said.strip()
    assert said.isprintable(), said
    return said


def _hangs(number: int, frame: FrameType | None) -> None:
    pytest.fail(f"it takes more than {SECONDS} s")


TEXTS = [
    *("", " ", ".", "..", "../x", "/", "/etc/passwd", "a/b", "a\nb", "a\u2028b", "a\x00b", "\x1b[31m"),
    *("-1", "--x", "~", "nan", "inf", "1e3", "1e400", "0x10", "²", "٣", "1_0", "9" * 20, "9" * 5000),
    *("null", "true", "[", "{", "a: b", "*"),
    *("\ud800", "\udcff", "\ufeff", "é" * 150, "n" * 400, "embedded:nothing", "hf://datasets/", "a:b:c:d", "%", "%s"),
]
NUMBERS = [
    *(0, -1, 1, 2, 7, 2**31, 2**63, -(2**63) - 1, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1.5, -1e-9, 5e-324, 1e38, 1e308, float("nan"), float("inf"), float("-inf")),
]
SCALARS = st.one_of(st.sampled_from(TEXTS), st.sampled_from(NUMBERS), st.none(), st.booleans(), st.text(max_size=20))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from([*TEXTS, "a", "b", "enabled"]), inner, max_size=3)
    ),
    max_leaves=6,
)
"""Plain JSON values."""

_PIECES = [
    *(b"\x00", b"\xff", b"\xed\xa0\x80", b"\xe2\x80\xa8", b"\xef\xbb\xbf", b"\r", b"\n", b"\t"),
    *(b'"', b"\\", b",", b"{", b"]"),
    *(b"\\ud800", b"NaN", b"Infinity", b"-1", b"1e999", b"null", b"true", b"[]", b"{}", b"9" * 5000, b"[" * 28000),
    *(b'{"a":' * 2000, b"x" * 70_000, b" " * 200, b"&a [*a]", b"!!timestamp x", b"!!python/name:os.system "),
]


def damaged(content: bytes, seed: int) -> bytes:
    """Return a file after one to four changes: bytes that are changed, removed, doubled or put in.

    Of a file with JSON, whole or in lines, one value is changed instead in every third case.
    """
    dice = random.Random(seed)
    if dice.randint(0, 2) == 0 and (rewritten := _rewritten(content, dice)) is not None:
        return rewritten
    data = bytearray(content)
    for _ in range(dice.randint(1, 4)):
        place, length = dice.randint(0, len(data)), dice.choice((1, 1, 2, 8, 40))
        match dice.randint(0, 5):
            case 0 if place < len(data):
                data[place] ^= 1 << dice.randint(0, 7)
            case 1:
                del data[place : place + length]
            case 2:
                data[place:place] = data[place : place + length]
            case 3:
                del data[place:]
            case 4:
                data[place : place + length] = bytes(dice.randrange(256) for _ in range(length))
            case _:
                data[place : place + dice.choice((0, 1, 4))] = dice.choice(_PIECES)
    return bytes(data)


def _rewritten(content: bytes, dice: random.Random) -> bytes | None:
    """Return a file with JSON in which a value is another one, is missing, or has another key; None for other files."""
    whole = content.splitlines()
    for start, end in ((0, len(whole)), *((n, n + 1) for n in dice.sample(range(len(whole)), min(1, len(whole))))):
        try:
            value = [json.loads(b"\n".join(whole[start:end]))]
        except (ValueError, RecursionError):
            continue
        block, key = dice.choice(list(_places(value)))
        match dice.randint(0, 4):
            case 0 if block is not value:
                del block[key]
            case 1 if isinstance(block, dict):
                block[dice.choice(TEXTS)] = block.pop(key)
            case _:
                block[key] = dice.choice([*TEXTS, *NUMBERS, None, True, False, [], {}, [None], {"a": []}, [[1]]])
        return b"\n".join([*whole[:start], *(json.dumps(each).encode() for each in value), *whole[end:]])
    return None


def _places(block: Any) -> Iterator[tuple[Any, Any]]:
    """Each value of nested lists and dicts, as its block and its key."""
    for key, value in block.items() if isinstance(block, dict) else enumerate(block):
        yield block, key
        if isinstance(value, dict | list):
            yield from _places(value)


SEEDS = st.integers(min_value=0, max_value=2**32)
