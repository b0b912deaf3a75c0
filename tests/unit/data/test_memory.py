import json
import re
from dataclasses import replace

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hostile import refuses

from llmdistill.data.chat_messages import Turn
from llmdistill.data.examples import Example
from llmdistill.data.memory import rows_in_memory
from llmdistill.data.sources import examples_of, kind_of, read_examples, write_rows

ROWS = [
    {"instruction": "Add.", "input": "1 2", "output": "3"},
    {"instruction": "Greet.", "input": None, "output": "Hi."},
]
EXAMPLES = [Example("Add.", "1 2", ("3",)), Example("Greet.", "", ("Hi.",))]
COLUMNS = {key: [row[key] for row in ROWS] for key in ROWS[0]}
TABLE = datasets.Dataset.from_list(ROWS)
CHAT = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello.", "thinking": "Hm."}]
COLUMNS_OF_CHAT = {"role": ["user", "assistant"], "content": ["Hi.", "Hello."], "thinking": [None, "Hm."]}
TEXT = datasets.Value("string")
ANSWERED = Example("", "", ("Hello.",), messages=(Turn("user", "Hi."),), answer_fields={"thinking": "Hm."})


def of_polars(kind, method, values):
    """What polars has of a class, which is no package of the tests: in a table all messages have the same keys."""
    return type(kind, (), {"__module__": "polars", method: lambda self, **_: iter(values)})()


class Again:
    """Rows that can be iterated as often as one likes."""

    def __iter__(self):
        return iter(ROWS)


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        tuple(ROWS),
        Again(),
        COLUMNS,
        {key: np.array(values, dtype=object) for key, values in COLUMNS.items()},
        pd.DataFrame(ROWS),
        pd.DataFrame(ROWS, index=[5, 5]),
        pd.DataFrame(ROWS).fillna(np.nan).to_dict("records"),
        pd.DataFrame(ROWS).convert_dtypes().to_dict("records"),
        pd.DataFrame(ROWS).convert_dtypes(),
        pd.DataFrame(ROWS).astype({"output": "category"}),
        datasets.Dataset.from_list(ROWS),
        datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
        pa.Table.from_pylist(ROWS),
        pa.RecordBatch.from_pylist(ROWS),
        of_polars("DataFrame", "iter_rows", ROWS),
    ],
    ids=lambda data: type(data).__name__,
)
def test_rows(data, tmp_path):
    assert kind_of(data) == "instructions"
    assert examples_of(data) == EXAMPLES
    assert read_examples(write_rows(data, tmp_path)) == EXAMPLES
    assert write_rows(data, tmp_path) == write_rows(data, tmp_path), "the same call finds its file again"


@pytest.mark.parametrize(
    "data",
    [
        [CHAT, CHAT],
        {"messages": [CHAT, CHAT]},
        pd.DataFrame({"messages": [CHAT, CHAT]}),
        pd.DataFrame({"messages": [np.array(CHAT, dtype=object)] * 2}),
        [{"messages": np.array(CHAT, dtype=object), "label": np.bool_(True)}] * 2,
        *(
            datasets.Dataset.from_dict({"messages": [CHAT, CHAT], "label": [True, True]}).with_format(kind)
            for kind in ("numpy", "torch", "pandas", "arrow")
        ),
        *(
            datasets.Dataset.from_dict({"messages": [CHAT, CHAT]}).to_iterable_dataset().with_format(kind)
            for kind in ("numpy", "torch", "pandas", "arrow")
        ),
        [{"messages": COLUMNS_OF_CHAT}] * 2,
        [{"messages": {key: np.array(values, dtype=object) for key, values in COLUMNS_OF_CHAT.items()}}] * 2,
        [{"messages": json.dumps(COLUMNS_OF_CHAT)}] * 2,
        datasets.Dataset.from_dict(
            {"messages": [COLUMNS_OF_CHAT] * 2},
            features=datasets.Features({"messages": datasets.Sequence(dict.fromkeys(COLUMNS_OF_CHAT, TEXT))}),
        ),
        datasets.Dataset.from_dict({"messages": [CHAT, CHAT]}),
        pa.table({"messages": [CHAT, CHAT]}),
        of_polars("DataFrame", "iter_rows", [{"messages": [{**CHAT[0], "thinking": None}, CHAT[1]]}] * 2),
    ],
    ids=lambda data: type(data).__name__,
)
def test_chats(data, tmp_path):
    assert examples_of(data) == [ANSWERED] * 2
    assert read_examples(write_rows(data, tmp_path)) == [ANSWERED] * 2


