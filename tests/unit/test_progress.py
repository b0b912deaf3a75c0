"""What a command tells: signs of life, and messages by stream, rank and level."""

import io
import re
import time
from contextlib import redirect_stderr

import pytest

from llmdistill import progress as shown
from llmdistill.cli import main
from llmdistill.messages import fold, logger, print_result, say, set_level
from llmdistill.progress import Activity, duration, progress
from llmdistill.runtime.terminal import exit_code


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def loud(monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)


@pytest.fixture
def at_once(loud, monkeypatch):
    """The first line and the bar are due at once."""
    for name, seconds in (("_TICK_SECONDS", 0.001), ("_BAR_SECONDS", 0.0), ("_FIRST_SECONDS", 0.0)):
        monkeypatch.setattr(shown, name, seconds)


def after(stream, text):
    """Wait until the stream has the text, and return all of it."""
    patience = time.monotonic() + 60
    while text not in stream.getvalue():
        assert time.monotonic() < patience, stream.getvalue()
        time.sleep(0.001)
    return stream.getvalue()


def test_a_file_gets_a_line_with_what_how_far_and_how_long_still(at_once, monkeypatch):
    monkeypatch.setattr(shown, "_FIRST_SECONDS", 1e9)
    runs = Activity("Comparing", 7, "runs", done=2)
    with redirect_stderr(io.StringIO()) as stderr, Activity("Working"), runs:
        runs.advance(earlier=True)
        runs._began -= 90
        runs.advance()  # one run in 90 seconds, so the other three of seven take four and a half minutes
        with Activity("Calibration", 1000, "tokens") as tokens:
            monkeypatch.setattr(shown, "_next_line", 0.0)
            line = after(stderr, "\n")
            assert line == "Comparing  4 of 7 runs, 4 min 30 s left: Calibration  0 of 1,000 tokens, 0 s so far\n"
            tokens.advance(999)
    assert stderr.getvalue() == line  # the next is not due yet
    runs._began, runs._advanced = runs._began - 300, runs._advanced - 300  # the next run is late
    assert re.fullmatch(r"Comparing  4 of 7 runs, \d min \d\d s so far", runs.line())


def test_work_without_a_name_of_its_own_says_what_came_before(at_once, monkeypatch):
    monkeypatch.setattr(shown, "_FIRST_SECONDS", 1e9)
    with redirect_stderr(io.StringIO()) as stderr, Activity("Working") as whole:
        assert whole.line() == "Working, 0 s so far"
        with Activity("Running", unit="runs"), Activity("Calibration", 10, "batches"):
            pass
        whole._began -= 1000
        name, ended = shown._ended
        assert name == "Running"
        monkeypatch.setattr(shown, "_ended", (name, ended - 40))
        monkeypatch.setattr(shown, "_next_line", 0.0)
        assert re.fullmatch(r"Working, 4\d s since the end of Running\n", after(stderr, "\n"))
        with Activity("Decomposing", 4, "matrices") as matrices:
            assert matrices.line() == "Decomposing  0 of 4 matrices, 0 s so far"
    with Activity("Working") as whole:
        assert whole.line() == "Working, 0 s so far"


@pytest.mark.parametrize(("name", "value"), [("RANK", "1"), ("TQDM_DISABLE", "1")])
def test_other_ranks_and_quiet_processes_show_nothing(at_once, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with redirect_stderr(Terminal()) as stderr, Activity("Training", 9, "steps") as steps:
        steps.advance()
        assert not shown._under_way
    assert stderr.getvalue() == ""


def test_a_terminal_gets_a_bar_that_goes_away_and_no_lines(at_once):
    with redirect_stderr(Terminal()) as stderr:
        for _ in progress([1, 2], "Scoring", "batches"):
            bar = after(stderr, "Scoring ")
    assert "| 0/2 batches [00:00<" in bar
    assert "\n" not in stderr.getvalue()
    assert stderr.getvalue().endswith(" \r")  # wiped out


@pytest.mark.parametrize("framed", [False, True])
def test_a_warning_stands_above_the_bar(at_once, monkeypatch, framed):
    monkeypatch.setattr(shown, "_TICK_SECONDS", 1e9)
    with redirect_stderr(Terminal()) as stderr, Activity("Training", 9, "steps") as steps:
        steps.refresh()
        logger.warning("%s", "the loss jumped", extra={"framed": framed})
        *lines, bar = stderr.getvalue().split("\n")
    assert any("the loss jumped" in line for line in lines)
    assert bar.startswith("\rTraining ")
    shown_first, _, first = lines[0].rpartition("\r")
    assert shown_first.endswith(" ")  # the bar is wiped out
    assert "Training" not in first


def test_what_follows_a_bar_counts_its_silence_from_the_end_of_the_bar(at_once, monkeypatch):
    monkeypatch.setattr(shown, "_NEXT_SECONDS", 1e9)
    with redirect_stderr(Terminal()) as stderr, Activity("Working"):
        with Activity("Writing", 9, "tokens"):
            after(stderr, "Writing ")
            monkeypatch.setattr(shown, "_next_line", 0.0)
            patience = time.monotonic() + 60
            while shown._next_line == 0.0:
                assert time.monotonic() < patience
                time.sleep(0.001)
        assert shown._next_line > time.monotonic() + 1e6


def test_work_that_is_over_soon_shows_nothing(loud):
    for stream in (io.StringIO(), Terminal()):
        with redirect_stderr(stream):
            assert list(progress("ab", "Scoring", "batches")) == ["a", "b"]
        assert stream.getvalue().strip() == ""


@pytest.mark.parametrize(("seconds", "text"), [(None, "–"), (7.4, "7 s"), (59.9, "1 min 00 s"), (3700, "1 h 01 min")])
def test_durations_have_their_two_largest_units(seconds, text):
    assert duration(seconds) == text


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


def test_sentences_fit_the_terminal_and_commands_stay_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    words = "it takes the ranks by the predicted loss of the calibration data"
    command = f"llmdistill train --teacher.model {'m' * 40} --data.train FILE"
    text = f"Student     {words}\n{words}\n{command}\na  b  {words}\n    {words}"
    folded = fold(text, Terminal()).split("\n")
    assert folded[:3] == [
        "Student     it takes the ranks by the",
        " " * 12 + "predicted loss of the",
        " " * 12 + "calibration data",
    ]
    assert folded[3:5] == ["it takes the ranks by the predicted loss", "of the calibration data"]
    assert folded[5:] == text.split("\n")[2:], "a command, a table and what is indented"
    answer = fold(f"  teacher   {words}", Terminal(), indent=12).split("\n")
    assert answer == ["  teacher   it takes the ranks by the", *folded[1:3]]
    assert fold(text, io.StringIO()) == text, "a file and a pipe get whole lines"
