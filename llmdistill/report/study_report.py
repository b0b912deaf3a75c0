"""What every study ends with: its results as JSON, its pages with plots, and its table on the terminal."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from llmdistill.files import write_json
from llmdistill.messages import print_result
from llmdistill.report.drawings import save_drawings
from llmdistill.report.pages import write_page
from llmdistill.report.plots import Drawing, save_plot
from llmdistill.report.tables import TitledTable, print_table


@dataclass(frozen=True, kw_only=True)
class StudyReport:
    folder: Path
    results: Mapping[str, Any]
    """The content of results.json, as plain JSON values."""
    file: str = "results.json"
    further: Mapping[str, Any] = field(default_factory=dict)
    """The content of further JSON files by name."""
    template: str | None
    """The template of the pages, without its kind; None for no page."""
    kinds: Sequence[str] = ("md",)
    values: Mapping[str, Any] = field(default_factory=dict)
    """The variables of the template, beside `folder` and `plots`."""
    drawings: Sequence[Drawing] = ()
    plots: str | None = "plots"
    """The folder of the drawings inside that of the report, which has no others; None to save them beside the report,
    where there may be others."""
    table: TitledTable
    left: Collection[int] = (0,)
    transposed: bool = False
    """As of `print_table`, like `left`."""
    notes: Sequence[Text] = ()
    """What the terminal shows below the table."""
    closing: str
    """The last line on the terminal, which says where the report is."""
    failed: bool = False
    """Whether a run failed."""

    def write(self) -> dict[str, Any]:
        """Write all files, and return the results."""
        for name, content in {self.file: self.results, **self.further}.items():
            write_json(self.folder / name, content)
        plots = []
        if self.plots is not None:
            plots = save_drawings(self.folder / self.plots, self.drawings)
        else:
            for drawing in self.drawings:
                save_plot(drawing.figure, self.folder, drawing.name)
        for kind in self.kinds if self.template is not None else ():
            page = self.folder / f"report.{kind}"
            write_page(page, f"{self.template}.{kind}.j2", **{"plots": plots, "folder": self.folder, **self.values})
        return dict(self.results)

    def print(self, console: Console | None = None) -> None:
        terminal = console or Console()
        print_table(*self.table, left=self.left, transposed=self.transposed, console=terminal)
        for note in self.notes:
            terminal.print(note)
        print_result(self.closing)
