import pytest
from hostile import refuses

from llmdistill.data.examples import Example, Turn, parse_row

TEXTS = ("Be short.", "Hi.", "Hello.")
SYSTEM, USER, ANSWER = ({"role": r, "content": t} for r, t in zip(("system", "user", "assistant"), TEXTS, strict=True))
SHARED = [{"from": who, "value": text} for who, text in zip(("system", "human", "gpt"), TEXTS, strict=True)]
CHAT = Example("", "", ("Hello.",), messages=(Turn("system", "Be short."), Turn("user", "Hi.")))
AGAIN = {"role": "assistant", "content": "Again?"}
TURNS = (Turn("user", "Hi."), Turn("assistant", "Hello."), Turn("user", "Hi."))
RAW = Example("", "", ("Hello.",), raw_prompt="Hi.")


@pytest.mark.parametrize(
    ("row", "example"),
    [
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, Example("Add.", "1 2", ("3",))),
        ({"instruction": "Add.", "context": "1 2", "response": "3", "category": "c"}, Example("Add.", "1 2", ("3",))),
        ({"instruction": "Add.", "prompt": "B", "input": "", "output": ["3", "x"]}, Example("Add.", "", ("3", "x"))),
        ({"instruction": "Add.", "input": None, "context": "1", "output": "3"}, Example("Add.", "1", ("3",))),
        ({"prompt": "Hi.", "completion": "Hello."}, RAW),
        ({"prompt": "Hi.", "output": ["Hello."], "instruction": None}, RAW),
        ({"messages": [SYSTEM, USER, ANSWER]}, CHAT),
        ({"messages": [SYSTEM, USER, ANSWER], "prompt": "Hi."}, CHAT),
        ({"messages": [SYSTEM, USER, ANSWER, USER]}, CHAT),
        ({"conversations": SHARED}, CHAT),
        ({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, CHAT),
        ({"prompt": [SYSTEM, USER], "completion": "Hello."}, CHAT),
        ({"messages": [USER, ANSWER, USER, AGAIN]}, Example("", "", ("Again?",), messages=TURNS)),
        # Prompts without an answer.
        ({"instruction": "Add.", "output": None}, Example("Add.", "", ())),
        ({"prompt": "Hi."}, Example("", "", (), raw_prompt="Hi.")),
        ({"messages": [USER, ANSWER, USER]}, Example("", "", (), messages=TURNS)),
    ],
)
def test_forms(row, example):
    parsed = parse_row(row, "x:1", needs_answer=bool(example.outputs))
    assert parsed == example
    assert parsed.source == "x:1"


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"instruction": "a"}, "the key \"output\" is missing (there are ['instruction']); add it"),
        ({"instruction": 3, "output": "a"}, '"instruction" is 3, not a string'),
        ({"instruction": "a", "output": {"a": 1}}, '"output" is {"a": 1}; give a string or a list'),
        ({"prompt": "", "completion": "a"}, '"prompt" is empty'),
        ({"prompt": 3, "completion": "a"}, '"prompt" is 3, not a string; give a string, or a list of messages'),
        ({"prompt": [USER, ANSWER, USER], "completion": [USER]}, '"completion" has no assistant turn'),
        ({"messages": [USER]}, '"messages" has no assistant turn, so there is no answer; add one'),
        ({"messages": [ANSWER]}, '"messages" starts with its only answer; put a user turn in front'),
        ({"messages": [USER, "Hello."]}, 'message 2 of "messages" is "Hello."; give an object'),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, 'message 2 of "messages" has the role "tool"; the'),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, 'message 2 of "messages" has the content null'),
    ],
)
def test_what_is_wrong_is_named(row, what):
    refuses(f"data.jsonl:7: {what}", parse_row, row, "data.jsonl:7")
