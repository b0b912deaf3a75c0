import json
import re
from collections import Counter
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
from hostile import refuses

from llmdistill.data.chat_messages import Turn
from llmdistill.data.examples import Example
from llmdistill.data.rows import LeftOut, describe_left_out, parse_row, parse_rows
from llmdistill.data.sources import read_examples
from llmdistill.generation.response_rows import answered_row

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
        ({"messages": [SYSTEM, {**USER, "role": "User"}, {**ANSWER, "role": "AI"}]}, CHAT),
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
    "row",
    [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"question": "Add.", "answer": "3", "system": "Be short."},
        {"prompt": "Hi.", "completion": "Hello."},
        {"messages": [SYSTEM, USER, ANSWER], "tools": []},
        {"conversations": SHARED},
        {"prompt": "Hi.", "chosen": "Hello.", "rejected": "No."},
    ],
    ids=lambda row: next(iter(row)),
)
@pytest.mark.parametrize("write", [str.upper, str.title, lambda key: f" {key.capitalize()} "])
def test_keys_in_another_case_are_the_same_keys(row, write):
    counts = Counter(), Counter()
    written = {write(key): value for key, value in row.items()}
    assert parse_row(written, "x:1", left_out=counts[0]) == parse_row(row, "x:1", left_out=counts[1])
    assert counts[0] == counts[1]
    others = {write(key): "another" for key in row}
    for beside_exact_keys in (others | row, row | others):
        assert parse_row(beside_exact_keys, "x:1") == parse_row(row, "x:1")


def test_keys_that_differ_in_their_case_alone_are_refused():
    refuses(
        'x:1: the keys "Output" and "OUTPUT" differ in their case alone; call the one to read "output"',
        *(parse_row, {"instruction": "a", "Output": "b", "OUTPUT": "c"}, "x:1"),
    )
    messages = [{"Role": "user", "Content": "Hi."}, {"FROM": "gpt", "Value": "Hello."}]
    assert parse_row({"Messages": messages}, "x:1") == Example("", "", ("Hello.",), messages=(Turn("user", "Hi."),))


def test_rows_of_ultrachat_are_chats():
    texts = ["Hi.", "Hello.", "Hi.", "Again?"]
    for data in (texts, json.dumps(texts), str(texts)):
        assert parse_row({"id": "0", "data": data}, "x:1") == Example("", "", ("Again?",), messages=TURNS)
    # A question at the end has no answer, and beside messages the texts are some other data.
    assert parse_row({"data": [*texts[:2], "Bye."]}, "x:1").messages == TURNS[:1]
    assert parse_row({"messages": [SYSTEM, USER, ANSWER], "data": texts}, "x:1") == CHAT
    refuses('"data" has no assistant turn', parse_row, {"data": ["Hi."]}, "x:1")
    refuses('the key "instruction" is missing', parse_row, {"data": [1, 2]}, "x:1")


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
        (
            {"messages": [USER, {"role": "critic", "content": "x"}]},
            'message 2 of "messages" has the role "critic"; the',
        ),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, 'message 2 of "messages" has the content null'),
    ],
)
def test_what_is_wrong_is_named(row, what):
    refuses(f"data.jsonl:7: {what}", parse_row, row, "data.jsonl:7")


def test_of_a_long_value_the_beginning_is_said():
    for length, said in ((38, "a" * 38 + '"'), (39, "a" * 36 + "..."), (10**6, "a" * 36 + "...")):
        refuses(f'has the role "{said}; the', parse_row, {"messages": [{"role": "a" * length, "content": "x"}]}, "x:1")


