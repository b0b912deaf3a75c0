from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest
import torch

from llmdistill.errors import RankError, UserError
from llmdistill.runtime import distributed
from llmdistill.runtime.distributed import World, is_there, on_main

CPU = torch.device("cpu")


def test_the_main_ranks_value_and_mistake_reach_all(monkeypatch):
    sent: list[object] = []

    def broadcast(value: object) -> object:  # rank 0 comes first and sends, the other hears it
        if not sent:
            sent.append(value)
        return sent[0]

    monkeypatch.setattr(distributed, "broadcast_object", broadcast)
    job = Mock(return_value=7)
    assert [on_main(job, World(rank, 2, CPU)) for rank in range(2)] == [7, 7]
    job.assert_called_once_with()
    for error, prefix in ((UserError("fix it"), ""), (OSError("no room"), "rank 0 failed with OSError: ")):
        sent.clear()
        with pytest.raises(type(error), match=str(error)):
            on_main(Mock(side_effect=error), World(0, 2, CPU))
        with pytest.raises((UserError, RankError), match=f"^{prefix}{error}"):
            on_main(Mock(side_effect=error), World(1, 2, CPU))


def test_a_rank_waits_for_the_file_that_rank_0_sees(monkeypatch, tmp_path):
    monkeypatch.setattr(distributed, "broadcast_object", lambda value: (True, None))
    monkeypatch.setattr(distributed, "gather_objects", lambda value, world: [None, value])
    late = tmp_path / "student"
    timer = threading.Timer(0.3, late.mkdir)
    timer.start()
    assert is_there(late, World(1, 2, CPU))
    monkeypatch.setattr(distributed, "_FILE_PATIENCE", 0.2)
    with pytest.raises(UserError, match=r"never: rank 0 has written it, but rank 1 on \S+ does not see it"):
        is_there(tmp_path / "never", World(1, 2, CPU))
