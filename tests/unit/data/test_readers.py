import csv
import gzip
import io
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hostile import refuses

from llmdistill.data import readers
from llmdistill.data.readers import READERS, text_lines
from llmdistill.data.sources import read_examples


def read(path: Path) -> list[dict[str, Any]]:
    return [row for row, _ in READERS[path.suffix](path)]


def as_pandas(path: Path, separator: str) -> list[dict[str, Any]]:
    table = pd.read_csv(path, sep=separator, dtype=str, keep_default_na=False)
    table = table.drop(columns=[name for name in table.columns if name == "Unnamed: 0"])
    return [{key: value or None for key, value in row.items()} for row in table.to_dict("records")]


TABLE = pd.DataFrame(
    {
        "instruction": ["plain", "two\nlines", "a, comma\tand a tab", 'say "hi"', "007", "NA", ' "mid" dle'],
        "input": ["", "x", "", "1.50", "None", "", "\n"],
        "output": ["a", 'b\n\n"c"', "d", '"', "e", "Ünï — 漢字", "last\n"],
    }
)


class TestTablesOfText:
    @pytest.mark.parametrize("index", [True, False])
    @pytest.mark.parametrize(("ending", "separator"), [("csv", ","), ("csv", ";"), ("csv", "\t"), ("tsv", "\t")])
    @pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
    def test_a_table_of_pandas(self, tmp_path, ending, separator, index, encoding):
        path = tmp_path / f"a.{ending}"
        TABLE.to_csv(path, sep=separator, index=index, encoding=encoding)
        assert read(path) == as_pandas(path, separator)
        assert [row["instruction"] for row in read(path)] == list(TABLE["instruction"])

    @pytest.mark.parametrize("ends", ["\n", "\r\n"])
    def test_csv_as_the_csv_module_writes_it(self, tmp_path, ends):
        rng = np.random.default_rng(0)
        cells = ["", "a", '"', ",", "a\nb", "a\r\nb", " ", "'", '""', 'x, "y"\n']
        rows = [
            {"instruction": "i", "output": str(rng.choice(cells)), "note": str(rng.choice(cells))} for _ in range(200)
        ]
        written = io.StringIO(newline="")
        writer = csv.DictWriter(written, ["instruction", "output", "note"], lineterminator=ends)
        writer.writeheader()
        writer.writerows(rows)
        (tmp_path / "a.csv").write_bytes(written.getvalue().encode())
        assert read(tmp_path / "a.csv") == [{key: value or None for key, value in row.items()} for row in rows]

    @pytest.mark.parametrize(("ending", "comma"), [("csv", ","), ("tsv", "\t")])
    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("instruction,output\nName a river,in Europe,The Rhine", ":2: 3 cells, but the header has 2; quote a"),
            ("instruction,output\na,b\n\nc\n", ":4: 1 cells, but the header has 2"),
            (',instruction,output\n0,a,b\n1,c\n', ":3: 2 cells, but the header has 3"),
            ("instruction,output,output\na,b,c\n", ":1: two columns are called 'output'; give each its own"),
            ("instruction,,output\na,b,c\n", ":1: a column has no name; give each its own"),
            ('instruction,output\n"a\nb",c\nd\n', ":4: 1 cells, but the header has 2"),
            ('instruction,output\na,b\nc,"d\n', "a.csv:3: not CSV (unexpected end of data)"),
            ('instruction,output\n"a"b,c\n', "a.csv:2: not CSV (',' expected after '\"'); quote a cell as a whole"),
        ],
    )  # fmt: skip
    def test_a_row_that_does_not_fit_is_refused(self, tmp_path, ending, comma, text, said):
        if "not CSV" in said and ending == "tsv":
            pytest.skip("cells of TSV are not quoted")
        path = tmp_path / f"a.{ending}"
        path.write_text(text.replace(",", comma), encoding="utf-8")
        refuses(said, read_examples, path)

    def test_a_semicolon_in_the_name_of_a_column_separates_nothing(self, tmp_path):
        (tmp_path / "a.csv").write_text("instruction,output,a;b;c\nx;y,z,w\n", encoding="utf-8")
        assert read(tmp_path / "a.csv") == [{"instruction": "x;y", "output": "z", "a;b;c": "w"}]

    @pytest.mark.parametrize("separator", [";", "|"])
    def test_a_separator_that_is_declared_for_excel(self, tmp_path, separator):
        text = f"instruction{separator}output\r\na, b{separator}c\r\n"
        plain, declared = tmp_path / "plain.csv", tmp_path / "a.csv"
        plain.write_text(text, encoding="utf-8", newline="")
        declared.write_text(f"sep={separator}\r\n{text}", encoding="utf-8", newline="")
        assert read(declared) == as_pandas(plain, separator) == [{"instruction": "a, b", "output": "c"}]
        assert [place for _, place in READERS[".csv"](declared)] == [f"{declared}:3"]

    def test_a_quote_in_a_tsv_that_is_not_quoted(self, tmp_path):
        path = tmp_path / "a.tsv"
        path.write_text('a\tb\n"x\ty\n\nz\t"w" v\nq\t"open\n\n"\t""\n"r"\ts\n', encoding="utf-8")
        found = [tuple(row.values()) for row in read(path)]
        assert found == [('"x', "y"), ("z", '"w" v'), ("q", '"open'), ('"', '""'), ('"r"', "s")]


