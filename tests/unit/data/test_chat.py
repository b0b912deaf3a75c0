"""Chat templates: what transformers renders, and one sentence where a template raises."""

from __future__ import annotations

import pytest

from llmdistill.data.chat import render_chats
from llmdistill.data.examples import Example
from llmdistill.data.instruct import Limits, encode_prompts
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.models.tokenizer import load_tokenizer

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


def chats(*texts: str) -> list[Example]:
    return [Example("", "", ("x",), f"rows.jsonl:{n}", messages=(("user", text),)) for n, text in enumerate(texts, 1)]


@pytest.fixture
def tokenizer():
    return load_tokenizer(locate("embedded:teacher"))


def test_messages_become_the_turns_of_the_template(tokenizer):
    tokenizer.chat_template = TURNS
    assert render_chats(chats("hé\u2028llo", "a\nb", ""), tokenizer) == [
        "<user>hé\u2028llo\n<a>",
        "<user>a\nb\n<a>",
        "<user>\n<a>",
    ]


RAISING = {
    "{{ messages.__class__.__mro__ }}": r"access to attribute '__class__'",
    "{% for i in range(10**9) %}x{% endfor %}": r"Range too big",
    "{{ 1 + 'a' }}": r"unsupported operand",
    "{{ raise_exception('one\n\ntwo') }}": r"one two\)",
    "{% if": "",
}


@pytest.mark.parametrize("template", RAISING)
def test_a_template_that_raises_is_one_sentence(tokenizer, template):
    tokenizer.chat_template = "{% if messages[0].content == 'b' %}" + template + "{% endif %}"
    row = 1 if template == "{% if" else 2  # a mistake of grammar refuses every conversation
    said = rf"^rows\.jsonl:{row}: the tokenizer's chat template refuses the messages \({RAISING[template]}[^\n]*$"
    with pytest.raises(UserError, match=said):
        encode_prompts(chats("a", "b"), tokenizer, Limits())
