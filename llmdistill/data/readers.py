"""Reads the rows of one file: JSONL, JSON, Parquet, CSV and TSV, piece by piece and each with its place.

A row, a line or a cell of more than MOST_BYTES is refused before more of it is read.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from llmdistill.errors import UserError
from llmdistill.files import byte_size, parse_json
from llmdistill.fingerprints import file_sha256

Rows = Iterator[tuple[dict[str, Any], str]]
"""Each row with its place: ``file:line``, ``file: item N`` or ``file: row N``, from 1."""

MOST_BYTES = 10_000_000
"""Of a row, a line or a cell: more than a book has. To tokenize so much takes some 2 GB of memory."""
_MOST_BYTES_OF_JSON = 2_000_000_000
"""Of a JSON file, which is read as a whole."""
_PIECE_BYTES = 32_000_000
"""Bytes of the rows of Parquet that are unpacked together."""
_PIECE_ROWS = 1000
_MOST_COMPRESSION = 200
"""How many times smaller than its rows a row group of Parquet may be: texts are compressed to a third or a tenth."""
_MOST_BYTES_OF_PAGES = 256_000_000
"""A row group up to this size may be compressed more."""
_A_LINE = "write one object a line"


def by_lower_case(names: Iterable[str]) -> dict[str, str]:
    """Return a mapping from each name in lower case to the name, as `with_names` takes it."""
    return {name.lower(): name for name in names}


def with_names(row: Mapping[str, Any], names: Mapping[str, str], place: str) -> Mapping[str, Any]:
    """Return a row in which each column that differs from a name in its case alone has this name.

    `names` are those of `by_lower_case`. A column that has exactly the name takes precedence, and spaces around a
    column's name do not matter.

    Raises:
        UserError: several columns match one name.
    """
    if all(names.get(key) == key for key in row):
        return row
    named: dict[Any, str] = {}
    for key in row:
        name = names.get(key.strip().lower(), key) if isinstance(key, str) else key
        if name == key or name in row:
            continue
        if name in named.values():
            twice = " and ".join(f'"{other}"' for other in row if named.get(other) == name or other == key)
            raise UserError(f'{place}: the keys {twice} differ in their case alone; call the one to read "{name}"')
        named[key] = name
    return {named.get(key, key): value for key, value in row.items()} if named else row


def text_lines(path: Path, *, newline: str | None = None) -> Iterator[str]:
    """Yield the lines of a text file, with their ends.

    Only newlines end a line; str.splitlines would also split at separators inside strings. `newline` is that of `open`.

    Raises:
        UserError: it cannot be read, is not UTF-8, or has a line of more than MOST_BYTES.
    """
    try:
        # utf-8-sig, because Excel and others on Windows write a byte order mark.
        with path.open(encoding="utf-8-sig", newline=newline) as lines:
            # A limit for readline, so that a file without line ends is not read as a whole.
            for number, line in enumerate(iter(partial(lines.readline, MOST_BYTES + 2), ""), start=1):
                # A character has at most 4 bytes, so most lines need not be encoded; + 1, because the line break is not
                # counted.
                if len(line) * 4 > MOST_BYTES and len(line.encode()) > MOST_BYTES + 1:
                    raise size_error(f"{path}:{number}", "a line")
                yield line
    except (OSError, UnicodeDecodeError) as error:
        raise read_error(path, "UTF-8 text", error) from error


def size_error(place: str, what: str) -> UserError:
    return UserError(
        f"{place}: {what} of more than {byte_size(MOST_BYTES)}, which no model learns as one; cut it into several rows"
    )


def content_sha256(path: Path) -> str:
    try:
        return file_sha256(path)
    except OSError as error:
        raise read_error(path, "UTF-8 text", error) from error


_NOT_TEXT = {
    **dict.fromkeys((".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".tgz", ".7z"), "is compressed; unpack it"),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "is a spreadsheet; save it as CSV"),
    **dict.fromkeys((".arrow", ".feather"), "is an Arrow file; give the folder that datasets saved, or write Parquet"),
}
"""Endings of files that people give as data and that are not read, with the remedy."""


def read_error(path: Path, kind: str, error: Exception) -> UserError:
    """Return the error for a file that is not readable as text or as a table; it names the first line not in UTF-8."""
    if not isinstance(error, UnicodeDecodeError) or not path.is_file():
        return UserError(f"{path}: cannot be read as {kind} ({first_line(error)}); give a readable file")
    if (remedy := _NOT_TEXT.get(path.suffix.lower())) is not None:
        return UserError(f"{path} {remedy}")
    where = ""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                where = f":{number}"
                break
    return UserError(f"{path}{where}: cannot be read as {kind} ({error.reason}); save it as UTF-8")


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def read_jsonl(path: Path) -> Rows:
    for number, line in enumerate(text_lines(path), start=1):
        if not line.strip():
            continue
        source = f"{path}:{number}"
        try:
            row = parse_json(line)
        except json.JSONDecodeError as error:
            where = f"{error.msg} at column {error.colno}"
            remedy = _A_LINE if path.suffix.lower() != ".txt" else "a plain text is read with --data.kind text"
            raise UserError(f"{source}: not JSON ({where}); {remedy}") from error
        if not isinstance(row, dict):
            raise UserError(f"{source}: a {type(row).__name__}, not an object; {_A_LINE}")
        yield row, source


def _read_json(path: Path) -> Rows:
    """Read an array of rows, an object with one under "data", columns as pandas writes them, or JSONL."""
    size = path.stat().st_size
    if size > _MOST_BYTES_OF_JSON:
        raise UserError(f"{path}: {byte_size(size)} of JSON, which is read as a whole; write it as JSONL, row by row")
    try:
        value = parse_json(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise read_error(path, "UTF-8 text", error) from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # the file is JSONL with the ending .json
            yield from read_jsonl(path)
            return
        where = f"{path}:{error.lineno}"
        raise UserError(f"{where}: not JSON ({error.msg} at column {error.colno}); write one array") from error
    items = _join_columns(value) if isinstance(value, dict) else value
    if not isinstance(items, list):
        raise UserError(f'{path}: holds no array; give an array of objects, or an object with one under "data"')
    for number, item in enumerate(items, start=1):
        if not isinstance(item, dict):
            raise UserError(f"{path}: item {number}: a {type(item).__name__}, not an object; make it one")
        # A row of a smaller file cannot exceed the limit, and is not written out to be measured.
        if size > MOST_BYTES and len(json.dumps(item, ensure_ascii=False).encode()) > MOST_BYTES:
            raise size_error(f"{path}: item {number}", "a row")
        yield item, f"{path}: item {number}"


def _join_columns(value: dict[str, Any]) -> Any:
    """Return the rows of an object: under "data", numbered, or in columns as pandas and a dict of lists have them."""
    columns = list(value.values())
    are_dicts = bool(columns) and all(isinstance(column, dict) for column in columns)
    if "data" in value:
        names, items = value.get("columns"), value["data"]
        if isinstance(names, list) and isinstance(items, list):  # pandas' orient "split"
            are_rows = all(isinstance(item, list) and len(item) == len(names) for item in items)
            return [dict(zip(names, item, strict=True)) for item in items] if are_rows else items
        return items
    if are_dicts and all(map(str.isdecimal, value)):  # pandas' orient "index"
        return columns
    if are_dicts and all(column.keys() == columns[0].keys() for column in columns):  # pandas' to_json, by row in each
        return [{name: column[label] for name, column in value.items()} for label in columns[0]]
    # One list of objects may be a chat that somebody wrote as a whole file.
    if len(columns) > 1 and all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        return [dict(zip(value, cells, strict=True)) for cells in zip(*columns, strict=True)]
    return None


def _read_csv(path: Path) -> Rows:
    """Read CSV as Python's csv module does, every value as text, "007", "NA" and "None" too; an empty one is missing.

    Cells may be quoted, and have line breaks in them. The place is that of the row's first line.
    """
    # The limit is the whole process's, and other code may have raised it.
    csv.field_size_limit(max(csv.field_size_limit(), MOST_BYTES))
    # The csv module needs the line ends as they are, because a quoted cell may hold them.
    lines = text_lines(path, newline="")
    header = next(lines, "")
    declared = re.fullmatch(r"sep=(.)\s*", header, re.IGNORECASE)  # a line for Excel before the header
    above = 0 if declared is None else 1
    header = header if declared is None else next(lines, "")
    # Excel writes semicolons wherever numbers have a decimal comma. A name of a column has none of these.
    separator = "," if "," in header else max(",;\t", key=header.count)
    separator = separator if declared is None else declared[1]
    reader = csv.reader(chain([header], lines), delimiter=separator, strict=True)

    def records() -> Iterator[tuple[list[str], int]]:
        while True:
            first = above + reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if "field larger" in str(error):
                    raise size_error(f"{path}:{first}", "a cell") from error
                raise UserError(
                    f"{path}:{first}: not CSV ({error}); quote a cell as a whole, and double the quotes in it"
                ) from error
            if any(cell.strip() for cell in cells):
                yield cells, first

    return _name_cells(path, records())


def _read_tsv(path: Path) -> Rows:
    """Read cells between tabs, which are not quoted; but a row that says that it is quoted is read as pandas does.

    pandas quotes a cell only where it holds a tab, a line break, or a quote, which is then doubled.
    """
    csv.field_size_limit(max(csv.field_size_limit(), MOST_BYTES))
    # Only \n ends a line here, so that a \r within a cell stays.
    lines = enumerate(text_lines(path, newline="\n"), start=1)
    ahead: list[tuple[int, str]] = []
    """Numbered lines that were read too early, to see whether a quoted cell goes on in them."""

    def records() -> Iterator[tuple[list[str], int]]:
        width = 0
        while True:
            number, line = ahead.pop(0) if ahead else next(lines, (0, ""))
            if not line:
                return
            if not line.strip():
                continue
            cells = line.rstrip("\r\n").split("\t")
            width = width or len(cells)
            # A last cell whose quote does not close goes on in the next line, unless that line is a row itself.
            is_open = cells[-1].startswith('"') and cells[-1].count('"') % 2 == 1
            if is_open and len(cells) == width:
                if not ahead:
                    ahead.extend(islice(lines, 1))
                is_open = bool(ahead) and ahead[0][1].count("\t") != width - 1
            has_doubled = '""' in line and any(cell.startswith('"') and '""' in cell[1:-1] for cell in cells)
            if '"' in line and (len(cells) != width or is_open or has_doubled):
                cells = quoted(line, cells, width)
            yield cells, number

    def quoted(line: str, cells: list[str], width: int) -> list[str]:
        """Return the cells of a row that begins with a line, and may go on; `cells` if this is no quoted row."""
        read: list[tuple[int, str]] = []

        def following() -> Iterator[str]:
            while following_line := (ahead.pop(0) if ahead else next(lines, None)):
                read.append(following_line)
                yield following_line[1]

        try:
            quoted_cells = next(csv.reader(chain([line], following()), delimiter="\t", strict=True), [])
        except csv.Error:
            quoted_cells = []
        if len(quoted_cells) == width:
            return quoted_cells
        ahead[:0] = read
        return cells

    return _name_cells(path, records())


def _name_cells(path: Path, records: Iterator[tuple[list[str], int]]) -> Rows:
    """Name the cells of each record by the first one. A first name that is empty is the index of pandas, and left out.

    Raises:
        UserError: two columns have one name or a further one has none, or a row has more or fewer cells.
    """
    header, line = next(records, ([], 1))
    names = dict.fromkeys(header)
    if len(names) < len(header) or "" in header[1:]:
        twice = next(name for name in header if not name or header.count(name) > 1)
        raise UserError(
            f"{path}:{line}: {f'two columns are called {twice!r}' if twice else 'a column has no name'}; give each its "
            "own"
        )
    start = 1 if header[:1] == [""] else 0
    for cells, line in records:
        if len(cells) != len(header):
            raise UserError(
                f"{path}:{line}: {len(cells)} cells, but the header has {len(header)}; quote a cell that has a "
                "separator or a line break in it"
            )
        pairs = zip(header[start:], cells[start:], strict=True)
        yield {name: cell or None for name, cell in pairs}, f"{path}:{line}"


def read_benchmark_tsv(path: Path, *, header: Sequence[str] | None = None) -> Rows:
    """Yield the rows of a benchmark's table with tabs between its cells and no quoting; each place is file:line.

    The first line is the header unless one is given. A row may lack its last cells. The csv loader of `datasets` reads
    the same rows with quoting off, but copies them to the disk and tells no line.
    """
    lines = text_lines(path, newline="\n")
    first = 1 if header else 2
    header = header or next(lines, "").rstrip("\r\n").split("\t")
    for number, line in enumerate(lines, start=first):
        if line.strip():
            cells = line.rstrip("\r\n").split("\t")
            yield dict(zip(header, cells, strict=False)), f"{path}:{number}"


def _read_parquet(path: Path) -> Rows:
    """Read Parquet in pieces that are small when they are unpacked: a few MB may hold many GB.

    The sizes of the row groups say how large a row is on average; columns of texts stay dictionaries, whose values are
    unpacked row by row.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        # The first time only for the schema: which columns are texts must be known to open the file by dictionaries.
        with pq.ParquetFile(path) as file:
            texts = [column_field.name for column_field in file.schema_arrow if pa.types.is_string(column_field.type)]
        number = 0
        # By default pyarrow buffers the pages of a whole row group before it unpacks the first.
        with pq.ParquetFile(path, read_dictionary=texts, pre_buffer=False, buffer_size=1 << 20) as file:
            for group in range(file.num_row_groups):
                metadata = file.metadata.row_group(group)
                rows = f"rows {number + 1} to {number + metadata.num_rows}"
                mean = metadata.total_byte_size / max(1, metadata.num_rows)
                if mean > MOST_BYTES:
                    raise size_error(f"{path}: {rows}", "an average row")
                packed = sum(metadata.column(place).total_compressed_size for place in range(metadata.num_columns))
                # pyarrow unpacks a page of up to 2 GB as a whole, and a page may have a thousand rows.
                if metadata.total_byte_size > max(_MOST_COMPRESSION * packed, _MOST_BYTES_OF_PAGES):
                    raise UserError(
                        f"{path}: {rows} unpack from {byte_size(packed)} to {byte_size(metadata.total_byte_size)}, as "
                        "no text does; write the rows without what is repeated"
                    )
                size = max(1, min(_PIECE_ROWS, int(_PIECE_BYTES / max(1, mean))))
                for batch in file.iter_batches(batch_size=size, row_groups=[group]):
                    unpacked = batch.nbytes + sum(
                        pc.sum(pc.take(pc.binary_length(column.dictionary), column.indices)).as_py() or 0
                        for column in batch.columns
                        if pa.types.is_dictionary(column.type)
                    )
                    # Many rows may share one large value of a dictionary, so a batch is cut once more by its unpacked
                    # size.
                    step = max(1, min(len(batch), int(len(batch) * _PIECE_BYTES / max(1, unpacked))))
                    for row in chain.from_iterable(
                        batch.slice(start, step).to_pylist() for start in range(0, len(batch), step)
                    ):
                        number += 1
                        source = f"{path}: row {number}"
                        cells = row.values() if unpacked > MOST_BYTES else ()
                        texts_of_row = (
                            cell if isinstance(cell, str) else json.dumps(cell, default=str) for cell in cells
                        )
                        if sum(map(len, texts_of_row)) > MOST_BYTES:
                            raise size_error(source, "a row")
                        yield without_nulls(row), source
    except UserError:
        raise
    except Exception as error:  # pyarrow passes on exceptions of many kinds
        raise read_error(path, "Parquet", error) from error


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table without the nulls inside of its values.

    A table gives all objects of a column the same keys, and null to those that a row lacks, so that the parameters of
    one tool have the names of all tools.
    """
    return {key: _drop_nulls(value) if isinstance(value, list | dict) else value for key, value in row.items()}


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_nulls(element) for key, element in value.items() if element is not None}
    return [_drop_nulls(element) for element in value] if isinstance(value, list) else value


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
}
"""The readers by the ending of a file."""
