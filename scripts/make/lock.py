"""Writes the hashes and the licenses of all that CI installs: python scripts/make/lock.py, after constraints changed.

Run it on the platform of CI (Linux on x86-64, Python 3.11), in the environment of scripts/setup.sh. It asks pip which
files it would install by pyproject.toml and scripts/constraints.txt, installs nothing, and writes scripts/hashes.txt
and docs/licenses.md. torch has no hash, because its build depends on the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_OWN = ("torch", "llmdistill")
_NAMED = 60
"""A license longer than this is a whole text; its classifier names it."""

HASHES = """\
# Made by scripts/make/lock.py from scripts/constraints.txt: what CI installs on Linux (x86-64), Python 3.11.
# pip compares the hash of each file. torch is installed before them.
"""
LICENSES = """\
# Licenses of what is installed

What an installation with `scripts/constraints.txt` and the extras `dev` and `docs` brings, with the license
that each library's own metadata names. Made by `python scripts/make/lock.py`; llmdistill itself has the
Apache License 2.0.

| library | version | license |
|---|---|---|
"""


def main() -> None:
    found = sorted(resolved(), key=lambda each: each["metadata"]["name"].lower())
    others = [each for each in found if each["metadata"]["name"] not in _OWN]
    (ROOT / "scripts" / "hashes.txt").write_text(hashes(others), encoding="utf-8")
    licensed = [each["metadata"] for each in found if each["metadata"]["name"] != "llmdistill"]
    (ROOT / "docs" / "licenses.md").write_text(licenses(licensed), encoding="utf-8")
    print(f"scripts/hashes.txt has {len(others)} files, docs/licenses.md {len(licensed)} libraries")


def resolved() -> list[dict[str, Any]]:
    """Return what pip would install into an empty environment, one entry of its report for each file."""
    constraints = ROOT / "scripts" / "constraints.txt"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--dry-run", "--ignore-installed", "--quiet", "--report", str(report), "-c", str(constraints)]
        command = [sys.executable, "-m", "pip", "install", *options, "torch", "-e", f"{ROOT}[dev,docs]"]
        subprocess.run(command, check=True)
        installed: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["install"]
    return installed


def hashes(files: Sequence[Mapping[str, Any]]) -> str:
    """Return a requirements file that pins each file by its version and hash."""
    lines = []
    for each in files:
        pinned, hashed = each["metadata"], each["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{pinned['name']}=={pinned['version']} --hash=sha256:{hashed}\n")
    return HASHES + "".join(lines)


def licenses(libraries: Sequence[Mapping[str, Any]]) -> str:
    """Return a page with the license of each library, as its own metadata names it."""
    rows = [(each["name"], each["version"].partition("+")[0], license(each["name"])) for each in libraries]
    return LICENSES + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def license(name: str) -> str:
    """Return the name of an installed library's license: the expression, else the classifiers, else the short field."""
    fields = metadata(name)
    classifiers = [
        each.rpartition(" :: ")[2] for each in fields.get_all("Classifier", ()) if each.startswith("License")
    ]
    short = (fields["License"] or "").strip()
    named = short if 0 < len(short) <= _NAMED and "\n" not in short else ""
    return str(fields["License-Expression"] or ", ".join(classifiers) or named or "not named")


if __name__ == "__main__":
    main()
