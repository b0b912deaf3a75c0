"""Data in memory: rows, texts and chats in lists, and the tables of pandas and other libraries."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

from llmdistill.data.readers import by_lower_case, with_names, without_nulls
from llmdistill.data.rows import FORMAT_KEYS
from llmdistill.errors import UserError


def rows_in_memory(data: object, name: str = "data") -> Iterator[Any]:
    """Yield the rows of data in memory: dicts, or texts.

    Data are a list or another sequence of rows, texts or chats (lists of messages), a datasets.Dataset or
    IterableDataset, a dict of columns, a table of pandas, polars or pyarrow, or an object that can be iterated more
    than once. `name` is that of the data in messages.

    Raises:
        UserError: it is anything else.
    """
    # The library is known by its name, so that none is imported.
    library, kind = type(data).__module__.partition(".")[0], type(data).__name__
    if isinstance(data, Mapping) and library == "datasets":
        raise UserError(f"{name} is a {kind} of the splits {', '.join(map(str, data))}; give one of them")
    if isinstance(data, Mapping):
        rows = _rows_of_columns(data, name)
    elif library == "pandas" and hasattr(data, "itertuples"):
        if not data.columns.is_unique:  # type: ignore[attr-defined]
            raise UserError(f"{name} is a DataFrame with two columns of one name; give each its own")
        rows = _rows_of_columns({str(column): data[column].tolist() for column in data.columns}, name)  # type: ignore[index, attr-defined]
    elif library == "polars" and hasattr(data, "iter_rows"):
        rows = map(without_nulls, data.iter_rows(named=True))
    elif library == "pyarrow" and hasattr(data, "to_batches"):
        rows = (without_nulls(row) for batch in data.to_batches(1000) for row in batch.to_pylist())
    elif library == "pyarrow" and hasattr(data, "to_pylist"):
        rows = (without_nulls(row) if isinstance(row, dict) else row for row in data.to_pylist())
    elif library in ("pandas", "polars") and hasattr(data, "to_list"):
        rows = iter(data.to_list())
    elif library == "datasets" and hasattr(data, "__iter__"):
        rows = (without_nulls(_with_plain_cells(row)) for row in without_format(data))
    elif isinstance(data, Iterator):
        raise UserError(f"{name} is a {kind}, which can be read only once; give list({name})")
    elif isinstance(data, str | bytes | Set) or not hasattr(data, "__iter__"):
        raise UserError(
            f"{name} is a {kind}; give a list of rows, texts or chats, a datasets.Dataset, a pandas.DataFrame, or "
            "a dict of columns"
        )
    else:
        rows = map(_with_plain_cells, data)
    return (
        {"messages": list(row)}
        if isinstance(row, list | tuple) and row and all(isinstance(turn, Mapping) for turn in row)  # a chat
        else row
        for row in rows
    )


def without_format(data: Any) -> Iterable[Any]:
    """Return a set of the datasets library whose rows are Python's own values, whatever format it was given.

    A transform that the user set, which makes the rows, stays.
    """
    if getattr(data, "format", {}).get("type") == "custom":
        return data
    columns = {"columns": data.format["columns"]} if hasattr(data, "format") else {}
    return data.with_format(None, **columns)


def has_columns(data: object) -> bool:
    """Return whether a dict holds the columns of one set, not several sets or settings: it has a key of a row."""
    if not isinstance(data, Mapping):
        return False
    return not with_names(data, by_lower_case(FORMAT_KEYS), "data").keys().isdisjoint(FORMAT_KEYS)


def _rows_of_columns(columns: Mapping[str, Any], name: str) -> Iterator[dict[str, Any]]:
    lists = {key: column.tolist() if hasattr(column, "tolist") else column for key, column in columns.items()}
    if not lists:
        raise UserError(f"{name} is a table without columns; give at least one row of instruction, input, output")
    for key, column in lists.items():
        if not isinstance(column, list | tuple):
            raise UserError(
                f'{name} is a dict whose "{key}" is a {type(column).__name__}, not a column; give a list of rows, or '
                "a list for each key"
            )
    lengths = {key: len(column) for key, column in lists.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"{name} is a dict of columns of different lengths ({lengths}); give each as many values")
    return (
        {key: _to_plain(value) for key, value in zip(lists, row, strict=True)}
        for row in zip(*lists.values(), strict=True)
    )


def _with_plain_cells(row: Any) -> Any:
    """Return a row that may come from a table, such as one of `DataFrame.to_dict("records")`, with plain cells."""
    if not isinstance(row, Mapping):
        return row
    return {key: value if isinstance(value, str) else _to_plain(value, with_nulls=True) for key, value in row.items()}


def _to_plain(value: Any, *, with_nulls: bool = False) -> Any:
    """Return the cell of a table as Python's own value: lists for arrays, and None for what is missing.

    Objects of a table have all keys of their column, and null for those that they lack; without a table, nulls may be
    meant.
    """
    if hasattr(value, "tolist"):  # an array, or a number of numpy
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_to_plain(element, with_nulls=with_nulls) for element in value]
    if isinstance(value, dict):
        pairs = ((key, _to_plain(element, with_nulls=with_nulls)) for key, element in value.items())
        return {key: element for key, element in pairs if with_nulls or element is not None}
    # By name, so that pandas need not be imported.
    is_missing = (isinstance(value, float) and math.isnan(value)) or type(value).__name__ in ("NAType", "NaTType")
    return None if is_missing else value
