"""How instructions are put to a model: MiniLLM's prompt, its chat template, or a text of one's own.

And what a teacher was taught otherwise than its student, in the tokens that both read.
"""

import copy

import pytest
from byte_tokenizers import byte_level

from llmdistill.data.chat_messages import Turn
from llmdistill.data.examples import Example
from llmdistill.data.instruct import Limits, encode
from llmdistill.data.prompts import (
    answer_ends,
    end_of_turn,
    record_prompt,
    render_prompt,
    resolve_prompt,
    tokenizer_gaps,
)
from llmdistill.data.rows import parse_row
from llmdistill.errors import UserError
from llmdistill.models.tokenizer import load_tokenizer

TURNS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<turn>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TEXT = 'Q: {instruction} {"json": {}} ({input})\nA:'
LIMITS = {"max_prompt_length": 300, "max_length": 400}


@pytest.fixture
def turning(word_tokenizer):
    """A tokenizer whose turns end with another token than its texts, as Gemma's do."""
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    tokenizer.chat_template = TURNS
    return tokenizer


def saved(tokenizer, folder, prompt):
    """Save a tokenizer as that of a student that was trained with a prompt, and load it."""
    tokenizer.save_pretrained(folder)
    record_prompt(folder, prompt)
    return load_tokenizer(folder)


def test_a_model_is_asked_as_it_was_taught(word_tokenizer, tmp_path):
    plain, chat = word_tokenizer(), word_tokenizer(chat=True)
    assert resolve_prompt(None, [plain]) == "minillm"
    assert resolve_prompt(None, [chat]) == "chat"
    assert resolve_prompt(None, [chat, plain]) == "minillm", "the student could not be asked"
    assert resolve_prompt(None, [saved(chat, tmp_path, "minillm")]) == "minillm"
    assert resolve_prompt(None, [saved(chat, tmp_path, TEXT)]) == TEXT
    load_tokenizer(tmp_path).save_pretrained(tmp_path / "again")
    assert resolve_prompt(None, [load_tokenizer(tmp_path / "again")]) == TEXT, "it stays with the tokenizer"
    for asked in ("minillm", "chat", TEXT):
        assert resolve_prompt(asked, [saved(chat, tmp_path, "minillm")]) == asked


def test_a_text_of_ones_own_keeps_braces():
    example = Example("Say {input}", "{instruction}", ("x",))
    assert render_prompt(example, prompt=TEXT) == 'Q: Say {input} {"json": {}} ({instruction})\nA:'
    assert render_prompt(Example("Hi", "", ("x",)), prompt=TEXT) == 'Q: Hi {"json": {}} ()\nA:'


class TestTokens:
    def test_instructions_by_the_chat_template_are_messages(self, turning):
        instruction = parse_row({"instruction": "Add.", "input": "1 2", "output": "3"}, "row")
        messages = Example("", "", ("3",), messages=(Turn("user", "Add.\n\n1 2"),))
        asked = encode([instruction], turning, Limits(**LIMITS, prompt="chat")).items
        assert asked == encode([messages], turning, Limits(**LIMITS)).items
        text = turning.decode([*asked[0].prompt_ids, *asked[0].response_ids])
        assert text.replace(" ", "") == "[user]Add.\n\n12<turn>\n[assistant]3<turn>"
        assert render_prompt(Example("Hi", "", ("x",)), turning, "chat") == "[user]Hi<turn>\n[assistant]"

    def test_an_answer_ends_as_the_prompt_wants_it(self, turning):
        turn = turning.convert_tokens_to_ids("<turn>")
        assert (end_of_turn(turning), answer_ends(turning)) == (turn, [turning.eos_token_id, turn])
        row, raw = Example("a", "", ("b",)), Example("", "", ("b",), raw_prompt="a")
        for prompt, end in (("chat", turn), ("minillm", turning.eos_token_id), (TEXT, turning.eos_token_id)):
            items = encode([row, raw], turning, Limits(**LIMITS, prompt=prompt)).items
            assert [item.response_ids[-1] for item in items] == [end, turning.eos_token_id]


RAISING = {
    "{{ messages.__class__.__mro__ }}": r"access to attribute '__class__'",
    "{{ raise_exception('one\n\ntwo') }}": r"one two\)",
    "{% if": "",
}


@pytest.mark.parametrize("template", RAISING)
def test_a_template_that_raises_is_one_sentence(word_tokenizer, template):
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{% if messages[0].content == 'b' %}" + template + "{% endif %}"
    row = 1 if template == "{% if" else 2  # a mistake of grammar refuses every conversation
    said = rf"^rows\.jsonl:{row}: the tokenizer's chat template refuses the messages \({RAISING[template]}[^\n]*$"
    chats = [Example("", "", ("x",), f"rows.jsonl:{n}", (Turn("user", text),)) for n, text in enumerate("ab", start=1)]
    with pytest.raises(UserError, match=said):
        encode(chats, tokenizer, Limits())


PLAIN_TURNS = "{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
BASE = byte_level(300, end="<stop>", start="<begin>")
CHATTING = f"<begin>{PLAIN_TURNS}"


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
        (changed(CHATTING), changed(CHATTING), []),
        (changed(CHATTING + "<stop>"), BASE, ["the student has none"]),
        (changed(CHATTING), changed(PLAIN_TURNS), ["the student has another one"]),
        (BASE, changed(CHATTING), []),
        (BASE, changed(eos_token="<begin>"), ["end with '<begin>', those of the teacher with '<stop>'"]),
        (BASE, without_start(), ["begin with '<begin>' for the teacher alone, and here without it for both"]),
        (without_start(), BASE, ["begin with '<begin>' for the student alone, and here with it for both"]),
    ],
)
def test_gaps_are_named_with_what_comes_of_them(teacher, student, expected):
    found = tokenizer_gaps(teacher, student)
    assert len(found) == len(expected), found
    assert all(part in gap for part, gap in zip(expected, found, strict=True)), found
