"""Every kind of file that the package writes and reads again, and damage to one of them.

`kinds` lists the files of any folder by their kind, so that a test need not know what a run leaves: a new kind of file
is found by itself. `damage` changes a file, and puts it back: text has no checksum, and is cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NEVER_READ = (
    *("report.md", "*.png", "*.svg", "*.html", "*.log", ".lock"),
    *("tensorboard/*", "importance.json", "costs.json", "study.json"),
)
"""Files for people and other programs, which no command of the package reads."""


def kinds(folder: Path) -> dict[str, list[Path]]:
    """Return the files below a folder that a command may read, by their path with every number as N."""
    found: dict[str, list[Path]] = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder)
        if not file.is_file() or file.stat().st_size == 0:
            continue
        if any(name.match(pattern) or name.parts[0] == pattern.removesuffix("/*") for pattern in NEVER_READ):
            continue
        found.setdefault(re.sub(r"[0-9a-f]{16}|\d+", "N", name.as_posix()), []).append(file)
    return found


@contextmanager
def flip(file: Path, place: int, bit: int = 0) -> Iterator[None]:
    """Block in which one bit of a file is another; `place` counts its bytes, and may be negative."""
    changed = bytearray(file.read_bytes())
    changed[place] ^= 1 << bit
    with _content(file, bytes(changed)):
        yield


@contextmanager
def damage(file: Path) -> Iterator[None]:
    """Block in which a file of text is cut in its middle, and a bit in the middle of any other file is another."""
    before, is_text = file.read_bytes(), file.suffix in (".json", ".jsonl", ".tsv", ".txt")
    with _content(file, before[: len(before) // 2]) if is_text else flip(file, len(before) // 2):
        yield


@contextmanager
def _content(file: Path, content: bytes) -> Iterator[None]:
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(before)
