"""The run's folder: ours, another's, or none's."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
import torch

from llmdistill.config.command_line import parse_run, to_dict
from llmdistill.errors import UserError
from llmdistill.run.artifacts import claim_folder
from llmdistill.run.checkpoints import last_step
from llmdistill.runtime.distributed import World

WORLD = World(rank=0, size=1, device=torch.device("cpu"))


@pytest.fixture
def run():
    config, _ = parse_run(["--ds_config", "zero2.json"])
    return {"config": to_dict(config), "ds_config": {"zero_optimization": {"stage": 2}}, "world_size": 1}


def changed(run, *path, value):
    other = copy.deepcopy(run)
    block = other
    for key in path[:-1]:
        block = block[key]
    block[path[-1]] = value
    return other


def test_same_run_may_come_back(tmp_path, run):
    claim_folder(tmp_path / "run", run, resume="auto", world=WORLD)
    claim_folder(tmp_path / "run", changed(run, "config", "train", "log_every", value=3), resume="auto", world=WORLD)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["train"]["log_every"] == 3


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("config", "train", "learning_rate"), 1.0, r"train.learning_rate was 0\.0015 and is now 1\.0"),
        (("config", "seed"), 1, "seed was 0 and is now 1"),
        (("ds_config", "zero_optimization", "stage"), 3, "ds_config.zero_optimization.stage was 2 and is now 3"),
        (("world_size",), 2, "number of ranks was 1 and is now 2"),
    ],
)
def test_another_configuration_is_refused_and_nothing_lost(tmp_path, run, path, value, said):
    claim_folder(tmp_path / "run", run, resume="auto", world=WORLD)
    before = (tmp_path / "run" / "run.json").read_bytes()
    with pytest.raises(UserError, match=said):
        claim_folder(tmp_path / "run", changed(run, *path, value=value), resume="auto", world=WORLD)
    assert (tmp_path / "run" / "run.json").read_bytes() == before


def test_never_resuming_refuses_a_run(tmp_path, run):
    claim_folder(tmp_path / "run", run, resume="never", world=WORLD)
    with pytest.raises(UserError, match="holds a run already"):
        claim_folder(tmp_path / "run", run, resume="never", world=WORLD)


def test_folder_of_something_else_is_refused(tmp_path, run):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="not empty and holds no run"):
        claim_folder(tmp_path, run, resume="auto", world=WORLD)


def test_two_processes_do_not_share_a_run(tmp_path, run):
    claim_folder(tmp_path / "run", run, resume="auto", world=WORLD)
    code = (
        "import json, sys, torch\n"
        "from pathlib import Path\n"
        "from llmdistill.run.artifacts import claim_folder\n"
        "from llmdistill.runtime.distributed import World\n"
        "world = World(rank=0, size=1, device=torch.device('cpu'))\n"
        "claim_folder(Path(sys.argv[1]), json.loads(sys.argv[2]), resume='auto', world=world)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run"), json.dumps(run)]
    other = subprocess.run(command, capture_output=True, text=True, check=False)
    assert other.returncode != 0
    assert "another process is at this run" in other.stderr


def test_last_step_reads_what_deepspeed_wrote(tmp_path):
    assert last_step(tmp_path) == 0
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-120")
    assert last_step(tmp_path) == 120
