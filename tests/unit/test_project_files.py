"""What the ecosystem expects at the root says the same as the code and CI."""

from __future__ import annotations

import yaml
from pages import ROOT

import llmdistill


def read(name: str) -> dict:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version() -> None:
    assert read("CITATION.cff")["version"] == llmdistill.__version__


def test_github_runs_what_ci_runs() -> None:
    (job,) = read(".github/workflows/ci.yml")["jobs"].values()
    assert job["steps"][-1]["run"] == "bash .ci/run"


def test_pre_commit_has_the_linters_of_ci() -> None:
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    checks = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    linters = [line.split() for line in checks if line.split()[:1] in (["ruff"], ["mypy"])]
    assert [hook["entry"].split()[:2] for hook in repository["hooks"]] == [words[:2] for words in linters]
