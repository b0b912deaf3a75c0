"""The messages of a command: which stream they go to, on which rank, and at which level."""

import pytest

from llmdistill.cli import main
from llmdistill.messages import logger, print_result, say, set_level
from llmdistill.runtime.terminal import exit_code


def speak() -> None:
    say("100% of it")
    say("beside a result", aside=True)
    logger.warning("warning: %s is old", "a.json")
    logger.warning("%s", "it is wrong", extra={"framed": True})
    print_result("a table")
    print_result({"a": 1})


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What a job leaves on stdout and stderr with these environment variables; the level is as before afterwards."""

    def hear(**environment: str) -> tuple[list[str], list[str]]:
        for key, value in environment.items():
            monkeypatch.setenv(key, value)
        assert exit_code(speak) == 0
        out, err = capsys.readouterr()
        return out.splitlines(), err.splitlines()

    yield hear
    monkeypatch.delenv("LLMDISTILL_LOG", raising=False)
    set_level()


def test_results_and_messages_have_their_streams(heard) -> None:
    out, err = heard()
    assert out == ["100% of it", "a table", '{"a": 1}']
    assert err[:2] == ["beside a result", "warning: a.json is old"]
    assert "WARNING" in err[2]
    assert "it is wrong" in err[3]


def test_a_level_leaves_messages_out_but_no_result(heard) -> None:
    out, err = heard(LLMDISTILL_LOG="Warning")
    assert (out, err[0]) == (["a table", '{"a": 1}'], "warning: a.json is old")
    assert heard(LLMDISTILL_LOG="error") == (["a table", '{"a": 1}'], [])


def test_a_wrong_level_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LLMDISTILL_LOG", "loud")
    assert main(["recipes"]) == 2
    said = "error: LLMDISTILL_LOG=loud: there is no such level; give one of info, warning, error\n"
    assert capsys.readouterr().err == said
