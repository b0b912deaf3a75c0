"""What CI installs is pinned by version and hash, and its licenses are listed."""

from __future__ import annotations

import re
from importlib.metadata import metadata

from packaging.specifiers import SpecifierSet

from support import ROOT

ELSEWHERE = {"tzdata"}
"""Libraries that only an installation on Windows needs."""
CONSTRAINT = re.compile(r"([\w.-]+)==([\w.+!-]+)")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints() -> dict[str, str]:
    lines = (ROOT / "scripts/constraints.txt").read_text().splitlines()
    found = [CONSTRAINT.match(line) for line in lines if line and not line.startswith("#")]
    assert all(found)
    return {normal(each[1]): each[2] for each in found if each is not None}


def test_every_constraint_has_its_hash_and_nothing_else_is_installed() -> None:
    lines = (ROOT / "scripts/hashes.txt").read_text().splitlines()
    pinned = {}
    for line in (each for each in lines if not each.startswith("#")):
        requirement, hashed = line.split(" --hash=")
        assert re.fullmatch(r"sha256:[0-9a-f]{64}", hashed), line
        name, version = requirement.split("==")
        pinned[normal(name)] = version
    expected = {name: version for name, version in constraints().items() if name not in {"torch", *ELSEWHERE}}
    assert pinned == expected


def test_every_library_has_its_license_in_the_docs() -> None:
    rows = [line.split(" | ") for line in (ROOT / "docs/licenses.md").read_text().splitlines() if " | " in line]
    listed = {normal(row[0].removeprefix("| ")): row[1] for row in rows[1:]}
    assert listed == {name: version for name, version in constraints().items() if name not in ELSEWHERE}


def test_every_pinned_version_takes_the_first_python_that_it_is_pinned_for() -> None:
    """Debian 12 has Python 3.11.2, and the pins hold from 3.11 on."""
    wanted = {name: metadata(name)["Requires-Python"] for name in constraints() if name not in ELSEWHERE}
    assert [name for name, range_ in wanted.items() if not SpecifierSet(range_ or "").contains("3.11.0")] == []
