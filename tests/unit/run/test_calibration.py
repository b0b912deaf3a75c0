"""The calibration data of a weighted factorization."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from llmdistill.config.command_line import parse_run
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.run.calibration import calibration_batches
from llmdistill.run.plan import make_plan
from llmdistill.runtime.distributed import World

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(("examples", "micro", "ranks"), [(24, 4, 2), (10, 8, 4), (5, 8, 5), (16, 8, 1)])
def test_every_rank_gets_calibration_data_and_no_two_the_same(
    monkeypatch, examples: int, micro: int, ranks: int
) -> None:
    calibration = "--student.factorize.calibration."
    words = ["--recipe", "quickstart", f"{calibration}examples", str(examples), f"{calibration}held_out", "6"]
    words += [f"{calibration}micro_batch_size", str(micro), "--ds_config", str(ROOT / "ds_configs/zero2.json")]
    config = parse_run(words, METHODS)[0]
    plan = make_plan(config)
    seen: list[int] = []
    for rank in range(ranks):
        world = World(rank=rank, size=ranks, device=torch.device("cpu"))
        own, held_out = calibration_batches(config, plan.models, world)
        assert own, "a rank without a batch would not join the sums over the ranks"
        ids = [name for batch in own for row in batch.sample_ids for name in row]
        held = {name for batch in held_out for row in batch.sample_ids for name in row}
        assert len(held) >= 6
        assert not held & {*ids, *seen}
        seen += ids
    assert len(set(seen)) == len(seen) >= examples
    many = World(rank=0, size=examples + 1, device=torch.device("cpu"))
    with pytest.raises(UserError, match=f"examples is {examples}, fewer than the {examples + 1} ranks"):
        calibration_batches(config, plan.models, many)