def test_the_format_of_a_set_is_of_no_account(tmp_path):
    table = TABLE.with_format("torch", columns=["instruction", "output"])
    table.save_to_disk(tmp_path / "saved")
    assert examples_of(table) == read_examples(tmp_path / "saved") == [replace(EXAMPLES[0], input=""), EXAMPLES[1]]
    assert all(type(each.outputs[0]) is str for each in examples_of(TABLE.with_format("numpy")))
    upper = TABLE.with_transform(lambda rows: {key: [str(each).upper() for each in rows[key]] for key in rows})
    assert [each.outputs for each in examples_of(upper)] == [("3",), ("HI.",)]


def test_nulls_that_a_row_gives_stay():
    tool = {"function": {"name": "f", "parameters": {"default": None}}}
    [found] = examples_of([{"messages": CHAT, "tools": [tool]}])
    assert found.tools == ({"function": {"name": "f", "parameters": {"default": None}}},)


@pytest.mark.parametrize(
    "data",
    [
        ["One.", "Two."],
        ("One.", "Two."),
        pd.Series(["One.", "Two."]),
        of_polars("Series", "to_list", ["One.", "Two."]),
        {"text": ["One.", "Two."]},
        pa.array(["One.", "Two."]),
    ],
    ids=lambda data: type(data).__name__,
)
def test_texts(data, tmp_path):
    assert kind_of(data) == "text"
    assert write_rows(data, tmp_path).read_text() == '{"text": "One."}\n{"text": "Two."}\n'


def test_numbers_and_missing_cells_of_a_table():
    table = pd.DataFrame({"a": [1, 2], "b": [0.5, np.nan], "c": ["x", None], "d": pd.array([1, None], "Int64")})
    rows = [{"a": 1, "b": 0.5, "c": "x", "d": 1}, {"a": 2, "b": None, "c": None, "d": None}]
    assert list(rows_in_memory(table)) == rows
    assert [type(value) for value in next(rows_in_memory(table)).values()] == [int, float, str, int]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (datasets.DatasetDict(dict.fromkeys(["train", "test"], TABLE)), "DatasetDict of the splits train, test; give"),
        ((row for row in ROWS), "data is a generator, which can be read only once; give list(data)"),
        (map(dict, ROWS), "data is a map, which can be read only once"),
        (ROWS[0], 'data is a dict whose "instruction" is a str, not a column'),
        ({"instruction": ["a"], "output": []}, "columns of different lengths ({'instruction': 1, 'output': 0})"),
        ({}, "data is a table without columns"),
        ({"One.", "Two."}, "data is a set; give a list of rows, texts or chats"),
        (b"One.", "data is a bytes; give a list"),
        (3, "data is a int; give a list"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "two columns of one name"),
        ([], "data holds no example"),
        (pd.DataFrame(), "data is a table without columns"),
    ],
    ids=lambda data: type(data).__name__,
)  # fmt: skip
def test_anything_else_is_refused_by_its_type(data, said):
    refuses(said, kind_of, data)
    refuses(re.sub(r"^data|\bdata\b(?=\))", "valid", said), kind_of, data, name="valid")


def test_a_row_that_is_none():
    refuses("data: row 2: a int, not a dict", examples_of, [ROWS[0], 3])
    refuses("data: row 1: a list, not a dict", examples_of, [["a", "b"]])
