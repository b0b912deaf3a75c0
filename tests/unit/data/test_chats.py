"""What is learned of a chat: the tokens of its whole rendering, and of them what the template writes as answers.

The templates here are of our own, each with a peculiarity of real ones. LLMDISTILL_TEMPLATES may name a folder of
further ones (*.jinja), or those of an installed TRL are read.
"""

import importlib.util
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from byte_tokenizers import byte_level
from chat_templates import (
    CALLS,
    CALLS_WITHOUT_END,
    CALLS_WITHOUT_TEXT,
    CHATML,
    CONTINUES,
    FORGETS,
    ID_OF_OLDER_CALLS,
    IN_PARTS,
    SYSTEM_BEFORE_LAST_USER,
    TEMPLATES,
    TEXT_BEHIND_RESULTS,
    TOOLS_BEFORE_LAST_USER,
    chatting,
    in_parts,
    messages_of,
)
from hostile import refuses

from llmdistill.batch import IGNORE_INDEX
from llmdistill.data import chats
from llmdistill.data.chat_messages import Turn
from llmdistill.data.collate import collate, collate_packed
from llmdistill.data.examples import Example
from llmdistill.data.instruct import Limits, encode, encode_prompts
from llmdistill.data.prompts import answer_ends, end_of_turn
from llmdistill.data.rows import parse_row
from llmdistill.data.stored_examples import open_examples, store_examples

from support import write_rows

LONG = Limits(max_prompt_length=4000, max_length=6000)
LAST = Limits(max_prompt_length=4000, max_length=6000, turns="last")


def turns(*contents, system=None):
    """The turns of user and assistant before the answer."""
    first = [] if system is None else [Turn("system", system)]
    return [*first, *(Turn(("user", "assistant")[place % 2], each) for place, each in enumerate(contents))]


ASKED = turns("Name a river.")
TWICE = turns("Name a river.", "The Rhine.", "Another one?")
THOUGHT = "<think>\nHm.\n</think>\n\nThe Rhine."
CHATS = {
    "plain": Example("", "", ("The Rhine.",), "plain", tuple(ASKED)),
    "system": Example("", "", ("The Rhine.",), "system", tuple(turns("Name a river.", system="Be short."))),
    "twice": Example("", "", ("<b>Elbe</b>.",), "twice", tuple(TWICE)),
    "spaces": Example("", "", (" The Rhine.\n",), "spaces", tuple(turns(" Name a river. "))),
    "thinking": Example("", "", ("The Rhine.",), "thinking", tuple(ASKED), {"reasoning_content": "Hm."}),
    "own": Example("", "", (THOUGHT,), "own", tuple(turns("a", THOUGHT, "b"))),
    "empty": Example("", "", ("",), "empty", tuple(ASKED)),
}
END = "<|im_end|>"
EMPTY_BLOCK = "<think>\n\n</think>\n\n"


def learned_of(template, name):
    """What is learned of a chat, written by hand."""
    rhine, elbe = "The Rhine.", "<b>Elbe</b>."
    plain = {
        "plain": [rhine],
        "system": [rhine],
        "twice": [rhine, elbe],
        "spaces": [" The Rhine.\n"],
        "thinking": [rhine],
        "own": [THOUGHT, THOUGHT],
        "empty": [""],
    }[name]
    reasoned = {"thinking": "<think>\nHm.\n</think>\n\nThe Rhine.", "own": THOUGHT}
    last = reasoned.get(name, EMPTY_BLOCK + plain[-1])
    older = ["The Rhine." if name == "own" else each for each in plain[:-1]]
    trimmed = [each.strip() for each in plain]
    channel = "<|channel|>final<|message|>"
    hidden = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" if name == "thinking" else ""
    return {
        "closed": [each + END for each in [*older, last]],
        "open": [each + END for each in [*older, last.removeprefix("<think>\n")]],
        "trims": [each + END for each in trimmed],
        "no_generation_prompt": [each + END for each in plain],
        "always_generation_prompt": [each + END for each in plain],
        "ordinary_end": [each + "</turn>" for each in trimmed],
        "channels": [
            *(channel + each + "<|end|>" for each in plain[:-1]),
            hidden + channel + plain[-1] + "<|return|>",
        ],
        "marked": [each + END + "\n" for each in plain],
        "last_end": [*(" " + each for each in plain[:-1]), " " + plain[-1] + "<stop>"],
        "glm": ["\n<think></think>\n" + each + "<|user|>" for each in trimmed],
        "forgets": [(each + END).removeprefix("<think>\n") for each in plain],
        "always_marks": [each + "<|stop|>" + END for each in plain],
    }.get(template, [each + END for each in plain])


