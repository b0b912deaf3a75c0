"""Prints a table on the terminal; text columns are left-aligned, numbers right-aligned."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

Texts = tuple[list[str], list[list[str]]]
"""The header and the rows of a table; each row has one text per column."""


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
    table = Table(title=title, title_justify="left", box=box.HORIZONTALS, pad_edge=False)
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number in left else "right", no_wrap=number == 0 and not turned)
    for row in rows:
        table.add_row(*row)
    terminal.print(table)


def _width(header: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return the width of a table, in characters, at which only the header wraps, and only at spaces."""
    columns = [[*name.split(), *column] for name, *column in zip(header, *rows, strict=True)]
    return sum(2 + max(map(len, column)) for column in columns)
