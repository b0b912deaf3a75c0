"""Checkpoints: a run goes on at any layout, and a damaged checkpoint is noticed."""

from __future__ import annotations

import re

import pytest

from llmdistill.run.checkpoints import checkpoints

from support import interrupted_copy, largest_difference, weights

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    ("before", "stage", "after", "other_stage", "more"),
    [
        pytest.param(2, "zero2", 1, "zero3", (), id="fewer ranks of a higher stage"),
        pytest.param(1, "zero3", 2, "zero1", ("--train.micro_batch_size", "2"), id="more ranks of a lower stage"),
        # DeepSpeed's Adam for the CPU is compiled first, for minutes.
        pytest.param(2, "zero3", 2, "zero2_offload", (), id="the optimizer on the CPU", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_at_another_layout(trained, launch, settings, tmp_path, before, stage, after, other_stage, more):
    folder = interrupted_copy(trained(ranks=before, ds_config=stage), tmp_path / "resumed")
    kept = {path.name: path.stat().st_mtime_ns for path in (folder / "checkpoints" / "step-4").iterdir()}
    done = launch(
        *(*settings, "--ds_config", f"ds_configs/{other_stage}.json", "--output_dir", str(folder), *more), ranks=after
    )
    assert ("was saved by" in done.stdout) == (before != after)
    assert {path.name: path.stat().st_mtime_ns for path in (folder / "checkpoints" / "step-4").iterdir()} == kept
    assert largest_difference(trained(), folder) < 1e-6


def test_bf16_goes_on_from_its_exact_weights(trained, launch, settings, tmp_path):
    bf16 = ("--train.dtype", "bf16")
    whole = trained(*bf16, ranks=2)
    folder = interrupted_copy(whole, tmp_path / "resumed")
    launch(*settings, "--ds_config", "ds_configs/zero3.json", "--output_dir", str(folder), *bf16, ranks=2)
    first, second = weights(whole), weights(folder)
    differing = sum(int((first[name] != second[name]).sum()) for name in first) / sum(x.numel() for x in first.values())
    assert differing < 0.02  # weights that lie between two values of bf16


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(trained, launch, settings, tmp_path):
    whole = trained("--train.keep_checkpoints", "3")
    folder = interrupted_copy(whole, tmp_path / "damaged")
    flip_a_byte(folder / "checkpoints" / "step-4" / "rank-00000.safetensors")
    arguments = (*settings, "--ds_config", "ds_configs/zero2.json", "--output_dir", str(folder))
    done = launch(*arguments)
    assert "step-4/rank-00000.safetensors changed after it was written" in "".join(
        re.findall(r"│ (.*?) *│", done.stderr)
    )
    assert largest_difference(whole, folder) == 0
    assert {path.name for path in (folder / "checkpoints").iterdir()} >= {"damaged-step-4", "step-4", "step-5"}

    none = interrupted_copy(whole, tmp_path / "none")
    for checkpoint in checkpoints(none):
        (checkpoint.folder / "rank-00000.safetensors").unlink()
    done = launch(*arguments[:-1], str(none), code=2)
    assert "no checkpoint is whole" in done.stderr


def flip_a_byte(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