def parts_of(tokenizer, item):
    """The texts that are labels, by the labels of a batch."""
    [labels] = collate([item], 0).labels.tolist()
    found, before = [], IGNORE_INDEX
    for label in labels:
        if label != IGNORE_INDEX:
            found = found if before != IGNORE_INDEX else [*found, []]
            found[-1].append(label)
        before = label
    return [tokenizer.decode(ids) for ids in found]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_has_the_tokens_of_its_rendering_and_its_answers_are_learned(name, chat):
    tokenizer, example = chatting(TEMPLATES[name]), CHATS[chat]
    if name == "ordinary_end" and chat == "system":
        said = "system: the tokenizer's chat template refuses the messages (no system)"
        refuses(said, encode, [example], tokenizer, LONG)
        return
    [item] = encode([example], tokenizer, LONG).items
    whole = tokenizer.apply_chat_template(messages_of(example))["input_ids"]
    if name == "glm":
        whole = [*whole, tokenizer.convert_tokens_to_ids("<|user|>")]
    assert item.ids == whole
    assert parts_of(tokenizer, item) == learned_of(name, chat)
    [last] = encode([example], tokenizer, LAST).items
    assert last.ids == whole
    assert parts_of(tokenizer, last) == learned_of(name, chat)[-1:]

    prompt = tokenizer.apply_chat_template(messages_of(example)[:-1], tokenize=False, add_generation_prompt=True)
    prompt += "<|im_start|>assistant\n" if name == "no_generation_prompt" else ""
    asked = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert encode_prompts([example], tokenizer, LONG).ids == [asked]
    assert item.last_prompt == last.last_prompt == asked


@pytest.mark.parametrize("name", ["chatml", "open", "channels", "marked"])
def test_what_is_kept_on_disk_and_packed_is_learned_alike(name, tmp_path, cache):
    tokenizer = chatting(TEMPLATES[name])
    rows = [{"messages": messages_of(each)} for each in CHATS.values() if not each.answer_fields]
    stored = open_examples(store_examples(write_rows(tmp_path / "a.jsonl", rows), tokenizer, LONG)).items
    items = encode([each for each in CHATS.values() if not each.answer_fields], tokenizer, LONG).items
    assert stored[:] == items
    assert [each.sample_id for each in stored] == [each.sample_id for each in items]
    assert len({each.sample_id for each in items}) == len(items)
    packed = collate_packed(items, 0, max_length=6000)
    alone = [label for each in items for label in collate([each], 0).labels[0].tolist() if label != IGNORE_INDEX]
    assert sorted(packed.labels[packed.labels != IGNORE_INDEX].tolist()) == sorted(alone)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", IN_PARTS)
def test_a_template_that_reads_texts_as_parts_alone_gets_parts(name, chat):
    template, roles = IN_PARTS[name]
    tokenizer, example = chatting(template), CHATS[chat]
    messages = in_parts(messages_of(example), roles)
    [item] = encode([example], tokenizer, LONG).items
    assert item.ids == tokenizer.apply_chat_template(messages)["input_ids"]
    learned = [*(turn.content for turn in example.messages if turn.role == "assistant"), *example.outputs]
    space = " " if name in ("idefics", "llava") else ""
    assert parts_of(tokenizer, item) == [space + each + END for each in learned]
    asked = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
    assert encode_prompts([example], tokenizer, LONG).ids == [asked]
    assert tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)) == END


def test_a_text_that_a_row_gives_in_parts_is_put_to_any_template():
    """A template that writes strings gets a string, one that writes parts gets parts."""
    row = {"messages": in_parts(messages_of(CHATS["twice"]))}
    for template, given in ((CHATML, messages_of(CHATS["twice"])), (IN_PARTS["idefics"][0], row["messages"])):
        tokenizer = chatting(template)
        [item] = encode([parse_row(row, "a")], tokenizer, LONG).items
        assert item.ids == tokenizer.apply_chat_template(given)["input_ids"]


