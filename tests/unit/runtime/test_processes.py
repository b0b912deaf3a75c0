"""The watch over the ranks of one node, with processes that are really killed."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from llmdistill.runtime.processes import NodeWatch, RankProcess

REPORT = "the process of rank {} of this node has ended"


@pytest.fixture
def other():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def watch_of(other):
    """Makes watches, which report nothing once the test is over and the other process is ended."""
    watches = []

    def make(*processes: RankProcess) -> NodeWatch:
        watches.append(NodeWatch(processes))
        watches[-1].begin()
        return watches[-1]

    yield make
    for watch in watches:
        watch.expect_ends()


def rank_of(process: subprocess.Popen[bytes], rank: int) -> RankProcess:
    return RankProcess(rank, RankProcess.own(0).node, process.pid)


def written(capsys: pytest.CaptureFixture[str], words: str = "", seconds: float = 1.0) -> str:
    """What is on stderr once these words are there, or after some seconds."""
    text, patience = "", time.monotonic() + seconds
    while time.monotonic() < patience and not (words and words in text):
        time.sleep(0.02)
        text += capsys.readouterr().err
    return text


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can watch processes that are no children")
class TestNodeWatch:
    def test_the_first_rank_that_is_left_reports_a_killed_one(self, other, watch_of, capsys):
        watch = watch_of(rank_of(other, 0), RankProcess.own(1))
        assert not watch.reports_an_end(0.1)
        other.kill()
        assert REPORT.format(0) in written(capsys, REPORT.format(0), seconds=30)
        assert watch.reports_an_end(0.1)

    def test_another_rank_leaves_it_to_the_first(self, other, watch_of, capsys):
        killed = subprocess.Popen(["sleep", "60"])
        watch = watch_of(rank_of(other, 0), RankProcess.own(1), rank_of(killed, 2))
        killed.kill()
        killed.wait()
        assert written(capsys) == ""
        assert watch.reports_an_end(0.1)

    def test_an_expected_end_is_not_reported(self, other, watch_of, capsys):
        watch = watch_of(RankProcess.own(0), rank_of(other, 1))
        watch.expect_ends()
        other.kill()
        assert written(capsys) == ""
        assert not watch.reports_an_end(0.1)

    @pytest.mark.parametrize("killed", [False, True])
    def test_a_rank_that_says_why_it_fails_is_not_reported(self, watch_of, capsys, killed):
        job = "from llmdistill.runtime.processes import RankProcess, says_why\n"
        job += "print(RankProcess.own(0).marker, flush=True)\nif input() == 'fail': says_why()\nraise SystemExit(1)"
        with subprocess.Popen([sys.executable, "-c", job], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as failing:
            marker = int(failing.stdout.readline())
            watch = watch_of(rank_of(failing, 0)._replace(marker=marker), RankProcess.own(1))
            if killed:
                failing.kill()
            else:
                failing.communicate(b"fail\n")
        # It is reaped now, so that nothing but the marker can tell.
        assert (REPORT.format(0) in written(capsys, REPORT.format(0))) == killed
        assert watch.reports_an_end(1.0)

    def test_ranks_of_other_nodes_are_not_looked_up(self, other, watch_of, capsys):
        elsewhere = RankProcess.own(0)._replace(node="another host")  # numbers are those of a node
        watch = watch_of(elsewhere, RankProcess.own(1), rank_of(other, 2)._replace(node="another host"))
        other.kill()
        assert written(capsys) == ""
        assert not watch.reports_an_end(0.1)
