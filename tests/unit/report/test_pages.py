"""How pages format texts and values."""

from __future__ import annotations

from llmdistill.report.pages import markdown, markdown_code, signed


def test_markdown_shows_text_as_it_stands():
    assert markdown("a|b\nc *d* e_f _g_") == r"a\|b<br>c \*d\* e_f \_g\_"
    assert markdown_code("a `b` c\nd") == "`` a `b` c d ``"


def test_a_difference_of_nothing_has_no_sign():
    assert [signed(value) for value in (1.26, -0.04, -2.0, None)] == ["+1.3", "0.0", "−2.0", "–"]