def test_turns_that_are_not_to_be_learned_are_read():
    chat = [Turn("user", "a"), Turn("assistant", "b", is_learned=False), Turn("user", "c"), Turn("assistant", "d")]
    example = Example("", "", ("f",), messages=(*chat, Turn("user", "e")))
    for name in ("chatml", "marked"):
        tokenizer = chatting(TEMPLATES[name])
        [item] = encode([example], tokenizer, LONG).items
        end = END + ("\n" if name == "marked" else "")
        assert parts_of(tokenizer, item) == ["d" + end, "f" + end]
        assert item.ids == tokenizer.apply_chat_template(messages_of(example))["input_ids"]


def test_answers_with_the_marks_of_the_template_in_them():
    """An older answer that has the text of another turn in it is still one answer."""
    inner = "x" + END + "\n<|im_start|>user\ny"
    tokenizer = chatting(CHATML)
    [item] = encode([Example("", "", ("z",), messages=tuple(turns("a", inner, "b")))], tokenizer, LONG).items
    assert parts_of(tokenizer, item) == [inner + END, "z" + END]


def test_tools_options_and_fields_reach_the_template():
    template = "{% if tools %}tools {{ tools[0].name }}\n{% endif %}{{ 'loud\n' if loud else '' }}" + CALLS
    call = Turn("assistant", "", {"tool_calls": [{"function": {"name": "river"}}]})
    asked = (Turn("user", "a"), call, Turn("tool", "Rhine"))
    example = Example("", "", ("b",), "", asked, tools=({"name": "river"},), template_options={"loud": True})
    tokenizer = chatting(template)
    [item] = encode([example], tokenizer, LONG).items
    options = {"tools": [{"name": "river"}], "loud": True}
    assert item.ids == tokenizer.apply_chat_template(messages_of(example), **options)["input_ids"]
    assert tokenizer.decode(item.ids).startswith("tools river\nloud\n")
    assert parts_of(tokenizer, item) == ["<call>river</call>" + END, "b" + END]
    [asked_ids] = encode_prompts([example], tokenizer, LONG).ids
    assert asked_ids == item.last_prompt == item.ids[: len(asked_ids)]


def test_a_call_is_learned_whole_where_the_last_turn_alone_begins_with_reasoning():
    block = "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}<tool>"
    tokenizer = chatting(CALLS.replace("<call>", block))
    calls = [Turn("assistant", "", {"tool_calls": [{"function": {"name": name}}]}) for name in ("river", "town")]
    asked = (Turn("user", "a"), calls[0], Turn("tool", "Rhine"), calls[1], Turn("tool", "Ulm"))
    [item] = encode([Example("", "", ("b",), "", asked)], tokenizer, LONG).items
    assert parts_of(tokenizer, item) == [f"<tool>{name}</call>{END}" for name in ("river", "town")] + ["b" + END]


@pytest.mark.parametrize(
    ("template", "learned", "called"),
    [
        (
            TOOLS_BEFORE_LAST_USER,
            [" Hi.<|end|>", "[CALL] f<|end|>", " Cold.<|end|>", " Yes.<|end|>"],
            "[CALL] f<|end|>",
        ),
        (
            "{{ tools[0].function.name if tools }}" + ID_OF_OLDER_CALLS,
            ["Hi." + END, "<call>f id 7</call>" + END, "Cold." + END, "Yes." + END],
            "<call>f</call>" + END,
        ),
    ],
    ids=["definitions of tools before the last question", "an id in all calls but the last"],
)
def test_what_a_template_writes_otherwise_once_turns_follow_is_no_part_of_an_answer(template, learned, called):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    said = [{"role": "assistant", "content": content} for content in ("Hi.", "Cold.", "Yes.")]
    asked = [{"role": "user", "content": content} for content in ("Hello.", "Weather?", "And?")]
    chat = [asked[0], said[0], asked[1], call, {"role": "tool", "content": "12 C"}, said[1], asked[2], said[2]]
    tokenizer, tools = chatting(template), [{"type": "function", "function": {"name": "f"}}]
    for length, expected in ((4, [learned[0], called]), (6, learned[:3]), (8, learned)):
        [item] = encode([parse_row({"messages": chat[:length], "tools": tools}, "a")], tokenizer, LONG).items
        assert item.ids == tokenizer.apply_chat_template(chat[:length], tools=tools)["input_ids"]
        assert parts_of(tokenizer, item) == expected


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
ASKS = {"role": "user", "content": "Weather?"}
RESULT, COLD = {"role": "tool", "content": "12 C"}, {"role": "assistant", "content": "Cold."}
USERS_ALONE = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role in ('user', 'assistant') %}")


