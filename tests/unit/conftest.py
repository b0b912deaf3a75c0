"""What the suites that set models side by side share."""

import pytest


@pytest.fixture
def refused(monkeypatch, capsys):
    """Evaluate a suite on a mistake, which is found before a model is loaded; returns the one line that is said."""
    from llmdistill.cli import main

    monkeypatch.setattr("llmdistill.studies.side_by_side.load_model", None)

    def run(suite: str, *words: object) -> str:
        assert main(["evaluate", "--suite", suite, *map(str, words)]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said

    return run
