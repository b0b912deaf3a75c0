from __future__ import annotations

import pytest
import torch

from llmdistill.errors import UserError
from llmdistill.runtime import distributed
from llmdistill.runtime.distributed import World, on_main

CPU = torch.device("cpu")


def test_the_main_ranks_value_and_mistake_reach_all(monkeypatch) -> None:
    sent: list[object] = []

    def broadcast(value: object) -> object:  # rank 0 comes first and sends, the other hears it
        if not sent:
            sent.append(value)
        return sent[0]

    monkeypatch.setattr(distributed, "broadcast_object", broadcast)
    ran: list[int] = []

    def job() -> int:
        ran.append(1)
        return 7

    assert [on_main(job, World(rank, 2, CPU)) for rank in range(2)] == [7, 7]
    assert ran == [1]

    def mistaken() -> None:
        raise UserError("mend it")

    sent.clear()
    for rank in range(2):
        with pytest.raises(UserError, match="mend it"):
            on_main(mistaken, World(rank, 2, CPU))


def test_alone_nothing_is_sent() -> None:
    assert on_main(lambda: None, World(0, 1, CPU)) is None
