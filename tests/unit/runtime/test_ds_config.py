"""The DeepSpeed configuration: one owner per knob."""

import json
from pathlib import Path

import pytest

from llmdistill.config import TrainConfig
from llmdistill.errors import UserError
from llmdistill.runtime.ds_config import read_ds_config, resolve_ds_config
from llmdistill.runtime.engine import BatchSplit, split_batch, student_ds_config

SHIPPED = sorted((Path(__file__).resolve().parents[3] / "ds_configs").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configurations_resolve_and_deepspeed_accepts_them(path):
    from deepspeed.runtime.config import DeepSpeedConfig

    settings = TrainConfig(global_batch_size=16, micro_batch_size=4, learning_rate=3e-4, dtype="bf16")
    resolved = student_ds_config(read_ds_config(str(path)), str(path), settings, BatchSplit(4, 4), output_dir="runs/x")
    assert resolved["zero_optimization"]["overlap_comm"] is True
    assert ("offload_optimizer" in resolved["zero_optimization"]) == path.stem.endswith("offload")
    accepted = DeepSpeedConfig(resolved)
    assert accepted.zero_optimization_stage == int(path.stem[4])
    assert accepted.train_batch_size == 16
    assert accepted.gradient_accumulation_steps == 4
    assert accepted.bfloat16_config.enabled
    assert resolved["optimizer"]["params"]["lr"] == 3e-4


def test_disagreement_names_key_values_and_remedy():
    with pytest.raises(UserError, match=r"z.json: gradient_clipping is 0.5, but the run says 1.0: write \"auto\""):
        resolve_ds_config({"gradient_clipping": 0.5}, {"gradient_clipping": 1.0}, "z.json")


def test_agreement_and_auto_pass():
    given = {"gradient_clipping": 1, "optimizer": {"params": {"lr": "auto", "betas": [0.9, 0.999]}}}
    owned = {"gradient_clipping": 1.0, "optimizer.params.lr": 0.1, "optimizer.params.betas": [0.9, 0.999]}
    resolved = resolve_ds_config(given, owned, "z.json")
    assert resolved["optimizer"]["params"] == {"lr": 0.1, "betas": [0.9, 0.999]}
    assert given["optimizer"]["params"]["lr"] == "auto"


def test_auto_that_nobody_fills_is_an_error():
    with pytest.raises(UserError, match=r'zero_optimization\.reduce_bucket_size is "auto"'):
        resolve_ds_config({"zero_optimization": {"reduce_bucket_size": "auto"}}, {}, "z.json")


@pytest.mark.parametrize("name", ["zero3", "./ds_configs/zero3.json"])
def test_shipped_ones_are_found_outside_of_a_checkout(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    shipped = next(path for path in SHIPPED if path.stem == "zero3")
    assert read_ds_config(name) == json.loads(shipped.read_text())
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "ds_configs/zero3.json").write_text('{"gradient_clipping": 7}')
    assert read_ds_config("ds_configs/zero3.json") == {"gradient_clipping": 7}, "a file that is there wins"


@pytest.mark.parametrize("name", ["elsewhere/zero2.json", ""])
def test_missing_file_says_which_ship(name):
    names = "zero1, zero2, zero2_offload, zero3, zero3_offload"
    with pytest.raises(UserError, match=f"--ds_config {name}: neither a file nor a shipped .*; shipped are {names}"):
        read_ds_config(name)


def test_accumulation_is_derived():
    for micro, ranks, expected in ((None, 2, (32, 1)), (8, 2, (8, 4)), (8, 8, (8, 1))):
        assert split_batch(64, micro, ranks) == BatchSplit(*expected)
    for batch, micro, nearest in ((30, 8, 32), (3, 4, 8), (7, None, 8), (41, 4, 40)):
        with pytest.raises(UserError, match=f"the nearest that does is {nearest}$"):
            split_batch(batch, micro, 2)