@pytest.mark.parametrize(
    ("template", "row", "what"),
    [
        (CHATML, {"messages": [ASKS, COLD], "tools": [{"name": "f"}]}, "the tools of the row"),
        (CHATML, {"messages": [ASKS, CALL]}, "a call of a tool"),
        (CHATML, {"messages": [ASKS, CALL, RESULT, COLD]}, "a call of a tool"),
        (CALLS, {"messages": [ASKS, {**CALL, "tool_calls": 2 * CALL["tool_calls"]}]}, "a call of a tool"),
        (USERS_ALONE, {"messages": [ASKS, COLD], "system": "Be short."}, "the text of a system turn"),
        (USERS_ALONE, {"messages": [ASKS, COLD, RESULT, COLD]}, "the text of a tool turn"),
    ],
    ids=["tools", "last call", "call", "second call", "system", "result"],
)
def test_what_a_template_leaves_out_is_refused(template, row, what):
    tokenizer, example = chatting(template), parse_row(row, "x:1")
    said = f"x:1: the tokenizer's chat template leaves out {what}; give a template"
    refuses(said, encode, [example], tokenizer, LONG)
    if len(row["messages"]) > 2 or "call" not in what:
        refuses(said, encode_prompts, [example], tokenizer, LONG)
    if "call" in what:
        every = "{% for call in m.tool_calls %}<call>{{ call.function.name }}</call>{% endfor %}{{ m.content }}"
        whole = chatting(CHATML.replace("{{ m.content }}", every))
        [item] = encode([example], whole, LONG).items
        calls = "".join("<call>f</call>" for _ in example.answer_fields.get("tool_calls", [CALL]))
        assert parts_of(whole, item)[0] == calls + END


def test_a_system_turn_that_stands_in_prompts_alone_is_learned_behind():
    tokenizer = chatting(SYSTEM_BEFORE_LAST_USER)
    chat = [{"role": "system", "content": "Be short."}, ASKS, COLD, ASKS, {"role": "assistant", "content": "Warm."}]
    assert "Be short." not in tokenizer.apply_chat_template(chat, tokenize=False)
    [item] = encode([parse_row({"messages": chat}, "a")], tokenizer, LONG).items
    assert (
        tokenizer.decode(item.ids)
        == "[INST] Weather? [/INST] Cold.<|end|>[INST] Be short. Weather? [/INST] Warm.<|end|>"
    )
    assert parts_of(tokenizer, item) == [" Cold.<|end|>", " Warm.<|end|>"]
    assert (
        item.last_prompt == tokenizer.apply_chat_template(chat[:-1])["input_ids"] == item.ids[: len(item.last_prompt)]
    )


def test_a_call_without_an_end_before_a_turn_of_the_template_gets_the_end_of_a_turn():
    """Command R+ writes an instruction behind every conversation, and no end behind a call."""
    tokenizer = chatting(CALLS_WITHOUT_END)
    behind = "<|turn|>system\nYou may call a tool.<|end|>"
    for chat, learned in (
        ([ASKS, CALL], ["<call>f</call><|end|>"]),
        ([ASKS, COLD, ASKS, CALL], ["Cold.<|end|>", "<call>f</call><|end|>"]),
        ([ASKS, CALL, RESULT, COLD], ["<call>f</call>", "Cold.<|end|>"]),
    ):
        whole = tokenizer.apply_chat_template(chat, tokenize=False)
        assert whole.endswith(behind)
        [item] = encode([parse_row({"messages": chat}, "a")], tokenizer, LONG).items
        assert parts_of(tokenizer, item) == learned
        text = tokenizer.decode(item.ids)
        assert text == (whole if chat[-1] is COLD else whole.removesuffix("\n" + behind) + "<|end|>")


