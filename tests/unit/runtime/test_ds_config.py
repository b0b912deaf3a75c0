"""The DeepSpeed configuration: one owner per knob, and what it may say."""

import json
from pathlib import Path
from typing import Any

import pytest
from hostile import refuses

from llmdistill.config import TrainConfig
from llmdistill.errors import UserError
from llmdistill.runtime import ds_check
from llmdistill.runtime.ds_check import check_ds_config, compiles_optimizer
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
    assert compiles_optimizer(resolved) == path.stem.endswith("offload")
    accepted = DeepSpeedConfig(resolved)
    assert accepted.zero_optimization_stage == int(path.stem[4])
    assert (accepted.train_batch_size, accepted.gradient_accumulation_steps) == (16, 4)
    assert accepted.bfloat16_config.enabled
    assert resolved["optimizer"]["params"]["lr"] == 3e-4


def test_disagreement_names_key_values_and_remedy():
    agreeing = {"gradient_clipping": 1, "optimizer": {"params": {"lr": "auto", "betas": [0.9, 0.999]}}}
    owned = {"gradient_clipping": 1.0, "optimizer.params.lr": 0.1, "optimizer.params.betas": [0.9, 0.999]}
    resolved = resolve_ds_config(agreeing, owned, "z.json")
    assert resolved["optimizer"]["params"] == {"lr": 0.1, "betas": [0.9, 0.999]}
    assert agreeing["optimizer"]["params"]["lr"] == "auto"
    said = 'z.json: gradient_clipping is 0.5, but the run says 1.0: write "auto"'
    refuses(said, resolve_ds_config, {"gradient_clipping": 0.5}, owned, "z.json")


def test_auto_that_nobody_fills_is_an_error():
    given = {"zero_optimization": {"reduce_bucket_size": "auto"}}
    refuses('zero_optimization.reduce_bucket_size is "auto"', resolve_ds_config, given, {}, "z.json")


@pytest.mark.parametrize("name", ["zero3", "./ds_configs/zero3.json"])
def test_shipped_ones_are_found_outside_of_a_checkout(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    shipped = next(path for path in SHIPPED if path.stem == "zero3")
    assert read_ds_config(name) == json.loads(shipped.read_text())
    (tmp_path / "ds_configs").mkdir()
    (tmp_path / "ds_configs/zero3.json").write_text('{"gradient_clipping": 7}')
    assert read_ds_config("ds_configs/zero3.json") == {"gradient_clipping": 7}, "a file that is there wins"
    refuses("; shipped are zero1, zero2, zero2_offload, zero3, zero3_offload", read_ds_config, "elsewhere/zero2.json")


def test_accumulation_is_derived():
    for micro, ranks, expected in ((None, 2, (32, 1)), (8, 2, (8, 4)), (8, 8, (8, 1))):
        assert split_batch(64, micro, ranks) == BatchSplit(*expected)
    for batch, micro, nearest in ((30, 8, 32), (3, 4, 8), (7, None, 8), (41, 4, 40)):
        with pytest.raises(UserError, match=f"the nearest that does is {nearest}$"):
            split_batch(batch, micro, 2)


DS_CONFIGS: list[tuple[dict[str, Any] | str, str]] = [
    ({"fp16": True}, "fp16 is true: expected a block"),
    ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage is 7: give 0, 1, 2 or 3"),
    ({"zero_optimization": {"reduce_bucket_size": float("nan")}}, "zero_optimization.reduce_bucket_size is nan"),
    ({"zero_optimization": {"stag": 2}}, "did you mean zero_optimization.stage?"),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "gpu"}}},
        "'gpu': DeepSpeed refuses it (input should be 'no",
    ),
    ({"gradient_cliping": 1.0}, "gradient_cliping: DeepSpeed has no such setting; did you mean gradient_clipping?"),
    ({"gradient_allreduce_op": "sume"}, "DeepSpeed refuses the configuration (Invalid gradient_allreduce_op."),
    ({"optimizer": {"type": "Adem"}}, "optimizer.type is 'Adem', which DeepSpeed does not have; did you mean Adam?"),
    ({"optimizer": {"type": "SGD"}}, "optimizer.params.betas: SGD has no such parameter"),
    ({"scheduler": {"type": "WarmupLR"}}, "scheduler: the learning rate is the run's"),
    ({"fp16": {"enabled": True}}, "fp16.enabled: half precision is bf16"),
    ("[]", "z.json:1: a list, not a JSON object"),
    ("[" * 28_000, "z.json:1: not valid JSON (nested too deeply)"),
    ('{\n"seed": ' + "1" * 5_000 + "}", "z.json:2: not valid JSON (a number with too many digits)"),
    ('{"a": "\\ud800"}', "z.json:1: not valid JSON (a \\ud... escape without its other half"),
]


def merged(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    blocks = {key: value for key, value in change.items() if isinstance(value, dict) and key in config}
    return {**config, **change, **{key: merged(config[key], value) for key, value in blocks.items()}}


def ds_file(folder: Path, change: dict[str, Any] | str) -> str:
    shipped = read_ds_config("zero2")
    file = folder / "z.json"
    file.write_text(change if isinstance(change, str) else json.dumps(merged(shipped, change)))
    return str(file)


def check(path: str) -> None:
    settings = TrainConfig(dtype="bf16")
    check_ds_config(student_ds_config(read_ds_config(path), path, settings, BatchSplit(64, 1), output_dir="o"), path)


@pytest.mark.parametrize(("change", "said"), DS_CONFIGS, ids=lambda each: str(each)[:40])
def test_a_ds_config(tmp_path, change, said):
    refuses(said, check, ds_file(tmp_path, change))


def test_what_deepspeed_knows_is_not_refused(tmp_path):
    blocks = {
        "activation_checkpointing": {"partition_activations": True, "number_checkpoints": None, "profile": False},
        "comms_logger": {"enabled": False, "verbose": True},
        "checkpoint": {"tag_validation": "Warn", "parallel_write": {"pipeline_stage": False}},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 2e8, "stage3_gather_16bit_weights_on_model_save": True},
        "optimizer": {"params": {"fused": True, "torch_adam": True}},
    }
    adam = {"optimizer": {"type": "Adam", "params": {"torch_adam": False, "adam_w_mode": True}}}
    for change in (blocks, adam):
        check(ds_file(tmp_path, change))


def test_every_key_that_deepspeed_reads_is_known():
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, DeepSpeedConfig

    read: set[str] = set()

    class Watched(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            read.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            read.add(str(key))
            return super().__contains__(key)

        def keys(self) -> Any:
            return self

    DeepSpeedConfig(Watched(train_micro_batch_size_per_gpu=1))
    assert len(read) > 40
    assert read - _REMOVED_TOP_LEVEL_CONFIG_KEYS.keys() <= ds_check._keys(ds_check.top_level()).keys()
