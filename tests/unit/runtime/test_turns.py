from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmdistill.errors import UserError
from llmdistill.runtime import turns
from llmdistill.runtime.distributed import World
from llmdistill.runtime.turns import in_turns, made_once

from support import ThreadRanks

NODES = ["a", "a", "b", "b", "c"]
"""The node of each rank."""


@pytest.fixture
def run(monkeypatch):
    ranks = ThreadRanks(len(NODES))
    ranks.replace_group(monkeypatch)
    monkeypatch.setattr(
        turns, "node_ranks", lambda world: [rank for rank, node in enumerate(NODES) if node == NODES[world.rank]]
    )
    return lambda job: ranks.run(lambda rank: job(World(rank, len(NODES), torch.device("cpu"))))


def test_rank_0_comes_first_then_a_rank_of_each_node(run):
    order: list[int] = []
    numbers = run(lambda world: in_turns(lambda: order.append(world.rank) or world.rank * 10, world))
    assert numbers == [0, 10, 20, 30, 40]
    assert order[0] == 0
    assert set(order[1:3]) == {2, 4}
    assert set(order[3:]) == {1, 3}


def test_a_mistake_is_raised_on_every_rank_before_the_next_turn(run):
    ran: list[int] = []

    def job(world: World) -> None:
        ran.append(world.rank)
        raise UserError(f"rank {world.rank} found a mistake")

    def fail(world: World) -> None:
        with pytest.raises(UserError, match="rank 0 found a mistake") as error:
            in_turns(lambda: job(world), world)
        assert error.value.everywhere

    run(fail)
    assert ran == [0]


def test_on_a_shared_disk_one_rank_makes_it(run, tmp_path):
    makers: list[int] = []

    def make(world: World) -> Path:
        makers.append(world.rank)
        (tmp_path / "set").mkdir()
        return tmp_path / "set"

    assert run(lambda world: made_once(lambda: make(world), world)) == [tmp_path / "set"] * len(NODES)
    assert makers == [0]


def test_a_node_with_a_disk_of_its_own_makes_its_own(run, tmp_path, monkeypatch):
    exists, makers = Path.exists, list[int]()
    for node in set(NODES):
        (tmp_path / node).mkdir()

    def make(world: World) -> Path:
        makers.append(world.rank)
        (tmp_path / NODES[world.rank] / "set").mkdir(exist_ok=True)
        return Path("/cache/set")

    monkeypatch.setattr(Path, "exists", lambda path: exists(tmp_path / NODES[ThreadRanks.own.rank] / path.name))
    assert run(lambda world: made_once(lambda: make(world), world)) == [Path("/cache/set")] * len(NODES)
    assert makers[0] == 0
    assert sorted(makers) == [0, 2, 4], "the first rank of each node"


def test_other_data_on_another_node_are_refused(run, tmp_path):
    def fail(world: World) -> None:
        folder = tmp_path / ("here" if NODES[world.rank] == "a" else "there")
        with pytest.raises(UserError, match=r"rank 2 on \S+ reads other data than rank 0 \(there and here in"):
            made_once(lambda: folder, world)

    run(fail)