FUNCTION = {"name": "weather", "description": "Of a city.", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
PAIR = {"instruction": "Hi.", "output": "Hello."}
CALLED = (Turn("user", "Hi."), Turn("assistant", "", {"tool_calls": [CALL]}), Turn("tool", "Sunny."))


def learned(row: dict[str, Any]) -> Example:
    return parse_row(row, "x:1")


class TestKeysThatChangeARow:
    """What each format means by its keys, written out by hand from the documentation of the formats."""

    @pytest.mark.parametrize("system", ["system", "system_prompt", "system_message"])
    @pytest.mark.parametrize(
        "row",
        [
            PAIR,
            {"query": "Hi.", "response": "Hello."},
            {"question": "Hi.", "answer": "Hello."},
            {"problem": "Hi.", "solution": "Hello."},
            {"conversations": SHARED[1:]},
            {"messages": [USER, ANSWER]},
            {"messages": [SYSTEM, USER, ANSWER]},
            {"messages": [{**SYSTEM, "role": "developer"}, USER, ANSWER]},
            {"prompt": [USER], "completion": [ANSWER]},
        ],
    )
    def test_system_is_the_first_turn(self, row, system):
        found = learned({**row, system: "Be short."})
        assert (found.messages, found.outputs) == (CHAT.messages, CHAT.outputs)
        assert learned({**row, system: ""}).messages == learned(row).messages

    def test_history_is_the_turns_before_an_instruction(self):
        found = learned(
            {"instruction": "Sum.", "input": "1 2", "output": "3", "history": [["Hi.", "Hello."]], "system": "s"}
        )
        turns = ("system", "s"), ("user", "Hi."), ("assistant", "Hello."), ("user", "Sum.\n\n1 2")
        assert [(turn.role, turn.content) for turn in found.messages] == list(turns)
        assert found.chat_key == "system"
        assert learned({**PAIR, "history": '[["Hi.", "Hello."]]'}) == learned({**PAIR, "history": [["Hi.", "Hello."]]})
        for empty in ([], "", "[]"):
            assert learned({**PAIR, "history": empty}) == Example("Hi.", "", ("Hello.",))

    @pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [FUNCTION], json.dumps([FUNCTION])])
    @pytest.mark.parametrize("key", ["tools", "functions"])
    def test_tools_are_a_list_or_a_text_of_json(self, tools, key):
        assert learned({"messages": [USER, ANSWER], key: tools}).tools == (TOOL,)
        assert learned({**PAIR, key: tools}).tools == (TOOL,)

    def test_tools_that_the_system_turn_describes_are_not_described_twice(self):
        left_out = Counter[str]()
        system = {"from": "system", "value": f"You may call <tools>{json.dumps(TOOL)}</tools>."}
        row = {"conversations": [system, *SHARED[1:]], "tools": json.dumps([TOOL])}
        assert parse_row(row, "x:1", left_out=left_out).tools == ()
        assert left_out == {"tools of {} rows (the system turn describes them)": 1}

    @pytest.mark.parametrize("tools", [[], "[]", ""])
    def test_no_tools_are_not_left_out(self, tools):
        left_out = Counter[str]()
        assert parse_row({"messages": [USER, ANSWER], "tools": tools}, "x:1", left_out=left_out).tools == ()
        assert not left_out

    @pytest.mark.parametrize("arguments", [{"city": "Ulm"}, '{"city": "Ulm"}'])
    @pytest.mark.parametrize("role", ["function_call", "tool_call", "tool_calls", "former"])
    @pytest.mark.parametrize("observed", ["observation", "tool", "function", "tool_response"])
    def test_calls_of_tools_and_what_they_observe(self, arguments, role, observed):
        call = {"name": "weather", "arguments": arguments}
        turn: dict[str, Any] = {
            "tool_calls": {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": call}],
            },
            "former": {"role": "assistant", "content": "", "function_call": call},
        }.get(role, {"from": role, "value": json.dumps(call)})
        found = learned({"messages": [USER, turn, {"role": observed, "content": "Sunny."}, ANSWER]})
        assert found.messages == CALLED
        assert learned({"messages": [USER, turn]}) == Example(
            "", "", ("",), messages=CALLED[:1], answer_fields={"tool_calls": [CALL]}
        )

    def test_calls_one_after_the_other_are_one_turn(self):
        calls = [{"role": "tool_call", "content": json.dumps({"name": name, "arguments": {}})} for name in ("a", "b")]
        (_, called), (_, both) = (
            learned({"messages": [USER, *turns, ANSWER]}).messages
            for turns in (calls, [{**calls[0], "content": json.dumps([json.loads(each["content"]) for each in calls])}])
        )
        assert called == both
        assert [each["function"]["name"] for each in called.fields["tool_calls"]] == ["a", "b"]

    @pytest.mark.parametrize("unlearned", [0, 1])
    def test_calls_of_which_one_is_not_learned_are_not_learned(self, unlearned):
        call = {"role": "tool_call", "content": json.dumps(CALL["function"])}
        calls = [{**call, "weight": int(place != unlearned)} for place in range(2)]
        assert [turn.is_learned for turn in learned({"messages": [USER, *calls, ANSWER]}).messages] == [True, False]

    def test_a_call_in_other_words_is_the_same_call(self):
        """Arguments as parameters, a number of the row's own, and OpenAI's former key beside its successor."""
        same = {"name": "weather", "parameters": {"city": "Ulm"}}, {**CALL["function"], "id": 7}
        for call in same:
            turn = {"role": "function_call", "content": json.dumps(call)}
            assert learned({"messages": [USER, turn]}).answer_fields == {"tool_calls": [CALL]}
        both = {"role": "assistant", "content": "", "tool_calls": [CALL], "function_call": {"name": "other"}}
        assert learned({"messages": [USER, both]}).answer_fields["tool_calls"] == [CALL]

    @pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
    def test_reasoning_stays_beside_the_answer(self, key):
        assert learned({"messages": [USER, {**ANSWER, key: "Hm."}]}).answer_fields == {key: "Hm."}
        assert learned({**PAIR, key: "Hm."}).answer_fields == {key: "Hm."}
        assert learned({"messages": [USER, {**ANSWER, key: "Hm."}, USER, ANSWER]}).messages[1].fields == {key: "Hm."}

    @pytest.mark.parametrize("options", [{"enable_thinking": False}, '{"enable_thinking": false}'])
    def test_switches_of_the_template(self, options):
        for row in (PAIR, {"messages": [USER, ANSWER]}, {"prompt": [USER], "completion": [ANSWER]}):
            assert learned({**row, "chat_template_kwargs": options}).template_options == {"enable_thinking": False}

    @pytest.mark.parametrize("no", [0, 0.0, False])
    @pytest.mark.parametrize("key", ["weight", "train", "training", "loss", "loss_weight"])
    def test_turns_that_are_not_learned(self, key, no):
        bad = {"role": "assistant", "content": "bad", key: no}
        found = learned({"messages": [USER, {**ANSWER, key: 1}, USER, bad]})
        assert (found.messages, found.outputs) == ((Turn("user", "Hi."),), ("Hello.",))
        found = learned({"messages": [USER, bad, USER, {**ANSWER, key: True}]})
        assert found.messages[1] == Turn("assistant", "bad", is_learned=False)
        with pytest.raises(LeftOut, match="x:1: the row is not learned, because none of its turns is learned"):
            learned({"messages": [USER, bad]})

    def test_masked_turns_are_not_learned(self):
        """Torchtune's messages say which are left out of the loss."""
        masked, user = {"role": "assistant", "content": "bad", "masked": True}, {**USER, "masked": True}
        found = learned({"messages": [user, masked, user, {**ANSWER, "masked": False}]})
        assert [turn.is_learned for turn in found.messages] == [False, False, False]
        assert found.outputs == ("Hello.",)

    def test_assistant_turns_of_a_prompt_are_given(self):
        found = learned({"prompt": [USER, AGAIN, USER], "completion": [ANSWER]})
        assert [turn.is_learned for turn in found.messages] == [True, False, True]

    def test_cells_of_csv_say_what_is_learned(self, tmp_path):
        """As pandas writes a column of 1 and 0 with an empty cell, and as others put a space behind a comma."""
        rows = {"instruction": ["a", "b", "c"], "output": ["x", "y", "z"], "weight": [1, 0, None]}
        (tmp_path / "pandas.csv").write_text(pd.DataFrame(rows).to_csv(index=False))
        assert [each.outputs for each in read_examples(tmp_path / "pandas.csv")] == [("x",), ("z",)]
        rows["train"] = [True, False, None]
        del rows["weight"]
        (tmp_path / "truth.csv").write_text(pd.DataFrame(rows).to_csv(index=False))
        assert [each.outputs for each in read_examples(tmp_path / "truth.csv")] == [("x",), ("z",)]
        (tmp_path / "spaces.csv").write_text("prompt,completion,label\na,x, true\nb,y, False\n")
        assert [each.outputs for each in read_examples(tmp_path / "spaces.csv")] == [("x",)]

    @pytest.mark.parametrize(
        ("written", "separator"),
        [(json.dumps, ","), (json.dumps, "\t"), (str, ","), (lambda value: str(np.array(value, dtype=object)), ",")],
        ids=["JSON", "TSV", "pandas", "numpy"],
    )
    @pytest.mark.parametrize(
        ("columns", "count"),
        [
            ({"messages": [USER, ANSWER, USER, AGAIN]}, 3),
            ({"conversations": [{"from": "human", "value": "}  {"}, {"from": "gpt", "value": 'It\'s "so".'}]}, 1),
            ({"prompt": [USER], "completion": [ANSWER]}, 1),
            ({"prompt": [USER, AGAIN, USER], "chosen": [ANSWER]}, 3),
            ({"chosen": [USER, ANSWER]}, 1),
        ],
        ids=lambda columns: "-".join(columns) if isinstance(columns, dict) else "",
    )
    def test_cells_of_tables_are_chats(self, columns, count, written, separator, tmp_path):
        """As JSON, as pandas writes a list, and as the datasets library does, an array without commas."""
        table = pd.DataFrame({key: [written(value)] for key, value in columns.items()})
        path = tmp_path / ("a.csv" if separator == "," else "a.tsv")
        table.to_csv(path, index=False, sep=separator)
        [found] = read_examples(path)
        assert found == learned(columns)
        assert len(found.messages) == count

    def test_a_set_of_chats_as_the_datasets_library_writes_csv(self, tmp_path):
        rows = {"messages": [[USER, {**ANSWER, "content": "{1}\n {2}"}]], "tools": [[TOOL]]}
        datasets.Dataset.from_dict(rows).to_csv(tmp_path / "a.csv")
        assert read_examples(tmp_path / "a.csv") == [learned({key: value[0] for key, value in rows.items()})]

    @pytest.mark.parametrize("ending", ["parquet", "json", "csv", "pandas.jsonl"])
    def test_nulls_that_a_table_gives_to_calls_and_tools_are_not_learned(self, ending, tmp_path):
        """A column of calls has the arguments of all of them."""
        rows = []
        for name, value in (("x", 1), ("y", "array([2], dtype=object)")):
            call = {"type": "function", "function": {"name": name, "arguments": {name: value}}}
            of_tool = {"type": "object", "properties": {name: {"type": "string"}}}
            tool = {"type": "function", "function": {"name": name, "description": "d", "parameters": of_tool}}
            calls = {"role": "assistant", "content": "", "tool_calls": [call]}
            rows.append({"messages": [USER, calls, {"role": "tool", "content": "3"}, ANSWER], "tools": [tool]})
        table, path = datasets.Dataset.from_list(rows), tmp_path / f"a.{ending}"
        if ending == "pandas.jsonl":
            table.to_pandas().to_json(path, orient="records", lines=True)
        else:
            getattr(table, f"to_{ending}")(path)
        assert ending == "parquet" or re.search(r"null|None", path.read_text())
        assert read_examples(path) == [learned(row) for row in rows]

    def test_a_null_that_is_meant_is_learned(self):
        call = {"type": "function", "function": {"name": "f", "arguments": {"x": None}}}
        row = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}
        assert learned(row).answer_fields == {"tool_calls": [call]}

    def test_answers_of_plain_prompts_stay_texts(self, tmp_path):
        """Which may be JSON themselves, of messages too."""
        row = {"prompt": "[1, 2] as JSON?", "completion": json.dumps([USER, ANSWER])}
        pd.DataFrame([row]).to_csv(tmp_path / "a.csv", index=False)
        [found] = read_examples(tmp_path / "a.csv")
        assert (found.raw_prompt, found.outputs) == (row["prompt"], (row["completion"],))

    @pytest.mark.parametrize("cell", ["[{'role': 'user', 'content': f()}]", "[{'role'", "{}", "[" * 9999])
    def test_cells_that_are_no_chats(self, cell):
        refuses('"messages" is ', learned, {"messages": cell})

    @pytest.mark.parametrize("row", [{"prompt": "a", "completion": "b"}, {"messages": [USER, ANSWER]}, PAIR])
    @pytest.mark.parametrize("key", ["label", "kto_tag"])
    def test_answers_that_are_labeled_bad(self, row, key):
        assert learned({**row, key: True}) == learned(row)
        for good in ("True", " yes", "desirable", "good", "chosen"):
            assert learned({**row, key: good}) == learned(row)
        for bad in (False, "False", "false", "no", "Undesirable", "bad", "rejected"):
            with pytest.raises(LeftOut, match=f"{key} is false"):
                learned({**row, key: bad})
        assert parse_row({**row, key: False}, "x:1", needs_answer=False) == learned(row), "a prompt has no bad answer"
        for other in ("sports", "maybe", "1", 0, 3, -1.0, ""):
            refuses(f'x:1: "{key}" is {json.dumps(other)}; say by true or false', learned, {**row, key: other})

    @pytest.mark.parametrize(
        ("row", "example"),
        [
            ({"prompt": "Hi.", "chosen": "Hello.", "rejected": "No."}, RAW),
            (
                {"prompt": [USER], "chosen": [ANSWER], "rejected": [AGAIN]},
                Example("", "", ("Hello.",), messages=TURNS[:1]),
            ),
            ({"chosen": [USER, ANSWER], "rejected": [USER, AGAIN]}, Example("", "", ("Hello.",), messages=TURNS[:1])),
            (
                {"prompt": "Hi.", "chosen": [USER, ANSWER], "rejected": [USER, AGAIN]},
                Example("", "", ("Hello.",), messages=TURNS[:1]),
            ),
            ({"conversations": SHARED[:2], "chosen": SHARED[2], "rejected": SHARED[2]}, CHAT),
            (
                {"chosen_messages": [USER, ANSWER], "rejected_messages": [USER, AGAIN]},
                Example("", "", ("Hello.",), messages=TURNS[:1]),
            ),
            ({"instruction": "Hi.", "chosen": "Hello.", "rejected": "No."}, Example("Hi.", "", ("Hello.",))),
        ],
    )
    def test_of_a_preference_the_chosen_answer_is_learned(self, row, example):
        left_out = Counter[str]()
        assert parse_row(row, "x:1", left_out=left_out) == example
        [key] = (key for key in row if key.startswith("rejected"))
        assert describe_left_out(left_out) == f" Left out: {key} of 1 rows (only the chosen answer is learned)."

    def test_parts_of_a_content_are_their_texts(self):
        parts = [{"type": "text", "text": "Hel"}, {"text": "lo"}, "."]
        assert learned({"messages": [USER, {**ANSWER, "content": parts}]}).outputs == ("Hello.",)

    @pytest.mark.parametrize("key", ["value", "text"])
    def test_parts_of_other_types(self, key):
        """LLaMA-Factory's newer sets have reasoning and calls as parts, with their text under `value`."""
        call = json.dumps({"name": CALL["function"]["name"], "arguments": CALL["function"]["arguments"]})
        parts = [{"type": "reasoning", key: "Hm."}, {"type": "text", key: "Hello."}, {"type": "tool_call", key: call}]
        found = learned({"messages": [{**USER, "content": parts[1:2]}, {**ANSWER, "content": parts}]})
        assert found == learned(
            {"messages": [{**USER, "content": "Hello."}, {**ANSWER, "reasoning_content": "Hm.", "tool_calls": [CALL]}]}
        )
        thinks = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Hello."}]
        assert learned({"messages": [USER, {**ANSWER, "content": thinks}]}).answer_fields == {
            "reasoning_content": "Hm."
        }
        broken = [{"type": "tool_call", key: "f("}]
        refuses('"tool_call" is "f(", not JSON', learned, {"messages": [USER, {**ANSWER, "content": broken}]})

    def test_fields_that_are_no_json_are_left_out(self):
        for field in ({1: "a"}, {"a": {2: "b"}}, [pd.Timestamp(0)]):
            assert learned({"messages": [USER, {**ANSWER, "about": field, "name": "a"}]}).answer_fields == {"name": "a"}

    def test_media_that_a_row_has_not_say_nothing(self):
        for nothing in (None, False, [], ""):
            assert learned({"messages": [USER, {**ANSWER, "images": nothing}], "videos": nothing}).outputs == (
                "Hello.",
            )

    @pytest.mark.parametrize(
        ("row", "said"),
        [
            *[
                ({**row, key: ["a.jpg"]}, f'x:1: "{key}" (["a.jpg"]) is no text')
                for key in ("images", "videos", "audios", "image")
                for row in (PAIR, {"messages": [USER, ANSWER]}, {"prompt": "a", "completion": "b"})
            ],
            ({"messages": [USER, {**ANSWER, "images": ["a"]}]}, 'message 2 of "messages": "images" (["a"]) is no text'),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}, ANSWER]},
                'message 1 of "messages" has the part {"type": "image_url"',
            ),
            ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, '"weight" is 0.5; give 1 to learn it, 0 not to'),
            ({"messages": [USER, {**ANSWER, "train_detail": [{"begin_offset": 0}]}]}, "parts of a message learned"),
            ({"messages": [{**USER, "train": True}, ANSWER]}, "is a user turn that is to be learned, and only answers"),
            ({"messages": [USER, {**ANSWER, "refusal": "No."}]}, '"refusal" ("No.") stands beside the content'),
            ({"messages": [SYSTEM, USER, ANSWER], "system": "Else."}, "begins with another system turn than the row's"),
            ({**PAIR, "system": "a", "system_prompt": "b"}, "two system prompts"),
            ({**PAIR, "system": 3}, '"system" is 3, not a string'),
            ({**PAIR, "history": ["Hi."]}, '"history" has "Hi."; give pairs'),
            ({**PAIR, "input": "a", "context": "b"}, 'both "input" and "context" have a text'),
            ({**PAIR, "label": 0}, '"label" is 0; say by true or false'),
            ({**PAIR, "label": "0.0"}, '"label" is "0.0"; say by true or false'),
            ({**PAIR, "weight": 0.5}, '"weight" is 0.5; give 1 to learn it, 0 not to'),
            ({"question": "a", "answer": "B", "choices": ["x", "y"]}, '"choices" (["x", "y"]) is not read'),
            ({"prompt": "a", "completion": "b", "system": "c"}, '"system" ("c") has no place in a prompt without'),
            ({"prompt": "a", "completion": "b", "tools": [TOOL]}, "has no place in a prompt without a template"),
            ({"messages": [USER, ANSWER], "tools": "no"}, '"tools" is "no", not JSON'),
            ({"messages": [USER, ANSWER], "tools": [3]}, '"tools" has 3; give objects'),
            ({"messages": [USER, ANSWER], "history": [["a", "b"]]}, "belongs to an instruction"),
            (
                {"messages": [USER, ANSWER], "chat_template_kwargs": [1]},
                '"chat_template_kwargs" is [1]; give an object',
            ),
            ({"messages": [USER, {"from": "function_call", "value": "weather"}]}, '"content" is "weather", not JSON'),
            ({"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]}, '"tool_calls" has {}; give calls'),
            ({"text": "A corpus."}, "a corpus of texts is read with --data.kind text"),
            ({"input": "a", "output": "b"}, "or use another format: query and response, question and answer, problem"),
        ],
    )
    def test_what_is_not_read_is_refused(self, row, said):
        refuses(said, learned, row)

    @pytest.mark.parametrize(
        ("row", "learned_key", "other"),
        [
            ({"question": "2+2?", "answer": "4", "response": "Two and two is 4."}, "answer", "response"),
            ({"problem": "2+2?", "solution": "Add. 4", "answer": "4"}, "solution", "answer"),
            ({"prompt": "2+2?", "completion": "4", "output": "5"}, "completion", "output"),
            ({"instruction": "2+2?", "output": "4", "response": "4"}, "output", None),
            ({"messages": [USER, ANSWER], "answer": "4"}, None, None),
        ],
    )
    def test_another_answer_of_a_row_is_counted(self, row, learned_key, other):
        left_out = Counter[str]()
        example = parse_row(row, "x:1", left_out=left_out)
        assert example.outputs == (row[learned_key] if learned_key else "Hello.",)
        said = f" Left out: {other} of 1 rows (another answer of the row is learned)."
        assert describe_left_out(left_out) == (said if other else "")

    def test_rows_that_are_left_out_are_counted(self):
        rows = [
            PAIR,
            {**PAIR, "label": False},
            {**PAIR, "rejected": "x", "parallel_tool_calls": False},
            {**PAIR, "weight": 0},
        ]
        left_out = Counter[str]()
        assert len(list(parse_rows(((row, "x:1") for row in rows), left_out))) == 2
        assert describe_left_out(left_out) == (
            " Left out: 1 rows (label is false); rejected of 1 rows (only the chosen answer is learned); "
            "parallel_tool_calls of 1 rows (no chat template reads it); 1 rows (its weight is 0)."
        )

    @pytest.mark.parametrize(
        "row",
        [
            {**PAIR, "system": "Be short.", "history": [["Hi.", "Hello."]]},
            {"prompt": [USER, AGAIN, USER], "completion": [ANSWER], "chat_template_kwargs": {"enable_thinking": False}},
            {
                "messages": [USER, {**AGAIN, "weight": 0}, USER, {**AGAIN, "thinking": "Hm."}, USER, ANSWER],
                "tools": [TOOL],
            },
        ],
    )
    def test_rows_with_new_answers_keep_their_keys(self, row):
        example, again = learned(row), learned(answered_row(learned(row), "Hello."))
        assert again == Example(**{**vars(example), "chat_key": "", "answer_fields": {}})
