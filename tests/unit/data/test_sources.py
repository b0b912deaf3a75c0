import json
import shutil
from itertools import islice
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest
from hostile import refuses

from llmdistill.data.chat_messages import Turn
from llmdistill.data.corpus import store_corpus
from llmdistill.data.examples import Example
from llmdistill.data.instruct import Limits
from llmdistill.data.references import Part, data_fingerprint, parts_of, text_files
from llmdistill.data.sources import check_rows, kind_of, open_rows, read_examples
from llmdistill.data.stored_examples import store_examples
from llmdistill.data.whole_text import WholeText

ROW = {"instruction": "Add.", "input": "1 2", "output": "3"}
ROWS = [ROW, {"instruction": "Greet.", "input": "", "output": "Hi."}]


def write(path: Path, *lines: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
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
        refuses('a.csv:3: the key "output" is missing', read_examples, path)
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


def names(reference: object) -> list[str]:
    return [example.instruction for example in read_examples(str(reference))]


@pytest.fixture
def folder(tmp_path):
    """A folder of rows 1 to 4 in three files, and of what is there beside rows."""
    rows = [{"instruction": str(number), "output": "x"} for number in range(1, 5)]
    write(tmp_path / "set" / "a.jsonl", *rows[:1])
    write(tmp_path / "set" / "b" / "a.json", json.dumps(rows[1:3]))
    (tmp_path / "set" / "c.csv").write_text("instruction,output\n4,x\n")
    for other in ("README.md", "LICENSE", ".hidden", "a.jsonl.provenance.json"):
        (tmp_path / "set" / other).write_text("no rows")
    return tmp_path / "set"


class TestSeveralFiles:
    def test_a_folder_is_its_files_in_the_order_of_their_names(self, folder):
        assert names(folder) == ["1", "2", "3", "4"]
        refuses("c.csv:2: ", read_examples, write(folder / "c.csv", "instruction,output", "4,x,y").parent)

    def test_commas_between_sets(self, folder, tmp_path):
        assert names(f"{folder}/c.csv,{folder}/b, {folder}/a.jsonl") == ["4", "2", "3", "1"]
        assert names(f"embedded:valid,{folder}/c.csv")[-2:] == [names("embedded:valid")[-1], "4"]
        refuses(f"{tmp_path}/none.jsonl: no such file", open_rows, f"{folder}/c.csv,{tmp_path}/none.jsonl")
        refuses("the name before or after a comma is missing", open_rows, f"{folder}/c.csv,")
        odd = write(tmp_path / "a,b=2.jsonl", ROW)
        assert parts_of(odd) == [Part(str(odd))], "a path that exists is one set"

    def test_weights(self, folder):
        assert parts_of("a.jsonl=2, o/n:train[1:3]=0.5") == [Part("a.jsonl", 2.0), Part("o/n:train[1:3]", 0.5)]
        for wrong in ("a.jsonl=2,b.jsonl", "a.jsonl=0,b.jsonl=1"):
            refuses("give a weight over 0 to every set, as in a.jsonl=2,b.jsonl=1, or to none", parts_of, wrong)
        refuses("a set is named twice; name it once", parts_of, "a.jsonl=2,b.jsonl=1,a.jsonl=1")
        refuses("weights are for data.train", read_examples, f"{folder}/a.jsonl=1,{folder}/c.csv=2")
        refuses("weights are for data.train", text_files, f"{folder}/a.jsonl=1,{folder}/c.csv=2")

    def test_tokens_and_fingerprints_are_those_of_the_content(self, folder, tmp_path, word_tokenizer):
        both, other = f"{folder}/a.jsonl,{folder}/c.csv", f"{folder}/c.csv,{folder}/a.jsonl"
        kept = {name: store_examples(name, word_tokenizer(), Limits(), cache_dir=tmp_path) for name in (both, other)}
        before = {name: data_fingerprint(name) for name in (both, other, str(folder), both.replace(",", "=1,") + "=2")}
        assert len({*kept.values()}) == 2
        assert len({*before.values()}) == 4
        assert store_examples(both, word_tokenizer(), Limits(), cache_dir=tmp_path) == kept[both]
        (folder / "c.csv").write_text("instruction,output\n5,x\n")
        assert store_examples(both, word_tokenizer(), Limits(), cache_dir=tmp_path) != kept[both]
        assert all(data_fingerprint(name) != before[name] for name in (both, other, str(folder)))

    def test_texts(self, tmp_path, word_tokenizer):
        for name in ("a", "b"):
            (tmp_path / f"{name}.txt").write_text(f"{name} {name}\n")
        both = f"{tmp_path}/b.txt,{tmp_path}/a.txt"
        assert kind_of(both) == "text"
        assert text_files(both) == [tmp_path / "b.txt", tmp_path / "a.txt"]
        assert WholeText(both).read() == "b b\n\n\na a\n"
        meta = json.loads((store_corpus(both, word_tokenizer(), cache_dir=tmp_path) / "meta.json").read_text())
        assert (meta["documents"], meta["segments"]) == (2, 2)
        refuses("of several texts each is a file or a folder", text_files, f"{both},o/n")


class TestWhatIsNoSetOfRows:
    def test_a_folder_of_something_else(self, tmp_path, folder):
        refuses(
            "the folder holds no file of rows, and only JSONL",
            read_examples,
            (tmp_path / "empty").mkdir() or tmp_path / "empty",
        )
        for name, said in (("model.gguf", "holds model.gguf"), ("b.txt", "is read with --data.kind text")):
            (folder / name).write_text("x")
            refuses(said, read_examples, folder)
            (folder / name).unlink()

    def test_what_datasets_saves(self, tmp_path):
        TABLE.save_to_disk(tmp_path / "one")
        assert names(tmp_path / "one") == [f"Add {n}." for n in range(10)]
        datasets.DatasetDict(train=TABLE, test=TABLE).save_to_disk(tmp_path / "both")
        refuses("the folder of the splits test, train; give the folder of one", read_examples, tmp_path / "both")

    def test_a_plain_text(self, tmp_path):
        (tmp_path / "a.txt").write_text("Once upon a time.\n")
        refuses("a.txt:1: not JSON", read_examples, tmp_path / "a.txt")
        refuses("a plain text is read with --data.kind text", read_examples, tmp_path / "a.txt")
        shutil.copy(tmp_path / "a.txt", tmp_path / "b.TXT")
        refuses("a plain text is read with --data.kind text", read_examples, tmp_path / "b.TXT")

    @pytest.mark.parametrize("text", ["One line.\nAnother, longer line.", "word " * 100, "a/" * 2000 + "word " * 100])
    @pytest.mark.parametrize("read", [read_examples, text_files, lambda text: WholeText(text).read(), check_rows])
    def test_a_text_in_place_of_its_name(self, read, text):
        refuses("...: this is a text, not the name of a data set; give a list of texts", read, text)

    @pytest.mark.parametrize("read", [read_examples, text_files, check_rows])
    def test_an_empty_name(self, read):
        refuses("the name of a data set is empty; name a file, or leave the setting out", read, "")


def test_all_rows_of_a_small_set_are_checked_before_a_run(tmp_path, monkeypatch):
    bad = {"instruction": "a"}
    for ending, lines in (("jsonl", [ROW] * 3 + [bad]), ("json", [json.dumps([ROW] * 3 + [bad])])):
        refuses('the key "output" is missing', check_rows, write(tmp_path / f"a.{ending}", *lines))
    path = write(tmp_path / "a.jsonl", *[ROW] * 3, bad)
    monkeypatch.setattr("llmdistill.data.sources._CHECKED_BYTES", 10)
    monkeypatch.setattr("llmdistill.data.sources._CHECKED_ROWS", 3)
    check_rows(path)
    monkeypatch.setattr("llmdistill.data.sources._CHECKED_ROWS", 4)
    refuses("a.jsonl:4: ", check_rows, path)


def test_rows_that_are_left_out_are_told(tmp_path, word_tokenizer, caplog, monkeypatch):
    """KTO: the rows that are labeled bad are not learned, and counted."""
    monkeypatch.setattr("llmdistill.messages.logger.propagate", True)
    rows = [{"instruction": str(number), "output": "x", "label": number % 2 == 0} for number in range(10)]
    path = write(tmp_path / "kto.jsonl", *rows)
    assert names(path) == ["0", "2", "4", "6", "8"]
    assert "kto.jsonl: 5 examples. Left out: 5 rows (label is false)." in caplog.text
    stored = store_examples(path, word_tokenizer(), Limits(), cache_dir=tmp_path)
    meta = json.loads((stored / "meta.json").read_text())
    assert (meta["counts"][0], meta["left_out"]) == (5, {"{} rows (label is false)": 5})
    write(path, *[{**row, "label": False} for row in rows])
    for read in (read_examples, check_rows):
        refuses("holds no example to learn; left out: 10 rows (label is false)", read, path)


@pytest.mark.parametrize(("name", "content", "kind"), [
    ("a.jsonl", '{"text": "Once"}\n', "text"),
    ("a.csv", "text\nOnce\n", "text"),
    ("a.json", '[{"text": "Once"}]', "text"),
    ("a.jsonl", '{"instruction": "Say", "output": "Once", "text": "Once"}\n', "instructions"),
    ("a.jsonl", '{"text": \n', "instructions"),  # what is wrong with it is said where it is read
    ("a.csv", "Text,Id\nOnce,1\n", "text"),
    ("a.jsonl", '{"Instruction": "Say", "Output": "Once", "Text": "Once"}\n', "instructions"),
    ("a.txt", "Once", "text"),
])  # fmt: skip
def test_the_kind_of_a_file_is_that_of_its_first_row(tmp_path, name, content, kind):
    (tmp_path / name).write_text(content)
    assert kind_of(tmp_path / name) == kind
    assert kind_of(f"{tmp_path / name}=2,{tmp_path}/other.txt=1") == kind
