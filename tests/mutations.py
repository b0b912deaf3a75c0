"""Breaks the package on purpose, one plausible mistake at a time, and says which test sees it.

    python tests/mutations.py [-n JOBS] [NAME...]

Each break, or each that is named, is made in a copy of the tree, its tests are run, and it is taken back. The exit code
is 1 if one SURVIVED, which means that no test saw it, or if a test fails without a break. The files tests/breaks/*.diff
have them: in a file that the line `file` names, text that occurs once and its replacement, below the tests that should
fail.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
COPIED = {"llmdistill", "tests", "scripts", "ds_configs", "eval", "docs", "README.md", "pyproject.toml"}
LOADED_ONCE = ["scipy.stats", "sklearn.metrics", "torch", "transformers.modeling_utils", "pytest"]
"""What a process of tests is forked with, because importing it takes longer than most of the tests."""
PATIENCE = 1200.0
"""Seconds after which the tests of a break are ended: it may make a loop endless."""
PROCESSES = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Break:
    """One mistake: in a file a text is replaced by another one."""

    name: str
    file: str
    tests: list[str]
    """Those that should fail, by files or node ids."""
    old: str
    new: str


def read_breaks(folder: Path) -> list[Break]:
    """Read the breaks of the .diff files of a folder."""
    found, file, tests = list[Break](), "", list[str]()
    text = "\n".join(each.read_text(encoding="utf-8") for each in sorted(folder.glob("*.diff")))
    for block in re.split(r"\n(?=file |seen by |@@ |#|\n)", text):
        head, *lines = block.splitlines() or [""]
        if head.startswith("file "):
            file = head.removeprefix("file ")
        elif head.startswith("seen by "):
            tests = head.removeprefix("seen by ").split()
        elif head.startswith("@@ "):
            old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
            found.append(Break(head.removeprefix("@@ "), file, tests, old, new))
    return found


BREAKS = read_breaks(Path(__file__).with_name("breaks"))


def run(copy: Path, tests: list[str], output: Path) -> None:
    """Run tests of a copy, in a process of its own whose exit code is pytest's."""
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True  # a break of the same size and second would be read as the one before it
    sys.path[0] = str(copy)  # was the folder of this script
    import pytest

    sys.exit(int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests])))


def caught_by(each: Break, copy: Path) -> str | None:
    """Make a break in a copy, and return the test that sees it; None if none does."""
    file, output = copy / each.file, copy / f"{each.name}.txt"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(each.old, each.new), encoding="utf-8")
    process = PROCESSES.Process(target=run, args=(copy, each.tests, output))
    process.start()
    process.join(PATIENCE if each.old else None)  # without a break all tests run, which takes as long as it takes
    code = process.exitcode
    process.terminate()
    file.write_text(text, encoding="utf-8")
    said = output.read_text(encoding="utf-8")
    assert code in (0, 1, None), f"{each.name}: tests were not run: {said[-3000:]}"
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
    return None if code == 0 else failed[1] if failed else f"no end within {PATIENCE:.0f} s"


def main() -> int:
    """Try the breaks that the command line names; 1 if one survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=2, metavar="JOBS", help="breaks at a time (2)")
    parser.add_argument("names", nargs="*", metavar="NAME", help="breaks to try; all without any")
    given = parser.parse_args()
    if unknown := set(given.names) - {each.name for each in BREAKS}:
        parser.error(f"no such break: {', '.join(sorted(unknown))}")
    chosen = [each for each in BREAKS if not given.names or each.name in given.names]
    unbroken = Break("unbroken", "pyproject.toml", [*{test for each in chosen for test in each.tests}], "", "")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    PROCESSES.set_forkserver_preload(LOADED_ONCE)
    copies: SimpleQueue[Path] = SimpleQueue()

    def tried(each: Break) -> str | None:
        copy = copies.get()
        try:
            seen = caught_by(each, copy)
        finally:
            copies.put(copy)
        survived = "no test fails" if each is unbroken else "SURVIVED"
        print(f"{each.name}: {survived if seen is None else f'caught by {seen}'}", flush=True)
        return seen

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.n) as pool:
        for number in range(given.n):
            ignored = lambda at, names: set(names) - COPIED if at == str(ROOT) else set()  # noqa: E731
            copies.put(shutil.copytree(ROOT, Path(folder) / str(number), symlinks=True, ignore=ignored))
        failed, *seen = pool.map(tried, [unbroken, *chosen])
    print(f"{len(seen) - seen.count(None)} of {len(seen)} breaks were caught")
    return int(failed is not None or None in seen)


if __name__ == "__main__":
    sys.exit(main())
