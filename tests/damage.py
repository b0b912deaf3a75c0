"""Every kind of file that the package writes and reads again, and a flipped bit in one of them.

`kinds` lists the files of any folder by their kind, so that a test need not know what a run leaves: a new kind of file
is found by itself. `flip` changes one bit, and puts it back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NEVER_READ = (
    *("report.md", "*.png", "*.svg", "*.html", "*.log", ".lock"),
    *("tensorboard/*", "importance.json", "costs.json"),
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
    before = file.read_bytes()
    changed = bytearray(before)
    changed[place] ^= 1 << bit
    file.write_bytes(changed)
    try:
        yield
    finally:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(before)
