"""What a DeepSpeed configuration may say, checked before DeepSpeed reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hostile import refuses

from llmdistill.config import TrainConfig
from llmdistill.runtime import ds_check
from llmdistill.runtime.ds_check import check_ds_config
from llmdistill.runtime.ds_config import SHIPPED, read_ds_config
from llmdistill.runtime.engine import BatchSplit, student_ds_config

DS_CONFIGS: list[tuple[dict[str, Any] | str, str]] = [
    ({"fp16": True}, "fp16 is true: expected a block"),
    ({"optimizer": {"params": 3}}, "optimizer.params is 3: expected a block"),
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
    ("{\n'a': 1}", "z.json:2: not valid JSON"),
    ("[" * 28_000, "z.json:1: not valid JSON (nested too deeply)"),
    ('{\n"seed": ' + "1" * 5_000 + "}", "z.json:2: not valid JSON (a number with too many digits)"),
    ('{"a": "\\ud800"}', "z.json:1: not valid JSON (a \\ud... escape without its other half"),
]


def merged(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    blocks = {key: value for key, value in change.items() if isinstance(value, dict) and key in config}
    return {**config, **change, **{key: merged(config[key], value) for key, value in blocks.items()}}


def ds_file(folder: Path, change: dict[str, Any] | str) -> str:
    shipped = json.loads((SHIPPED / "zero2.json").read_text())
    file = folder / "z.json"
    file.write_text(change if isinstance(change, str) else json.dumps(merged(shipped, change)))
    return str(file)


def check(path: str) -> None:
    settings = TrainConfig(dtype="bf16")
    check_ds_config(student_ds_config(read_ds_config(path), path, settings, BatchSplit(64, 1), output_dir="o"), path)


@pytest.mark.parametrize(("change", "said"), DS_CONFIGS, ids=lambda each: str(each)[:40])
def test_a_ds_config(tmp_path, change, said):
    refuses(said, check, ds_file(tmp_path, change))


ACCEPTED: list[dict[str, Any]] = [
    {
        "activation_checkpointing": {"partition_activations": True, "number_checkpoints": None, "profile": False},
        "comms_logger": {"enabled": False, "verbose": True},
        "checkpoint": {"tag_validation": "Warn", "parallel_write": {"pipeline_stage": False}},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 2e8, "stage3_gather_16bit_weights_on_model_save": True},
        "optimizer": {"params": {"fused": True, "torch_adam": True}},
    },
    {"optimizer": {"type": "Adam", "params": {"torch_adam": False, "adam_w_mode": True}}},
]


@pytest.mark.parametrize("change", ACCEPTED, ids=["blocks", "Adam"])
def test_what_deepspeed_knows_is_not_refused(tmp_path, change):
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
    assert read - _REMOVED_TOP_LEVEL_CONFIG_KEYS.keys() <= ds_check._keys(ds_check._top_level()).keys()
