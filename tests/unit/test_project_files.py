"""The files of the project: what CI installs is pinned by version and hash, and what the ecosystem expects is true."""

import re
from importlib.metadata import distributions

import yaml
from mutations import BREAKS
from packaging.specifiers import SpecifierSet

import llmdistill

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


def test_every_library_has_its_license_listed() -> None:
    lines = (ROOT / "scripts/licenses.md").read_text().splitlines()
    rows = [line.strip("|").split(" | ") for line in lines if " | " in line]
    listed = [normal(name.strip()) for _license, names in rows[1:] for name in names.split(",")]
    assert sorted(listed) == sorted(name for name in constraints() if name not in ELSEWHERE)


def test_every_pinned_version_takes_the_first_python_that_it_is_pinned_for() -> None:
    """Debian 12 has Python 3.11.2, and the pins hold from 3.11 on."""
    installed = {normal(each.name): each for each in distributions()}
    # Other versions than the pinned ones, as scripts/test_versions.sh installs them, say nothing of the pins.
    versions = {name: each.version.split("+")[0] for name, each in installed.items()}
    pins = [name for name, version in constraints().items() if versions.get(name) == version]
    wanted = {name: installed[name].metadata["Requires-Python"] for name in pins}
    assert [name for name, range_ in wanted.items() if not SpecifierSet(range_ or "").contains("3.11.0")] == []


def read(name: str) -> dict:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_files_at_the_root_say_the_same_as_the_code_and_ci() -> None:
    assert read("CITATION.cff")["version"] == llmdistill.__version__
    (job,) = read(".github/workflows/ci.yml")["jobs"].values()
    assert job["steps"][-1]["run"] == "bash .ci/run"
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    checks = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    linters = [line.split() for line in checks if line.split()[:1] in (["ruff"], ["mypy"])]
    assert [hook["entry"].split()[:2] for hook in repository["hooks"]] == [words[:2] for words in linters]


def test_every_break_fits_the_tree() -> None:
    """tests/mutations.py tries the deliberate breaks."""
    assert len({each.name for each in BREAKS}) == len(BREAKS) >= 60
    for each in BREAKS:
        assert (ROOT / each.file).read_text(encoding="utf-8").count(each.old) == 1, each.name
        assert each.old != each.new, each.name
        for node in each.tests:
            file, *_, name = node.split("::") if "::" in node else (node, "")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert not name or re.search(rf"^\s*(def|class) {name}\b", text, re.MULTILINE), f"{each.name}: {node}"