@pytest.mark.parametrize(
    ("ending", "said"), [("gz", "is compressed"), ("xlsx", "is a spreadsheet"), ("arrow", "is an")]
)
def test_a_file_that_is_no_text_is_named_with_its_remedy(tmp_path, ending, said):
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(gzip.compress(b'{"instruction": "a", "output": "b"}\n'))
    refuses(f"{path} {said}", read_examples, path)


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_a_pointer_of_git_lfs_is_no_set(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    refuses(f"{path}: it is a pointer of Git LFS", read_examples, path)


class TestWhatIsTooLarge:
    """No honest row is so large; what is refused is not read to its end."""

    @pytest.fixture(autouse=True)
    def small(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        before = csv.field_size_limit(1000)
        monkeypatch.setattr(readers, "MOST_BYTES", 1000)
        yield
        csv.field_size_limit(before)

    @pytest.mark.parametrize("letter", ["a", "漢"])
    @pytest.mark.parametrize("ending", ["jsonl", "csv", "tsv", "json", "txt"])
    def test_a_row(self, tmp_path, ending, letter):
        path = tmp_path / f"a.{ending}"

        def write(size: int) -> None:
            big = letter * (size // len(letter.encode()))
            rows = [{"instruction": "a", "output": each} for each in ("b", big, "c")]
            if ending in ("csv", "tsv"):
                pd.DataFrame(rows).to_csv(path, index=False, sep="," if ending == "csv" else "\t")
            else:
                dumped = [json.dumps(row, ensure_ascii=False) for row in rows]
                path.write_text(f"[{','.join(dumped)}]" if ending == "json" else "\n".join(dumped), encoding="utf-8")

        def count() -> int:
            return len(list(text_lines(path) if ending == "txt" else READERS[path.suffix](path)))

        write(900)
        assert count() == 3
        write(1100)
        place = {"csv": ":3: a line", "tsv": ":3: a line", "json": ": item 2: a row"}.get(ending, ":2: a line")
        refuses(f"a.{ending}{place} of more than 1.0 kB, which no model learns", count)

    def test_a_cell_of_many_lines(self, tmp_path):
        path = tmp_path / "a.csv"
        pd.DataFrame({"instruction": ["a", "b\n" * 800], "output": ["c", "d"]}).to_csv(path, index=False)
        refuses("a.csv:3: a cell of more than 1.0 kB", read, path)

    def test_a_row_of_parquet(self, tmp_path):
        path = tmp_path / "a.parquet"
        for outputs, said in (
            (["a"] * 9 + ["b" * 1100], "a.parquet: row 10: a row of more than 1.0 kB"),
            ([["a"]] * 9 + [["b"] * 1100], "a.parquet: row 10: a row of more than 1.0 kB"),
            (["b" * 1100] * 10, "a.parquet: rows 1 to 10: an average row of more than 1.0 kB"),
        ):
            table = pa.table({"instruction": ["a"] * 10, "output": outputs})
            pq.write_table(table, path, use_dictionary=False)
            refuses(said, read, path)
        pq.write_table(pa.table({"instruction": ["a"] * 10, "output": ["b" * 900] * 10}), path)
        assert len(read(path)) == 10


def test_a_parquet_that_unpacks_to_much_is_read_in_pieces_or_refused(tmp_path, monkeypatch):
    """A file of some kB holds 200 MB of text, and a reader has a small part of it at a time."""
    path, text = tmp_path / "a.parquet", pa.array(["a" * 1_000_000])
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 200, pa.int32()), text)
    pq.write_table(pa.table({"instruction": ["x"] * 200, "output": column}), path)
    assert path.stat().st_size < 1_000_000
    allocated, most, total = pa.total_allocated_bytes(), 0, 0
    tracemalloc.start()
    for row, _ in READERS[".parquet"](path):
        total += len(row["output"])
        most = max(most, pa.total_allocated_bytes() - allocated)
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 200_000_000
    assert max(most, python) < 100_000_000
    monkeypatch.setattr(readers, "_MOST_BYTES_OF_PAGES", 20_000_000)
    few = column[:30].cast(pa.string())
    pq.write_table(pa.table({"output": few}), path, compression="zstd", use_dictionary=False)
    refuses("a.parquet: rows 1 to 30 unpack from", read, path)


def test_parquet_gives_each_object_its_own_keys_alone(tmp_path):
    rows = [
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "thinking": "c"}],
            "n": None,
        },
        {"messages": [{"role": "user", "content": "a", "name": "d"}], "n": [{"x": {"p": 1}}, {"y": {"q": [{"z": 2}]}}]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == rows


@pytest.mark.parametrize("orient", ["columns", "index", "split", "records", "table", "list"])
def test_json_of_pandas_gives_its_rows(tmp_path, orient):
    frame = pd.DataFrame({"prompt": ["a", "b", "ü"], "completion": ["x", None, "z"]}, index=[4, 7, 2], dtype=object)
    file = tmp_path / "a.json"
    if orient == "list":
        file.write_text(json.dumps(frame.to_dict("list")))
    else:
        frame.to_json(file, orient=orient)
    rows = [{name: row[name] for name in frame} for row in read(file)]
    assert rows == frame.to_dict("records")


def test_a_chat_as_a_whole_file_is_no_set_of_columns(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "a.json").write_text(json.dumps({"messages": turns}))
    refuses("holds no array", read, tmp_path / "a.json")
