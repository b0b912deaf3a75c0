"""Writes the hashes and the licenses of all that CI installs: python scripts/make/lock.py, after constraints changed.

Run it on the platform of CI (Linux on x86-64, Python 3.11), in the environment of scripts/setup.sh. It asks pip which
files it would install by pyproject.toml and scripts/constraints.txt, installs nothing, and writes the lists of
scripts/hashes.txt and scripts/licenses.md anew, below their heads. torch has no hash, because its build depends on the
machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_NAMED = 60
"""A license longer than this is a whole text; its classifier names it."""


def main() -> None:
    hashes, licenses = list[str](), dict[str, list[str]]()
    for each in sorted(resolved(), key=lambda each: each["metadata"]["name"].lower()):
        name, version = each["metadata"]["name"], each["metadata"]["version"]
        if name == "llmdistill":
            continue
        licenses.setdefault(license(name), []).append(name)
        if name != "torch":
            hashed = each["download_info"]["archive_info"]["hashes"]["sha256"]
            hashes.append(f"{name}=={version} --hash=sha256:{hashed}\n")
    write_below(ROOT / "scripts" / "hashes.txt", "torch is installed before them.\n", hashes)
    rows = [f"| {each} | {', '.join(licenses[each])} |\n" for each in sorted(licenses, key=str.lower)]
    write_below(ROOT / "scripts" / "licenses.md", "|---|---|\n", rows)
    print(f"scripts/hashes.txt has {len(hashes)} files, scripts/licenses.md {len(licenses)} licenses")


def resolved() -> list[dict[str, Any]]:
    """Return what pip would install into an empty environment, one entry of its report for each file."""
    options = ["--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    wanted = ["-c", str(ROOT / "scripts" / "constraints.txt"), "torch", "-e", f"{ROOT}[dev,docs]"]
    command = [sys.executable, "-m", "pip", "install", *options, *wanted]
    report = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return json.loads(report)["install"]


def license(name: str) -> str:
    """Return the name of an installed library's license: the expression, else the classifiers, else the short field."""
    fields = metadata(name)
    classifiers = [
        each.rpartition(" :: ")[2] for each in fields.get_all("Classifier", ()) if each.startswith("License")
    ]
    short = (fields["License"] or "").strip()
    named = short if 0 < len(short) <= _NAMED and "\n" not in short else ""
    return str(fields["License-Expression"] or ", ".join(classifiers) or named or "not named")


def write_below(file: Path, head: str, lines: list[str]) -> None:
    """Write the lines in the place of what follows the head of a file, of which the end is given."""
    text = file.read_text(encoding="utf-8")
    file.write_text(text[: text.index(head)] + head + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
