"""Scores over seeds as numbers and as text, and tables on the terminal."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table


class Spread(NamedTuple):
    """Mean and sample standard deviation over seeds."""

    mean: float
    std: float | None
    """None for one seed, which has no standard deviation."""
    values: list[float]

    def to_dict(self) -> dict[str, float | None]:
        return {"mean": self.mean, "std": self.std}


def spread(values: Sequence[float]) -> Spread:
    std = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), std, list(values))


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean, the standard deviation and the value of each seed as plain JSON values."""
    return {**spread(values).to_dict(), "seeds": list(values)}


def show_seeds(value: Mapping[str, Any], decimals: int = 1) -> str:
    """Format a result of `over_seeds`: the mean, with the standard deviation if there are several seeds."""
    mean, std = value["mean"], value["std"]
    return f"{mean:.{decimals}f}" + ("" if std is None else f" ± {std:.{decimals}f}")


def count_seeds(count: int) -> str:
    """Return what a table's scores are, for its title."""
    return f"mean ± standard deviation over {count} seeds" if count > 1 else "one seed"


class TitledTable(NamedTuple):
    title: str
    header: list[str]
    rows: list[list[str]]


def print_table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Collection[int] = (0,),
    transposed: bool = False,
    console: Console | None = None,
) -> None:
    """Print a table, `left` its left-aligned columns; `transposed`: rows become columns on a narrow terminal."""
    terminal = console or Console()
    if transposed and _total_width(header, rows) > terminal.width:
        header, *rows = [list(line) for line in zip(header, *rows, strict=True)]
    # Two characters between columns, as _width counts.
    table = Table(title=title, title_justify="left", box=box.HORIZONTALS, pad_edge=False, padding=(0, 1, 0, 0))
    widths = _column_widths(header, rows)
    if (
        _total_width(header, rows)
        <= terminal.width
        < sum(2 + max(*pair) for pair in zip(widths, map(len, header), strict=True))
    ):
        # rich would cut cells and words instead.
        header = [textwrap.fill(name, width) for name, width in zip(header, widths, strict=True)]
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number in left else "right", no_wrap=number == 0 and not transposed)
    for row in rows:
        table.add_row(*row)
    terminal.print(table)


def _total_width(header: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return the width of a table, in characters, at which only the header wraps, and only at spaces."""
    return sum(2 + width for width in _column_widths(header, rows))


def _column_widths(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    columns = ([*name.split(), *column] for name, *column in zip(header, *rows, strict=True))
    return [max(map(len, column), default=0) for column in columns]