def test_answers_in_a_row_are_learned_where_a_prompt_goes_on_with_an_answer():
    """Nemotron Nano's prompt after an answer is that answer without its end, behind another header."""
    tokenizer, said = chatting(CONTINUES), [{"role": "assistant", "content": text} for text in ("Hi.", "Yes.", "No.")]
    chat = [ASKS, said[0], said[1], ASKS, said[2]]
    for length in (2, 3, 5):
        [item] = encode([parse_row({"messages": chat[:length]}, "a")], tokenizer, LONG).items
        assert item.ids == tokenizer.apply_chat_template(chat[:length])["input_ids"]
        expected = [turn["content"] + "\n<|end|>" for turn in chat[:length] if turn["role"] == "assistant"]
        assert [part.removeprefix("<think>\n") for part in parts_of(tokenizer, item)] == expected


class TestLimits:
    EXAMPLE = Example("", "", ("The Elbe.",), "x:1", tuple(TWICE))

    def test_the_prompt_is_what_is_before_the_first_answer_that_is_learned(self):
        tokenizer = chatting(CHATML)
        [item] = encode([self.EXAMPLE], tokenizer, LONG).items
        first, last = len(item.prompt_ids), len(item.last_prompt)
        assert first < last
        limits = {"max_prompt_length": first, "max_length": 6000}
        [short] = encode([self.EXAMPLE], tokenizer, Limits(**limits)).items
        assert (short.ids, short.prompt_ids) == (item.ids, item.prompt_ids)
        assert short.last_prompt == item.prompt_ids, "the student itself answers the last prompt within the limit"
        said = f"x:1: the prompt has {last} tokens and is longer than data.max_prompt_length={first}"
        refuses(said, encode, [self.EXAMPLE], tokenizer, Limits(**limits, turns="last"))

    @pytest.mark.parametrize("cut", [0, 1, 2, 9, 12, 25])
    def test_a_long_chat_is_cut_at_its_end_and_counted(self, cut):
        tokenizer = chatting(CHATML)
        [item] = encode([self.EXAMPLE], tokenizer, LONG).items
        length = len(item) - cut
        data = encode([self.EXAMPLE], tokenizer, Limits(max_prompt_length=len(item.prompt_ids), max_length=length))
        [found] = data.items
        assert found.ids == item.ids[: len(found)]
        [whole], [labels] = collate([item], 0).labels.tolist(), collate([found], 0).labels.tolist()
        assert labels == whole[: len(found)]
        assert not any(label != IGNORE_INDEX for label in whole[len(found) : length]), "nothing learned is missing"
        assert data.counts.truncated_responses == (cut > 1), "the newline after the end is no part of an answer"


FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("template", "fields", "learned", "is_said"),
    [
        (TEXT_BEHIND_RESULTS, {}, ["<|call|>f<|response|>", "I look.Cold.<|end|>", "Yes.<|end|>"], False),
        (TEXT_BEHIND_RESULTS, {"content": ""}, ["<|call|>f<|response|>", "Cold.<|end|>", "Yes.<|end|>"], False),
        (CALLS_WITHOUT_TEXT, {}, [" to=f<|call|>", FINAL + "Cold.<|end|>", FINAL + "Yes.<|return|>"], True),
        (
            CALLS_WITHOUT_TEXT,
            {"content": "", "thinking": "Hm."},
            [" to=f<|call|>", FINAL + "Cold.<|end|>", FINAL + "Yes.<|return|>"],
            False,
        ),
    ],
    ids=["Gemma 4", "Gemma 4 without a text", "gpt-oss", "gpt-oss with reasoning"],
)
def test_earlier_calls_of_tools_with_a_text_are_learned_as_the_template_writes_them(
    template, fields, learned, is_said, capsys
):
    call = {"role": "assistant", "content": "I look.", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    messages = [
        {"role": "user", "content": "Weather?"},
        call | fields,
        {"role": "tool", "content": "12 C"},
        {"role": "assistant", "content": "Cold."},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Yes."},
    ]
    chats.warn_once.cache_clear()
    tokenizer = chatting(template)
    for length in (4, 6):
        [item] = encode([parse_row({"messages": messages[:length]}, "a")], tokenizer, LONG).items
        assert item.ids == tokenizer.apply_chat_template(messages[:length])["input_ids"]
        until = learned[: length // 2]
        if length == 4 and template == CALLS_WITHOUT_TEXT:
            until[-1] = FINAL + "Cold.<|return|>"
        assert parts_of(tokenizer, item) == until
    assert ("leaves out what an earlier answer says" in " ".join(capsys.readouterr().err.split())) == is_said


def test_a_rendering_that_does_not_begin_with_its_prompt_is_one_warning(capsys):
    chats.warn_once.cache_clear()
    encode([CHATS["plain"], CHATS["system"]] * 2, chatting(FORGETS), LONG)
    assert capsys.readouterr().err.count("does not begin") == 1
    other = chatting(CHATML.replace("{% if add_generation_prompt %}<|im_start|>", "{% if add_generation_prompt %}>>"))
    [item] = encode([CHATS["plain"]], other, LONG).items
    assert parts_of(other, item) == ["<|im_start|>assistant\nThe Rhine." + END], "of the whole conversation"


def test_a_template_without_the_answer_is_refused():
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}<|im_end|>"
    said = "plain: the tokenizer's chat template does not write the assistant's answer"
    refuses(said, encode, [CHATS["plain"]], chatting(template), LONG)


@pytest.mark.parametrize("unlearned", ["b", "d"])
def test_a_header_within_the_marks_is_learned_with_its_turn(unlearned):
    """As gpt-oss has it; what is learned ends before the header of a turn that is not."""
    turn = CHATML.partition("{% endfor %}")[0].removeprefix("{% for m in messages %}")
    marked = "{% if m.role == 'assistant' %}{% generation %}" + turn + "{% endgeneration %}{% else %}" + turn
    chat = [replace(each, is_learned=each.content != unlearned) for each in turns("a", "b", "c", "d", "e")]
    tokenizer = chatting(CHATML.replace(turn, marked + "{% endif %}"))
    [item] = encode([Example("", "", ("f",), messages=tuple(chat))], tokenizer, LONG).items
    learned = "bdf".replace(unlearned, "")
    assert parts_of(tokenizer, item) == [f"<|im_start|>assistant\n{each}{END}\n" for each in learned]


def test_marks_of_the_template_for_tools_are_those_of_a_chat_with_tools():
    tokenizer = chatting(TEMPLATES["marked"])
    tokenizer.chat_template = {"default": CHATML, "tool_use": "{{ tools[0].name }}\n" + TEMPLATES["marked"]}
    example = CHATS["twice"]
    for tools, end in (((), END), (({"name": "river"},), END + "\n")):
        [item] = encode([replace(example, tools=tools)], tokenizer, LONG).items
        assert parts_of(tokenizer, item) == ["The Rhine." + end, "<b>Elbe</b>." + end]


def test_answers_end_where_they_do_with_a_template_for_chats_with_tools_alone():
    # Command R+ writes an instruction behind every answer.
    behind = "{% if not add_generation_prompt %}<|note|>Use a tool.<|im_end|>{% endif %}"
    tokenizer = chatting("{{ tools[0].function.name }}\n" + CHATML + behind)
    example = replace(CHATS["twice"], tools=({"type": "function", "function": {"name": "river"}},))
    [item] = encode([example], tokenizer, LONG).items
    assert parts_of(tokenizer, item) == ["The Rhine." + END, "<b>Elbe</b>." + END]


@pytest.mark.parametrize(("name", "is_said"), [("chatml", True), ("closed", False)])
def test_reasoning_that_a_template_leaves_out_is_said_once(name, is_said, capsys):
    chats.warn_once.cache_clear()
    encode([CHATS["thinking"], CHATS["plain"], CHATS["thinking"]], chatting(TEMPLATES[name]), LONG)
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert said.count("leaves out the reasoning of answers") == is_said


@pytest.mark.parametrize("is_marked", [True, False])
def test_an_end_that_the_marks_leave_out_is_said_once(is_marked, capsys):
    chats.warn_once.cache_clear()
    end = "<|im_end|>\n{% endgeneration %}"
    unmarked = TEMPLATES["marked"].replace(end, "{% endgeneration %}<|im_end|>\n")
    tokenizer = chatting(TEMPLATES["marked"] if is_marked else unmarked)
    items = encode([CHATS["plain"], CHATS["twice"]], tokenizer, LONG).items
    assert parts_of(tokenizer, items[0]) == ["The Rhine." + (END + "\n" if is_marked else "")]
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert said.count("does not learn to stop") == (not is_marked)


def test_a_turn_without_its_usual_end_gets_one_and_another_end_is_enough():
    """The answer is cut off, or is a call with an end of its own."""
    template = CHATML.replace("<|im_end|>", "{{ m.end | default('<|im_end|>') }}").replace("}}\n", "}}")
    tokenizer = chatting(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|call|>"]})
    for end in ("", "<|call|>"):
        example = Example("", "", ("b",), "", (Turn("user", "a"),), {"end": end})
        [item] = encode([example], tokenizer, LONG).items
        assert parts_of(tokenizer, item) == ["b" + (end or END)]


def test_a_space_behind_the_header_of_an_answer_is_learned_with_it():
    """It is a part of the answer's first token."""
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    tokenizer = chatting(template)
    [item] = encode([CHATS["twice"]], tokenizer, LONG).items
    assert parts_of(tokenizer, item) == [" The Rhine." + END, " <b>Elbe</b>." + END]
    assert tokenizer.decode(item.last_prompt).endswith("assistant:")


def test_reasoning_is_read_as_the_template_writes_it_for_the_options_of_a_chat():
    quiet = "{% if add_generation_prompt and not quiet %}<think>\n{% endif %}"
    tokenizer = chatting(TEMPLATES["closed"] + quiet)
    expected = chats.Reply("The Rhine.", {"reasoning_content": "Hm."}, is_read=True)
    silent = Example("", "", (), template_options={"quiet": True})
    assert chats.read_reply("Hm.\n</think>\n\nThe Rhine.", tokenizer) == expected
    assert chats.read_reply("<think>\nHm.\n</think>\n\nThe Rhine.", tokenizer, silent) == expected


def test_ends_of_turns():
    several = chatting(CHATML.replace("<|im_end|>", "##<|im_end|>"))
    assert several.convert_ids_to_tokens(end_of_turn(several)) == END
    for name, end in (("ordinary_end", "</turn>"), ("glm", "<|user|>"), ("channels", "<|return|>"), ("chatml", END)):
        tokenizer = chatting(TEMPLATES[name])
        assert tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)) == end
        assert answer_ends(tokenizer) == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(end)]


