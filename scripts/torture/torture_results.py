"""What came of disturbed runs: what they leave is compared with what an undisturbed one does, and counted."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.testing import assert_close

from llmdistill.report.metrics_log import TOP_SHARED, WRITER_GAP


@dataclass
class Case:
    """A disturbed run, and what came of it."""

    number: int
    what: str
    wrong: list[str] = field(default_factory=list)
    struck: int = 0
    """How many faults have met it."""
    grace: float = 0.0
    """Seconds from the fault to the end of the last process."""
    counts: list[tuple[str, str]] = field(default_factory=list)
    """What is counted on the page: of which kind, and a value of it."""


class Outcome(NamedTuple):
    """What a section gives the page."""

    figures: list[tuple[str, str]]
    """Lines of the page: what, and how many."""
    failures: list[str]
    """Each begins with the options that repeat it."""


def counted(name: str, cases: Sequence[Case]) -> Outcome:
    """The outcome of a section's cases."""
    struck, survived = (sum(each.struck for each in cases if not (good and each.wrong)) for good in (False, True))
    last = max(cases, key=lambda each: each.grace)
    figures = [(name, f"{struck} in {len(cases)} runs, of which {survived} survived")]
    figures.append(("  longest until all processes had ended", f"{last.grace:.1f} s ({last.what})"))
    for (kind, value), number in sorted(Counter(chain.from_iterable(each.counts for each in cases)).items()):
        figures.append((f"  {kind}: {value}", str(number)))
    failed = [each for each in cases if each.wrong]
    return Outcome(figures, [f"{name} --case {e.number} ({e.what}): {'; '.join(e.wrong[:4])}" for e in failed])


_VOLATILE = (
    *("seconds", "per_second", "finished", "started", "peak_memory", "share", "command", "hardware", "versions"),
    *("sha256", "url", TOP_SHARED, WRITER_GAP),
)
"""Parts of keys whose values differ from run to run: times, where and when it ran, the hashes of files with them, and
what is measured on the next step's batch, which a server that is lost does not give."""
_DIGEST = re.compile(r"-[0-9a-f]{8}\b")
PAGES = (".png", ".svg", ".md", ".html", ".lock", ".log", ".txt")
"""Ends of names of files that are drawn or printed for people, and read by no command."""


def differences(expected: Path, found: Path, *, noise: float = 0.0) -> list[str]:
    """What differs between the results in two folders, in words; `noise` is the relative difference allowed of floats.

    Times, pages and the events of TensorBoard are not compared, but the files must be the same.
    """
    first, second = _names(expected), _names(found)
    wrong = [f"{name} is missing" for name in sorted(first.keys() - second.keys())]
    for name in sorted(first.keys() & second.keys()):
        if not name.endswith(PAGES) and _differs([(first[name], expected), (second[name], found)], noise):
            wrong.append(f"{name} differs")
    return wrong


def left_behind(expected: Path, found: Path) -> list[str]:
    return sorted(_names(found).keys() - _names(expected).keys())


def _names(folder: Path) -> dict[str, Path]:
    """The files of a folder by their names; the name of a study's run ends with a digest of where it is."""
    files = [file for file in folder.rglob("*") if file.is_file() and "tfevents" not in file.name]
    return {_DIGEST.sub("-#", str(file.relative_to(folder))): file for file in files}


def _differs(files: list[tuple[Path, Path]], noise: float) -> bool:
    """Whether two files differ, each of which is given with its folder."""
    one, other = (file for file, _ in files)
    if one.name == "manifest.json" or one.read_bytes() == other.read_bytes():
        return False  # a manifest has the hashes of files that are compared themselves
    try:
        if one.suffix == ".safetensors":
            timed = {"figures": 0}  # of a matrix of a calibration: how long it took is among them
            assert_close(load_file(one) | timed, load_file(other) | timed, rtol=noise, atol=noise)
            return False
        first, second = (
            _DIGEST.sub("-#", file.read_text("utf-8", "surrogateescape").replace(str(folder), "@"))
            for file, folder in files
        )
        if one.suffix not in (".json", ".jsonl"):
            return first != second
        return _rows(first, one.suffix, noise) != _rows(second, one.suffix)
    except (AssertionError, SafetensorError, json.JSONDecodeError):
        return True


def _rows(text: str, suffix: str, noise: float = 0.0) -> list[Any]:
    """The JSON of a text without what differs from run to run; its floats are equal to those within the noise."""

    def kept(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: value for key, value in pairs if not any(part in key for part in _VOLATILE)}

    def number(digits: str) -> Any:
        return pytest.approx(float(digits), rel=100 * noise, abs=noise) if noise else float(digits)

    lines = text.splitlines() if suffix == ".jsonl" else [text]
    return [json.loads(line, object_pairs_hook=kept, parse_float=number) for line in lines]
