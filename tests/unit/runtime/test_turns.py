from __future__ import annotations

from collections.abc import Callable
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
def run(monkeypatch: pytest.MonkeyPatch) -> Callable:
    ranks = ThreadRanks(len(NODES))
    ranks.replace_group(monkeypatch)
    monkeypatch.setattr(
        turns, "node_ranks", lambda world: [rank for rank, node in enumerate(NODES) if node == NODES[world.rank]]
    )
    return lambda job: ranks.run(lambda rank: job(World(rank, len(NODES), torch.device("cpu"))))


def test_rank_0_comes_first_then_a_rank_of_each_node(run: Callable) -> None:
    order: list[int] = []

    def job(world: World) -> int:
        order.append(world.rank)
        return world.rank * 10

    assert run(lambda world: in_turns(lambda: job(world), world)) == [0, 10, 20, 30, 40]
    assert order[0] == 0
    assert set(order[1:3]) == {2, 4}
    assert set(order[3:]) == {1, 3}


def test_a_mistake_is_raised_on_every_rank_before_the_next_turn(run: Callable) -> None:
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


def test_alone_the_job_just_runs() -> None:
    assert in_turns(lambda: 7, World.alone()) == 7
    with pytest.raises(UserError, match="fix it") as error:
        in_turns(lambda: (_ for _ in ()).throw(UserError("fix it")), World.alone())
    assert not error.value.everywhere


class TestMadeOnce:
    def made(self, run: Callable, own: Callable[[World], Path]) -> tuple[list[Path], list[int]]:
        """The folders that the ranks are given, and the ranks that made one."""
        makers: list[int] = []

        def make(world: World) -> Path:
            makers.append(world.rank)
            own(world).mkdir(exist_ok=True)
            return own(world)

        return run(lambda world: made_once(lambda: make(world), world)), makers

    def test_on_a_shared_disk_one_rank_makes_it(self, run: Callable, tmp_path: Path) -> None:
        folders, makers = self.made(run, lambda world: tmp_path / "set")
        assert folders == [tmp_path / "set"] * len(NODES)
        assert makers == [0]

    def test_a_node_with_a_disk_of_its_own_makes_its_own(
        self, run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        exists = Path.exists
        for node in set(NODES):
            (tmp_path / node).mkdir()

        def own_disk(path: Path) -> bool:
            return exists(tmp_path / NODES[ThreadRanks.own.rank] / path.name)

        makers: list[int] = []

        def make(world: World) -> Path:
            makers.append(world.rank)
            (tmp_path / NODES[world.rank] / "set").mkdir(exist_ok=True)
            return Path("/cache/set")

        monkeypatch.setattr(Path, "exists", own_disk)
        assert run(lambda world: made_once(lambda: make(world), world)) == [Path("/cache/set")] * len(NODES)
        assert makers[0] == 0
        assert sorted(makers) == [0, 2, 4], "the first rank of each node"

    def test_other_data_on_another_node_are_refused(self, run: Callable, tmp_path: Path) -> None:
        def make(world: World) -> Path:
            return tmp_path / ("here" if NODES[world.rank] == "a" else "there")

        def fail(world: World) -> None:
            with pytest.raises(UserError, match=r"rank 2 on \S+ reads other data than rank 0 \(there and here in"):
                made_once(lambda: make(world), world)

        run(fail)
