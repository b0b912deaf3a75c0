import json
from itertools import islice
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest
from hostile import refuses

from llmdistill.data.examples import Example, Turn
from llmdistill.data.sources import open_rows, read_examples

ROW = {"instruction": "Add.", "input": "1 2", "output": "3"}
ROWS = [ROW, {"instruction": "Greet.", "input": "", "output": "Hi."}]


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


class TestJsonl:
    def test_line_separators_inside_strings_do_not_end_a_line_and_surrogate_pairs_are_characters(self, tmp_path):
        path = tmp_path / "a.jsonl"
        path.write_bytes('\ufeff{"instruction": "a\u2028b", "output": "c\x85d"}\r\n'.encode())
        assert read_examples(path) == [Example("a\u2028b", "", ("c\x85d",))]
        path.write_text('{"instruction": "\\ud83d\\ude00", "output": "\\\\ud800"}\n')
        assert read_examples(path) == [Example("😀", "", ("\\ud800",))]

    def test_streaming_reads_no_further_than_asked(self, tmp_path):
        path = write(tmp_path / "a.jsonl", ROW, "not JSON")
        assert list(islice(open_rows(path, streaming=True), 1)) == [(ROW, f"{path}:1")]


@pytest.mark.parametrize(
    "text", [json.dumps(ROWS, indent=1), json.dumps({"data": ROWS}), "\n".join(map(json.dumps, ROWS))]
)
def test_json_is_an_array_an_object_around_it_or_lines(tmp_path, text):
    found = read_examples(write(tmp_path / "a.json", text))
    assert found == [Example("Add.", "1 2", ("3",)), Example("Greet.", "", ("Hi.",))]


class TestTables:
    def test_parquet(self, tmp_path):
        chat = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
        rows = [{**ROW, "output": ["3", "three"]}, {"messages": chat}]
        keys = {key for row in rows for key in row}
        path = tmp_path / "a[1]*.parquet"  # no pattern, though it looks like one
        datasets.Dataset.from_list([{key: row.get(key) for key in keys} for row in rows]).to_parquet(path)
        answered = Example("", "", ("Hello.",), messages=(Turn("user", "Hi."),))
        assert read_examples(path) == [Example("Add.", "1 2", ("3", "three")), answered]

    def test_a_tsv_has_a_header_and_no_quoting(self, tmp_path):
        path = tmp_path / "a.tsv"
        path.write_text('instruction\toutput\n"a\tb\n\nc, d\t"e" f\n', encoding="utf-8")
        examples = read_examples(path)
        assert [(each.instruction, each.outputs) for each in examples] == [('"a', ("b",)), ("c, d", ('"e" f',))]
        path.write_text("instruction\toutput\n\na\n", encoding="utf-8")
        refuses("a.tsv:3: ", read_examples, path)

    def test_cells_of_csv_stay_text(self, tmp_path):
        path = write(tmp_path / "a.csv", "\ufeffinstruction,input,output", "007,,None", '1.50,NA,"a\nb"\n')
        assert read_examples(path) == [Example("007", "", ("None",)), Example("1.50", "NA", ("a\nb",))]

    def test_what_is_wrong_is_named(self, tmp_path):
        path = write(tmp_path / "a.csv", "instruction,output", "a,b", "c,")
        refuses('a.csv: row 2: the key "output" is missing', read_examples, path)
        assert [example.outputs for example in read_examples(path, needs_answer=False)] == [("b",), ()]
        (tmp_path / "b.parquet").write_text("")
        refuses("b.parquet: cannot be read as Parquet", read_examples, tmp_path / "b.parquet")


TABLE = datasets.Dataset.from_list([{**ROW, "instruction": f"Add {number}."} for number in range(10)])


@pytest.fixture
def calls(monkeypatch):
    """Lets the hub hold the table, split train; gives the list of what was asked of it."""
    found = []

    def load(name: str, config: str | None = None, *, split: str, streaming: bool) -> object:
        found.append((name, config, split, streaming))
        if streaming:
            assert split == "train", "the library streams whole splits alone"
            return TABLE.to_iterable_dataset()
        slices = datasets.ReadInstruction.from_spec(split).to_absolute({"train": len(TABLE)})
        return TABLE.select([number for part in slices for number in range(10)[part.from_ : part.to]])

    monkeypatch.setattr(datasets, "load_dataset", load)
    return found


class TestHub:
    @pytest.mark.parametrize(
        ("reference", "asked", "numbers"),
        [
            ("o/n.v-1", ("o/n.v-1", None, "train"), range(10)),
            ("o/n:train[50%:]", ("o/n", None, "train[50%:]"), range(5, 10)),
            ("o/n:main:train[1:3]+train[8:]", ("o/n", "main", "train[1:3]+train[8:]"), [1, 2, 8, 9]),
            (Path("o/n:main:train"), ("o/n", "main", "train"), range(10)),
        ],
    )
    def test_names(self, calls, reference, asked, numbers):
        assert [example.instruction for example in read_examples(reference)] == [f"Add {n}." for n in numbers]
        assert calls == [(*asked, False)]

    @pytest.mark.parametrize(("slice_", "numbers"), [("", range(10)), ("[:3]", range(3)), ("[2:4]", range(2, 4))])
    def test_streaming_cuts_by_numbers(self, calls, slice_, numbers):
        rows = list(open_rows(f"o/n:train{slice_}", streaming=True))
        assert [row["instruction"] for row, _ in rows] == [f"Add {n}." for n in numbers]
        assert [source for _, source in rows] == [f"o/n:train{slice_}: row {n + 1}" for n in range(len(numbers))]
        assert calls == [("o/n", None, "train", True)]

    @pytest.mark.parametrize(("form", "split"), [(str, ""), (str, ":train[4:]"), (Path, ":test")])
    def test_one_file_of_a_set(self, monkeypatch, form, split):
        load, name = Mock(return_value=TABLE), "hf://datasets/MiniLLM/dolly/raw.jsonl"
        monkeypatch.setattr(datasets, "load_dataset", load)
        assert len(read_examples(form(name + split))) == 10
        (call,) = load.call_args_list
        assert (call.args[0], call.kwargs["split"], call.kwargs["data_files"]) == ("json", split[1:] or "train", name)
        for unknown in ("[:50%]", "[-3:]", "[:3]+train[5:]"):
            refuses(
                "by whole numbers alone, such as train[:500]", list, open_rows(f"o/n:train{unknown}", streaming=True)
            )

    def test_failure_names_the_set_and_the_remedy(self, monkeypatch):
        unreachable = Mock(side_effect=ConnectionError("Couldn't reach it\nafter 5 trials"))
        monkeypatch.setattr(datasets, "load_dataset", unreachable)
        said = "data set o/n, configuration main, split test (ConnectionError: Couldn't reach it); check the name"
        refuses(f"o/n:main:test: no such file, and not loaded from the hub as {said}", read_examples, "o/n:main:test")
        path = Path("hf://datasets/o/n/valid.jsonl")  # has one slash
        refuses("hf://datasets/o/n/valid.jsonl: no such file, and not loaded", read_examples, path)

    @pytest.mark.parametrize(
        "reference", ["none.jsonl", "o/none.CSV", "none", "a/b/c", "/a/b", "../b/c", "o/n:", "o/n:a:b:c", "n:x"]
    )
    def test_what_is_no_name_is_a_missing_file(self, calls, reference):
        refuses("no such file; give a JSONL, JSON, Parquet, CSV or TSV file, or OWNER/NAME", open_rows, reference)
        assert calls == []