def folder_of_templates():
    given = os.environ.get("LLMDISTILL_TEMPLATES")
    if given:
        return sorted(Path(given).glob("*.jinja"))
    spec = importlib.util.find_spec("trl")
    return [] if spec is None else sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja"))


@pytest.mark.parametrize("file", folder_of_templates() or [None], ids=lambda file: file.stem if file else "none")
def test_further_templates(file):
    """Tokens are those of the template, and with generation marks the labels are those of its mask."""
    if file is None:
        pytest.skip("no folder of templates: set LLMDISTILL_TEMPLATES, or install trl")
    tokenizer = byte_level(300, start="<begin>")
    text = file.read_text(encoding="utf-8")
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(re.findall(r"<[|｜]?[\w▁]+[|｜]?>", text)))})
    tokenizer.chat_template = text
    for example in CHATS.values():
        given, whole = messages_of(example), None
        for form in (given, in_parts(given)):  # parts only where the template does not write a string
            other = {"role": "assistant", "content": "yr8"}
            try:
                messages = form
                whole = tokenizer.apply_chat_template(form, return_dict=True, return_assistant_tokens_mask=True)
                if form is given:
                    written = tokenizer.apply_chat_template([*form[:-1], other], tokenize=False)
                else:
                    written = tokenizer.apply_chat_template([*form[:-1], *in_parts([other])], tokenize=False)
            except Exception:  # a template can raise anything
                continue
            if "yr8" in written:
                break
        else:
            said = "refuses the messages" if whole is None else "does not write the assistant's answer"
            refuses(said, encode, [example], tokenizer, LONG)
            continue
        [item] = encode([example], tokenizer, LONG).items
        assert item.ids[: len(whole["input_ids"])] == whole["input_ids"]
        assert item.ids[len(whole["input_ids"]) :] in ([], [end_of_turn(tokenizer)])
        if re.search(r"\{%-?\s*generation", text):
            [labels] = collate([item], 0).labels.tolist()
            assert [int(label != IGNORE_INDEX) for label in labels] == whole["assistant_masks"]
        asked = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
        assert encode_prompts([example], tokenizer, LONG).ids == [item.last_prompt] == [asked]
