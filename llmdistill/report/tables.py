"""Prints a table on the terminal; text columns are left-aligned, numbers right-aligned."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table


class TitledTable(NamedTuple):
    """A table as texts."""

    title: str
    header: list[str]
    rows: list[list[str]]
    """Each row has one text per column."""


def print_table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[int] = (0,),
    turned: bool = False,
    console: Console | None = None,
) -> None:
    """Print a table on the terminal.

    `left` are the indices of the left-aligned columns; `turned`: rows become columns if the terminal is too narrow.
    """
    terminal = console or Console()
    if turned and _width(header, rows) > terminal.width:
        header, *rows = [list(line) for line in zip(header, *rows, strict=True)]
    # Two characters between columns, as _width counts.
    table = Table(title=title, title_justify="left", box=box.HORIZONTALS, pad_edge=False, padding=(0, 1, 0, 0))
    widths = _widths(header, rows)
    if (
        _width(header, rows)
        <= terminal.width
        < sum(2 + max(*pair) for pair in zip(widths, map(len, header), strict=True))
    ):
        # rich would cut cells and words instead.
        header = [textwrap.fill(name, width) for name, width in zip(header, widths, strict=True)]
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number in left else "right", no_wrap=number == 0 and not turned)
    for row in rows:
        table.add_row(*row)
    terminal.print(table)


def _width(header: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return the width of a table, in characters, at which only the header wraps, and only at spaces."""
    return sum(2 + width for width in _widths(header, rows))


def _widths(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    columns = ([*name.split(), *column] for name, *column in zip(header, *rows, strict=True))
    return [max(map(len, column), default=0) for column in columns]
