import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hostile import refuses

from llmdistill.errors import RankError, UserError
from llmdistill.runtime import distributed
from llmdistill.runtime.distributed import World, exists_on_main, on_main
from llmdistill.runtime.main_first import main_first, make_once

from support import ThreadRanks

NODES = ["a", "a", "b", "b", "c"]
"""The node of each rank."""


@pytest.fixture
def run(monkeypatch):
    ranks = ThreadRanks(len(NODES))
    ranks.replace_group(monkeypatch)
    monkeypatch.setattr(
        sys.modules[make_once.__module__],
        "node_ranks",
        lambda: [rank for rank, node in enumerate(NODES) if node == NODES[World.current().rank]],
    )
    return lambda job: ranks.run(lambda _: job(World.current()))


@pytest.mark.parametrize(
    ("error", "said"), [(UserError("fix it"), "fix it"), (OSError("no room"), "rank 0 failed with OSError: no room")]
)
def test_the_mistake_of_rank_0_reaches_all(run, error, said):
    def fail(world: World) -> None:
        with pytest.raises((UserError, RankError, OSError), match=f"^{error if world.is_main else said}"):
            on_main(Mock(side_effect=error))

    run(fail)


def test_rank_0_comes_first_then_a_rank_of_each_node(run):
    order: list[int] = []
    numbers = run(lambda world: main_first(lambda: order.append(world.rank) or world.rank * 10))
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
            main_first(lambda: job(world))
        assert error.value.everywhere

    run(fail)
    assert ran == [0]


@pytest.mark.parametrize(("shared", "makers"), [(True, [0]), (False, [0, 2, 4])])
def test_the_first_rank_of_each_disk_makes_it(run, tmp_path, monkeypatch, shared, makers):
    exists, made = Path.exists, list[int]()
    for node in (disks := dict(zip(NODES, ["all"] * 5 if shared else NODES, strict=True))):
        (tmp_path / disks[node]).mkdir(exist_ok=True)

    def make(world: World) -> Path:
        made.append(world.rank)
        (tmp_path / disks[NODES[world.rank]] / "set").mkdir(exist_ok=True)
        return Path("/cache/set")

    with monkeypatch.context() as patch:  # pytest itself asks what exists
        patch.setattr(Path, "exists", lambda path: exists(tmp_path / disks[NODES[ThreadRanks.own.rank]] / path.name))
        assert run(lambda world: make_once(lambda: make(world))) == [Path("/cache/set")] * len(NODES)
    assert (made[0], sorted(made)) == (0, makers)


def test_other_data_on_another_node_are_refused(run, tmp_path):
    def fail(world: World) -> None:
        folder = tmp_path / ("here" if NODES[world.rank] == "a" else "there")
        with pytest.raises(UserError, match=r"rank 2 on \S+ reads other data than rank 0 \(there and here in"):
            make_once(lambda: folder)

    run(fail)


def test_a_rank_waits_for_the_file_that_rank_0_sees(monkeypatch, tmp_path):
    monkeypatch.setattr(distributed, "broadcast_object", lambda value: (True, None))
    monkeypatch.setattr(distributed, "gather_objects", lambda value: [None, value])
    late = tmp_path / "student"
    timer = threading.Timer(0.3, late.mkdir)
    timer.start()
    with World(1, 2, torch.device("cpu")).entered():
        assert exists_on_main(late)
        monkeypatch.setattr(distributed, "_FILE_PATIENCE", 0.2)
        refuses("never: rank 0 has written it, but rank 1 on ", exists_on_main, tmp_path / "never")
