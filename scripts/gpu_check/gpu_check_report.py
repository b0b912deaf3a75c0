"""The results of gpu_check: JSON, and a page with one table."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import torch
from benching_table import Line, finite

from llmdistill.files import write_json
from llmdistill.report.pages import markdown, write_page
from llmdistill.report.record import make_record
from llmdistill.report.tables import TitledTable

LIBRARIES = ("torch", "triton", "deepspeed", "transformers", "trl")

State = Literal["ok", "failed", "out of time", "left out"]


@dataclass
class Result:
    """What a part has found."""

    state: State
    about: str
    why: str = ""
    """Why it was left out or failed."""
    seconds: float = 0.0
    lines: list[Line] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    log: str = ""
    """The end of its output, if it failed."""

    @property
    def failed(self) -> bool:
        return self.state in ("failed", "out of time")


def holds(line: Line) -> bool:
    """Whether a figure keeps its limit; NaN keeps none."""
    return line.target is None or line.verdict(quick=False) == "ok"


class Report:
    """The results so far, written after each part."""

    def __init__(self, folder: Path, command: str, device: str, ranks: int, order: Sequence[str]) -> None:
        """`order` is that of the parts in the files."""
        self._folder, self._command, self._device, self._ranks = folder, command, device, ranks
        self._order = order
        self._began, self._lock = time.monotonic(), Lock()
        self.results: dict[str, Result] = {}

    def add(self, name: str, result: Result) -> None:
        with self._lock:
            self.results[name] = result
            print(f"{result.state:<12} {name:<14} {result.seconds:5.0f} s  {result.why}".rstrip(), flush=True)
            for text in result.left_out:
                print(f"{'':12} left out: {text}", flush=True)
            for line in (each for each in result.lines if not holds(each)):
                print(f"{'':12} {line.measure}: {line.value:.3g}, limit {line.target:.3g}; {line.detail}", flush=True)
            self.write()

    def write(self) -> None:
        record = make_record(self._command, self._ranks, LIBRARIES)
        about = {"device": self._device, "cuda": torch.version.cuda, "seconds": time.monotonic() - self._began}
        parts = {name: _as_json(self.results[name]) for name in self._order if name in self.results}
        failed = {name: result for name, result in self.results.items() if result.failed}
        write_json(self._folder / "gpu_check.json", finite({**record, **about, "parts": parts}))
        table = self._table()
        write_page(
            self._folder / "gpu_check.md",
            "page.md.j2",
            title=table.title,
            table=table,
            legend=self._legend(),
            warnings=[markdown(f"{name}: {result.state}: {result.why}") for name, result in failed.items()],
            record=record,
        )

    def _table(self) -> TitledTable:
        title = "A check on a GPU" if self._device == "cuda" else "A small check on a CPU"
        rows = []
        for name in (each for each in self._order if each in self.results):
            result = self.results[name]
            for line in result.lines:
                limit = "" if line.target is None else f"{'≥' if line.at_least else '≤'} {line.target:.3g}"
                verdict = "" if line.target is None else "ok" if holds(line) else "**no**"
                value = "–" if math.isnan(line.value) else f"{line.value:.3g}"
                rows.append([name, markdown(line.measure), value + line.unit, limit, verdict, markdown(line.detail)])
            texts = [result.why] if result.state == "left out" else []
            rows += [[name, markdown(f"left out: {text}"), "–", "", "", ""] for text in texts + result.left_out]
        return TitledTable(title, ["part", "measure", "value", "limit", "kept", "detail"], rows)

    def _legend(self) -> str:
        done = [f"{name} ({result.about}): {result.state}" for name, result in self.results.items()]
        where = "" if self._device == "cuda" else " There is no GPU here, so nothing in it is about one."
        return markdown(f"{'; '.join(done)}.{where}")


def _as_json(result: Result) -> dict[str, Any]:
    values = asdict(result)
    values["lines"] = [{**asdict(line), "holds": holds(line)} for line in result.lines]
    return values
