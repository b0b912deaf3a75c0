"""Chat templates: what transformers renders, and limits for those that would not end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmdistill.data import chat
from llmdistill.data.chat import ChatError, render_chats
from llmdistill.data.examples import Example
from llmdistill.data.instruct import Limits, encode_prompts
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.models.tokenizer import load_tokenizer

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
CHATS = [[{"role": "user", "content": text}] for text in ("hé\u2028llo", "a\nb", "")]


@pytest.fixture
def tokenizer():
    return load_tokenizer(locate("embedded:teacher"))


def test_texts_are_those_of_transformers(tokenizer):
    tokenizer.chat_template = TURNS
    expected = [tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=True) for each in CHATS]
    assert expected[0] == "<user>hé\u2028llo\n<a>"
    assert render_chats(CHATS, tokenizer) == expected == render_chats(CHATS, tokenizer)


DOUBLING = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
CALLS = "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}"
BOMBS = {
    "{{ 'a' * 10**10 }}": "needs more than 512 MB",
    DOUBLING: "needs more than 512 MB",
    "{{ '%9000000000d'|format(1) }}": "needs more than 512 MB",
    "{% for i in range(10**9) %}x{% endfor %}": r"refuses the messages \(Range too big",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "takes more than 1 seconds",
    CALLS: "takes more than 1 seconds",
    "{{ 'a'.center(11000000) }}": r"makes a text of 11,000,000 characters of one conversation, over 10,000,000",
    "{{ messages.__class__.__mro__ }}": r"refuses the messages \(access to attribute '__class__'",
    "{{ 1 + 'a' }}": r"refuses the messages \(unsupported operand",
}


@pytest.mark.parametrize("template", BOMBS)
def test_a_template_that_does_not_end_is_one_sentence(tokenizer, monkeypatch, template):
    monkeypatch.setattr(chat, "CPU_SECONDS", 1)
    tokenizer.chat_template = "{% if messages[0].content == 'b' %}" + template + "{% endif %}"
    rows = [Example("", "", ("x",), f"rows.jsonl:{n}", messages=(("user", text),)) for n, text in ((1, "a"), (2, "b"))]
    said = rf"^rows\.jsonl:2: the tokenizer's chat template {BOMBS[template]}[^\n]*$"
    with pytest.raises(UserError, match=said):
        encode_prompts(rows, tokenizer, Limits())


def test_a_template_with_a_mistake_is_one_sentence(tokenizer):
    tokenizer.chat_template = "{% if"
    with pytest.raises(ChatError, match="refuses the messages"):
        render_chats(CHATS, tokenizer)


def test_a_template_of_megabytes_is_not_compiled(tokenizer):
    tokenizer.chat_template = "a" * (chat.LONGEST_TEMPLATE + 1)
    with pytest.raises(ChatError, match="has more than 1,000,000 characters"):
        render_chats(CHATS, tokenizer)


def test_nothing_stays_behind(tokenizer, tmp_path):
    """Neither a process nor an open file."""

    def state() -> tuple[int, str]:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
        return len(os.listdir("/proc/self/fd")), children

    tokenizer.chat_template = TURNS
    render_chats(CHATS, tokenizer)
    before = state()
    for _ in range(3):
        render_chats(CHATS, tokenizer)
    tokenizer.chat_template = "{% if"
    with pytest.raises(ChatError):
        render_chats(CHATS, tokenizer)
    assert state() == before
