"""The main job under DeepSpeed: the same numbers however it is cut, killed or sharded."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from llmdistill.run.checkpoints import checkpoints

from support import ROOT, environment, interrupted_copy, largest_difference, launch_command, log_rows, logged, weights

pytestmark = pytest.mark.dist


def test_training_moves_the_student_towards_the_teacher(trained):
    folder = trained()
    before, after = load_file(folder / "untrained" / "model.safetensors"), weights(folder)
    assert max(float((before[name] - after[name]).abs().max()) for name in before) > 1e-3
    losses = logged(folder, "loss")
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    names = {"query", "attention", "hidden", "logits", "tokens_per_second", "teacher_share"}
    assert names <= log_rows(folder)[0].keys()


@pytest.mark.parametrize("ds_config", ["zero1", "zero2", "zero3"])
def test_two_ranks_and_every_stage_equal_one_rank(trained, ds_config):
    one, two = trained(), trained(ranks=2, ds_config=ds_config)
    assert largest_difference(one, two) < 1e-6
    # AdamW hardly sees the scale of a gradient.
    norms = [logged(folder, "grad_norm") for folder in (one, two)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_padding_to_a_multiple_changes_nothing(trained):
    assert largest_difference(trained(), trained("--data.pad_to_multiple_of", "64")) < 1e-6


def test_four_accumulation_steps_equal_one_big_batch(trained):
    assert largest_difference(trained(), trained("--train.micro_batch_size", "2")) < 1e-6


def test_sharded_teacher_and_activation_checkpointing_change_nothing(trained):
    lean = trained("--teacher.sharding", "zero3", "--train.activation_checkpointing", "true", ranks=2)
    assert largest_difference(trained(), lean) < 1e-6


def test_bf16_ends_at_the_same_loss(trained):
    runs = {stage: trained("--train.dtype", "bf16", ranks=2, ds_config=stage) for stage in ("zero2", "zero3")}
    exact = logged(trained(), "loss")[-1]
    losses = [logged(folder, "loss")[-1] for folder in runs.values()]
    # bf16 keeps 8 bits: a relative 2^-8 a value.
    assert losses == pytest.approx([exact] * 2, rel=0.02)
    assert weights(runs["zero2"])["model.norm.weight"].dtype == torch.bfloat16


def test_killed_run_goes_on_and_ends_bit_equal(trained, rank_server, launch, settings, tmp_path):
    long = ("--train.steps", "30", "--train.save_every", "5")
    whole = trained(*long)
    folder = tmp_path / "killed"
    arguments = (*settings, "--ds_config", "ds_configs/zero2.json", "--output_dir", str(folder), *long)
    job = rank_server.start(arguments)
    patience = time.monotonic() + 200
    while not checkpoints(folder) and not job.is_over() and time.monotonic() < patience:
        time.sleep(0.01)
    job.kill()
    assert checkpoints(folder)
    assert not (folder / "student").exists(), "the run was over before it could be killed"
    launch(*arguments)
    assert largest_difference(whole, folder) == 0
    assert logged(folder, "step") == list(range(1, 31))
    assert logged(folder, "loss") == logged(whole, "loss")


def test_two_ranks_of_zero3_resume_bit_equal(trained, launch, settings, tmp_path):
    whole = trained(ranks=2, ds_config="zero3")
    folder = interrupted_copy(whole, tmp_path / "resumed")
    launch(*settings, "--ds_config", "ds_configs/zero3.json", "--output_dir", str(folder), ranks=2)
    assert largest_difference(whole, folder) == 0
    assert logged(folder, "step") == [1, 2, 3, 4, 5]


WEIGHTED = (
    *("--student.factorize.rank", "null", "--student.factorize.target_params", "60%"),
    *("--student.factorize.weighting", "gradients", "--student.factorize.allocation", "loss"),
    *("--student.factorize.calibration.examples", "16", "--student.factorize.calibration.micro_batch_size", "4"),
)


def test_two_ranks_of_a_sharded_teacher_weigh_a_student_as_one_does(trained, tmp_path):
    """A whole teacher and the plain form on two ranks are in test_weighing.py."""
    same = (*WEIGHTED, "--student.factorize.form", "pivoted")
    more = ("--teacher.sharding", "zero3", "--student.factorize.calibration.folder", str(tmp_path / "kept"))
    one, two = trained(*same), trained(*same, *more, ranks=2, ds_config="zero3")
    sizes = [json.loads((each / "untrained/config.json").read_text())["quantization_config"] for each in (one, two)]
    assert sizes[0] == sizes[1]
    assert len(set(sizes[0]["modules"].values())) > 3
    assert len(list((tmp_path / "kept/gradients").glob("*.safetensors"))) == 4 * 7
    first, second = (AutoModelForCausalLM.from_pretrained(each / "untrained") for each in (one, two))
    for name in sizes[0]["modules"]:
        # A singular vector is known but for its sign, and pivots may be equally good, so the products are compared.
        products = [each.model.get_submodule(name).weight.detach() for each in (first, second)]
        assert torch.allclose(*products, atol=1e-3 * float(products[0].abs().max())), name
    told = [json.loads((each / "weighting.json").read_text()) for each in (one, two)]
    assert told[0]["tokens"] == told[1]["tokens"] > 16
    assert set(told[0]["ranks"]) <= set(told[0]["spectra"]) == set(told[1]["spectra"])
    assert told[0]["predicted_loss"] == pytest.approx(told[1]["predicted_loss"], rel=1e-3)
    assert told[0]["held_out"] == pytest.approx(told[1]["held_out"], rel=1e-3)


def test_two_ranks_prune_a_student_as_one_does(trained):
    calibration = "--student.factorize.calibration."
    pruned = (
        *("--method", "kd", "--student.factorize.rank", "null", "--student.shape", "3x16x2x30"),
        *("--student.init", "important", f"{calibration}examples", "20", f"{calibration}micro_batch_size", "4"),
    )
    one, two = trained(*pruned), trained(*pruned, "--teacher.sharding", "zero3", ranks=2)
    first, second = (load_file(each / "untrained/model.safetensors") for each in (one, two))
    assert first["model.layers.2.mlp.down_proj.weight"].shape == (16, 30)
    assert all(torch.allclose(first[name], second[name], rtol=1e-6, atol=0) for name in first)
    told = [json.loads((each / "importance.json").read_text()) for each in (one, two)]
    assert told[0]["tokens"] == told[1]["tokens"] > 20
    assert told[0]["layers"] == told[1]["layers"] == sorted(told[0]["layers"])
    assert told[0]["influence"] == pytest.approx(told[1]["influence"], rel=1e-6)
    least = min(range(4), key=lambda layer: told[0]["influence"][layer])
    assert told[0]["layers"] == [layer + 1 for layer in range(4) if layer != least]


def test_finished_run_only_shows_its_table_and_leaves_no_shared_memory_behind(trained, rank_server, launch, settings):
    folder = trained(ranks=2)
    stamp = (folder / "student" / "model.safetensors").stat().st_mtime_ns
    again = launch(*settings, "--ds_config", "ds_configs/zero2.json", "--output_dir", str(folder), ranks=2)
    assert "trained" in again.stdout
    assert not [path for path in Path("/dev/shm").iterdir() if rank_server.port in path.name]
    assert (folder / "student" / "model.safetensors").stat().st_mtime_ns == stamp


def test_mistake_that_rank_0_finds_is_said_once(trained, launch, settings):
    arguments = ["--ds_config", "ds_configs/zero2.json", "--output_dir", str(trained()), "--seed", "5"]
    failed = launch(*settings, *arguments, ranks=2, code=2)
    assert failed.stderr.count("error: ") == 1
    assert "it holds a run of another configuration: seed was 0 and is now 5" in failed.stderr
    assert "Traceback" not in failed.stdout + failed.stderr


def test_mistake_reaches_the_user_through_the_launcher(settings):
    command = launch_command(*settings, "--ds_config", "ds_configs/zero2.json", "--sede", "5", ranks=2)
    failed = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert failed.returncode == 2, failed.stdout + failed.stderr
    assert failed.stderr.count("error: ") == 1
    assert "--sede: there is no such setting; did you mean --seed?" in failed.stderr
    assert "Traceback" not in failed.stdout + failed.stderr


def test_teacher_at_chance_is_warned_of(launch, settings, tmp_path):
    folder = tmp_path / "run"
    words = ["--method", "none", "--data.valid", "embedded:valid", "--scoring.limit", "30"]
    words += ["--scoring.decoding", "greedy"]
    lengths = ["--data.max_prompt_length", "96", "--data.max_length", "104"]
    done = launch(*settings, "--ds_config", "ds_configs/zero2.json", "--output_dir", str(folder), *words, *lengths)
    assert "WARNING" in done.stderr
    (warning,) = json.loads((folder / "metrics.json").read_text())["warnings"]
    assert warning.startswith("the teacher scores at chance on the validation set")
    assert warning in (folder / "report.md").read_text()
