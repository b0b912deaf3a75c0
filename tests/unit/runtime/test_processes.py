"""The ranks of a node, as threads that each stand for a process that is really killed."""

import os
import subprocess
import tempfile

import pytest

from llmdistill.runtime import processes
from llmdistill.runtime.processes import NodeRanks

from support import ThreadRanks

NODES = ["a", "a", "b"]
"""The node of each rank."""


@pytest.fixture
def sleeping():
    started = [subprocess.Popen(["sleep", "60"]) for _ in NODES]
    yield started
    for each in started:
        each.kill()
        each.wait()


@pytest.fixture
def nodes(sleeping, monkeypatch, tmp_path):
    """What each rank knows."""
    ranks = ThreadRanks(len(NODES))

    def gather(everyone: list[object], value: object, group: object) -> None:
        everyone[:] = ranks.collect(value)

    monkeypatch.setattr(processes.dist, "get_rank", lambda: ranks.rank)
    monkeypatch.setattr(processes.dist, "get_world_size", lambda: len(NODES))
    monkeypatch.setattr(processes.dist, "all_gather_object", gather)
    monkeypatch.setattr(processes.dist, "barrier", lambda group: ranks.collect(None))
    monkeypatch.setattr(processes.socket, "gethostname", lambda: NODES[ranks.rank])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: sleeping[ranks.rank].pid)
        return ranks.run(lambda rank: NodeRanks(None))


def test_the_first_rank_of_a_node_says_why(nodes, tmp_path):
    assert [each.nodes for each in nodes] == [[[0, 1], [2]]] * 3
    assert not list(tmp_path.iterdir())
    assert [nodes[rank].claim_report() for rank in (1, 0, 1, 2)] == [True, False, False, True]


@pytest.mark.parametrize("says_why", [False, True])
def test_a_rank_that_ends_is_named_once_unless_it_says_why(nodes, sleeping, capsys, says_why):
    assert nodes[0].describe_lost_ranks() is None
    assert says_why == (says_why and nodes[1].claim_report())
    sleeping[1].kill()
    said = nodes[0].describe_lost_ranks(60)
    assert said.startswith("the process of rank 1 of this node has ended")
    sleeping[1].wait()  # the launcher has reaped it
    assert nodes[0].report_lost_ranks()
    assert nodes[0].report_lost_ranks()
    assert capsys.readouterr().err == ("" if says_why else f"error: {said}\n")
    assert not nodes[2].report_lost_ranks(), "numbers of processes are those of a node"
