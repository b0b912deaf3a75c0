"""What broke a run with a traceback, or far into it, and the sentence that meets it now."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hostile import refuses

import llmdistill
from llmdistill.cli import main as llmdistill_command
from llmdistill.config import TrainConfig
from llmdistill.errors import UserError
from llmdistill.files import new_folder, refused_by_system, write_json
from llmdistill.runtime import ds_check
from llmdistill.runtime.ds_check import check_ds_config
from llmdistill.runtime.ds_config import SHIPPED, read_ds_config
from llmdistill.runtime.engine import BatchSplit, student_ds_config
from llmdistill.train import main

# DeepSpeed's configuration: each change of zero2.json, or the text of a file, and what is said.

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
    ({"timers": {"throughput": {"enabld": True}}}, "did you mean timers.throughput.enabled?"),
    ({"aio": 5}, "aio is 5: DeepSpeed refuses it"),
    ({"gradient_allreduce_op": "sume"}, "DeepSpeed refuses the configuration (Invalid gradient_allreduce_op."),
    ({"optimizer": {"type": "Adem"}}, "optimizer.type is 'Adem', which DeepSpeed does not have; did you mean Adam?"),
    ({"optimizer": {"type": "SGD"}}, "optimizer.params.betas: SGD has no such parameter"),
    ({"optimizer": {"params": {"beta": 1}}}, "optimizer.params.beta: AdamW has no such parameter, only"),
    ("[" * 28_000, "z.json:1: not valid JSON (nested too deeply)"),
    ('{\n"seed": ' + "1" * 5_000 + "}", "z.json:2: not valid JSON (a number with too many digits)"),
    ('{"a": "\\ud800"}', "z.json:1: not valid JSON (a \\ud... escape without its other half"),
]


def merged(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    inner = {key: merged(config[key], value) for key, value in change.items() if both(config.get(key), value)}
    return {**config, **change, **inner}


def both(first: Any, second: Any) -> bool:
    return isinstance(first, dict) and isinstance(second, dict)


def ds_file(folder: Path, change: dict[str, Any] | str) -> str:
    shipped = json.loads((SHIPPED / "zero2.json").read_text())
    file = folder / "z.json"
    file.write_text(change if isinstance(change, str) else json.dumps(merged(shipped, change)))
    return str(file)


def check(path: str) -> None:
    settings = TrainConfig(dtype="bf16")
    check_ds_config(student_ds_config(read_ds_config(path), path, settings, BatchSplit(64, 1), output_dir="o"), path)


@pytest.mark.parametrize(("change", "said"), DS_CONFIGS, ids=lambda each: str(each)[:40])
def test_a_ds_config(tmp_path: Path, change: dict[str, Any] | str, said: str) -> None:
    refuses(said, check, ds_file(tmp_path, change))


ACCEPTED: list[dict[str, Any]] = [
    {"activation_checkpointing": {"partition_activations": True, "number_checkpoints": None, "profile": False}},
    {"comms_logger": {"enabled": False, "verbose": True}, "steps_per_print": 10, "prescale_gradients": False},
    {"checkpoint": {"tag_validation": "Warn", "parallel_write": {"pipeline_stage": False}}, "dump_state": False},
    {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32", "memory_breakdown": True},
    {"zero_optimization": {"stage": 3, "reduce_bucket_size": 2e8, "stage3_gather_16bit_weights_on_model_save": True}},
    {"optimizer": {"params": {"fused": True, "torch_adam": True}}, "zero_allow_untested_optimizer": True},
    {
        "optimizer": {
            "type": "Adam",
            "params": {"torch_adam": False, "adam_w_mode": True, "fp32_optimizer_states": True},
        }
    },
]


@pytest.mark.parametrize("change", ACCEPTED, ids=lambda each: ", ".join(each))
def test_what_deepspeed_knows_is_not_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    check(ds_file(tmp_path, change))


def test_every_key_that_deepspeed_reads_is_known() -> None:
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


def test_names_in_python_stay_in_their_folder(tmp_path: Path) -> None:
    rows = [{"instruction": "a", "output": "b"}]
    with pytest.raises(UserError, match=r"data has the name '../x'"):
        llmdistill.evaluate("embedded:teacher", {"../x": rows}, output=tmp_path)


# The disk.


def run_to(folder: Path) -> list[str]:
    return ["--ds_config", "zero2", "--output_dir", str(folder)]


def test_a_file_in_the_place_of_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmdistill.runtime.distributed.process_group", lambda *_: pytest.fail("the ranks join"))
    file = tmp_path / "file"
    file.write_text("mine")
    for folder, said in (
        (file, f"--output_dir {file}: {file} is a file; give another folder"),
        (file / "a" / "b", f"{file} is a file; give another folder"),
        (tmp_path / ("n" * 400), "--output_dir has the name 'nnn"),
    ):
        assert main(run_to(folder)) == 2
        assert said in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "mine"


def test_a_place_where_no_folder_can_be_made_is_met_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmdistill.tasks import answers

    monkeypatch.setattr("llmdistill.runtime.distributed.process_group", lambda *_, **__: pytest.fail("the ranks join"))
    monkeypatch.setattr(answers, "evaluate_model", lambda *_, **__: pytest.fail("the model is loaded"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = ["--model", "embedded:teacher"]
    weighting = ["--student.factorize.weighting", "gradients", "--student.factorize.calibration.folder"]
    made = ["--ds_config", "zero2", "--output_dir", str(tmp_path / "run")]
    commands = {
        "--output_dir": ["train.py", "--ds_config", "zero2", "--output_dir"],
        "--student.factorize.calibration.folder": ["train.py", *made, *weighting],
        "--output": ["evaluate", *model, "--data", "embedded:valid", "--output"],
        "--output_dir of a suite": ["evaluate", "--suite", "speed", *model, "--output_dir"],
        "--output_dir of tasks": ["evaluate", "--suite", "glue", *model, "--output_dir"],
    }
    why = "no such file or directory|operation not permitted|permission denied"  # by place and user
    for place in ("/proc", "/sys"):
        for key, (name, *arguments) in commands.items():
            words = [*arguments, f"{place}/x/y"]
            assert (main(words) if name == "train.py" else llmdistill_command([name, *words])) == 2, key
            said = capsys.readouterr().err
            setting = key.partition(" ")[0]
            found = re.search(rf"error: {setting} {place}/x/y: no folder can be made in {place} \(({why})\)", said)
            assert found, (key, said)
    assert not list(tmp_path.iterdir())


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as write() raises it, without a name


def test_a_full_disk_is_named_with_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def student() -> None:
        with new_folder(tmp_path / "student") as partial:
            (partial / "model").write_text("half")
            raise full()

    monkeypatch.setattr(Path, "write_text", lambda *_, **__: (_ for _ in ()).throw(full()))
    for call, name in ((student, "student"), (lambda: write_json(tmp_path / "run.json", {}), "run.json")):
        with pytest.raises(UserError, match=r"B of .* are free on the disk at /") as caught:
            call()
        assert str(caught.value).startswith(f"{tmp_path / name}: no space left on device, ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_what_a_library_says_of_the_disk_is_understood(tmp_path: Path, number: int) -> None:
    words = os.strerror(number)
    with pytest.raises(UserError, match=rf"/student: .*{words.lower()}"), new_folder(tmp_path / "student"):
        raise RuntimeError(f"Error while serializing: I/O error: {words} (os error {number})")
    assert refused_by_system(FileNotFoundError(errno.ENOENT, "no such file", "x")) is None
    assert refused_by_system(ValueError("other")) is None
