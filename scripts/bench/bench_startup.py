"""Starting up: CPU seconds of the bare import, of every --help and of a dry run, each in a process of its own.

    python scripts/bench/bench_startup.py           # best of 5 processes each, half a minute
    python scripts/bench/bench_startup.py --quick   # best of 2

User and system time of the process, not the clock's, so that other programs on the cores matter less; the best, as
they only ever add. Files are in the system's cache after the first process, which is not counted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    *("train", "plan", "doctor", "compare", "compress", "cache", "generate", "export", "push", "recipes"),
    *("evaluate", "evaluate --suite glue"),
)
IMPORT, HELP, DRY_RUN = 0.3, 1.5, 5.0
"""The most CPU seconds that each may take."""
DRY = "llmdistill/train.py --ds_config ds_configs/zero2.json --dry_run --json"


def cpu_seconds(arguments: list[str]) -> float:
    """User and system time of one process, with all that it starts; CalledProcessError if it fails."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two processes each")
    arguments = parser.parse_args()
    helps = [f"-m llmdistill.cli {command} --help" for command in COMMANDS]
    helps += [f"{program} --help" for program in ("llmdistill/train.py", "eval/glue.py", "eval/instruct.py")]
    rows = [(["-c", "import llmdistill"], IMPORT), *((each.split(), HELP) for each in helps), (DRY.split(), DRY_RUN)]
    for words, limit in rows:
        cpu_seconds(words)
        found = min(cpu_seconds(words) for _ in range(2 if arguments.quick else 5))
        verdict = "" if arguments.quick else "ok" if found <= limit else "MISS"
        print(f"{' '.join(words):46} {found:6.2f} s   limit {limit:.1f} s   {verdict}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
