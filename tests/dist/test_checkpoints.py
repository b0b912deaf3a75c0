"""Checkpoints: a run goes on at any layout."""

from __future__ import annotations

import pytest

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
