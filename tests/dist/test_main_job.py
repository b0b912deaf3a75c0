"""The main job under DeepSpeed: the same numbers however it is cut, killed or sharded."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.cpp_extension import get_default_build_root

from llmdistill.training.checkpoints import checkpoints

from support import ROOT, interrupted_copy, largest_difference, logged, weights


@pytest.mark.parametrize("ds_config", ["zero2", "zero3"])  # zero1 is in test_few_bits.py
def test_two_ranks_equal_one_rank(trained, ds_config):
    one, two = trained(), trained(ranks=2, ds_config=ds_config)
    assert largest_difference(one, two) < 1e-6
    # AdamW hardly sees the scale of a gradient.
    norms = [logged(folder, "grad_norm") for folder in (one, two)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_cpus_needs_no_compiler(launch, settings, tmp_path, monkeypatch, ranks):
    extensions = tmp_path / "extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "none")
    launch(*settings, "--output_dir", str(tmp_path / "run"), "--train.steps", "1", ranks=ranks)
    assert (tmp_path / "run" / "student" / "model.safetensors").exists()
    assert not extensions.exists()
    offload = ("--ds_config", "zero2_offload", "--output_dir", str(tmp_path / "other"))
    assert "DeepSpeed compiles this optimizer, but no C++" in launch(*settings, *offload, ranks=ranks, code=2).stderr


LORA = ("--student.lora.rank", "4")
PIVOTED = ("--student.factorize.form", "pivoted", "--student.factorize.embedding_rank", "12")
OWN = shlex.split("""--method kd --kd.divergence jsd --kd.ratio 1.0 --data.max_prompt_length 96 --data.max_length 104
--data.streaming true --data.shuffle_buffer 100 --data.bucket_steps 2""")
OWN_ANSWERS = (*OWN, "--data.on_policy", "1.0")
OTHERWISE = ("--data.pad_to_multiple_of", "64", "--train.micro_batch_size", "2", "--teacher.sharding", "zero3")
SAME = {
    "padding, accumulation and shards": ((), (*OTHERWISE, "--train.activation_checkpointing", "true"), 2, "zero2"),
    "adapters": (LORA, (), 2, "zero3"),
    "pivoted factors": (PIVOTED, (), 2, "zero3"),
    "answers of the student to a stream": (OWN_ANSWERS, (), 2, "zero3"),
}
"""Settings of a run, and more settings, ranks and a stage that change nothing."""


@pytest.mark.parametrize(("run", "more", "ranks", "ds_config"), SAME.values(), ids=SAME)
def test_what_changes_nothing(trained, run, more, ranks, ds_config):
    assert largest_difference(trained(*run), trained(*run, *more, ranks=ranks, ds_config=ds_config)) < 1e-6


@pytest.mark.parametrize(("run", "ranks", "ds_config"), [((), 2, "zero2"), (LORA, 1, "zero2")])
def test_bf16_ends_at_the_same_loss(trained, run, ranks, ds_config):
    folder = trained(*run, "--train.dtype", "bf16", ranks=ranks, ds_config=ds_config)
    # bf16 keeps 8 bits: a relative 2^-8 a value.
    assert logged(folder, "loss")[-1] == pytest.approx(logged(trained(*run), "loss")[-1], rel=0.02)
    assert weights(folder)["model.norm.weight"].dtype == torch.bfloat16


LAYER_WEIGHT, ORDER = re.compile(r".*\.layers\..*(proj|A|B)\.weight"), re.compile(r".*\.order")


@pytest.mark.parametrize(
    ("run", "trains"),
    [(LORA, lambda name: LAYER_WEIGHT.fullmatch(name)), (PIVOTED, lambda name: not ORDER.fullmatch(name))],
)
def test_the_student_has_the_structure_of_the_untrained_one(trained, run, trains):
    folder = trained(*run)
    before, after = load_file(folder / "untrained" / "model.safetensors"), weights(folder)
    shapes = [{name: (each.shape, each.dtype) for name, each in state.items()} for state in (before, after)]
    assert shapes[0] == shapes[1]
    assert all(torch.equal(each, after[name]) != bool(trains(name)) for name, each in before.items())
    configs = [json.loads((folder / name / "config.json").read_text()) for name in ("untrained", "student")]
    assert configs[0] == configs[1]
    assert configs[0]["quantization_config"]["modules"]


def test_the_student_learns_from_its_own_answers(trained):
    own, given = trained(*OWN_ANSWERS), trained(*OWN)
    assert largest_difference(own, given) > 0
    assert min(logged(own, "jsd")) > 0
    # Its answers end within eight tokens, the given ones need not.
    assert logged(own, "tokens") != logged(given, "tokens")


def test_killed_run_goes_on_and_ends_bit_equal(trained, rank_server, launch, settings, tmp_path):
    long = ("--train.steps", "12")
    whole = trained(*long)
    folder = tmp_path / "killed"
    arguments = (*settings, "--output_dir", str(folder), *long)
    rank_server.start(arguments).kill_when(lambda: checkpoints(folder))
    assert not (folder / "student").exists(), "the run was over before it could be killed"
    launch(*arguments)
    assert largest_difference(whole, folder) == 0
    assert logged(folder, "step") == list(range(1, 13))
    assert logged(folder, "loss") == logged(whole, "loss")


def test_two_ranks_of_zero3_resume_adapters_bit_equal(trained, launch, settings, tmp_path):
    whole = trained(*LORA, ranks=2, ds_config="zero3")
    folder = interrupted_copy(whole, tmp_path / "resumed")
    launch(*settings, "--ds_config", "zero3", "--output_dir", str(folder), *LORA, ranks=2)
    assert largest_difference(whole, folder) == 0
    assert logged(folder, "step") == [1, 2, 3, 4, 5]


@pytest.fixture
def quick_compiler(monkeypatch):
    """Extensions are compiled without optimization, into a folder that no run outside of the tests reads."""
    monkeypatch.setenv("CXX", str(ROOT / "tests" / "quick_compiler.sh"))
    folder = os.environ.get("TORCH_EXTENSIONS_DIR", get_default_build_root())
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", f"{folder}/of_tests")


@pytest.mark.parametrize(("before", "stage", "after", "other_stage", "more"), [
    pytest.param(2, "zero3", 1, "zero1", (), id="fewer ranks of a lower stage"),
    pytest.param(1, "zero2", 2, "zero3", ("--train.micro_batch_size", "2"), id="more ranks of a higher stage"),
    # DeepSpeed's Adam for the CPU is compiled first, for half a minute.
    pytest.param(2, "zero3", 2, "zero2_offload", (), id="the optimizer on the CPU", marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.usefixtures("quick_compiler")
def test_a_run_goes_on_at_another_layout(trained, launch, settings, tmp_path, before, stage, after, other_stage, more):
    folder = interrupted_copy(trained(ranks=before, ds_config=stage), tmp_path / "resumed")
    kept = {path.name: path.stat().st_mtime_ns for path in (folder / "checkpoints" / "step-4").iterdir()}
    done = launch(*settings, "--ds_config", other_stage, "--output_dir", str(folder), *more, ranks=after)
    assert ("was saved by" in done.stdout) == (before != after)
    assert {path.name: path.stat().st_mtime_ns for path in (folder / "checkpoints" / "step-4").iterdir()} == kept
    assert largest_difference(trained(), folder) < 1e-6


def test_bf16_goes_on_from_its_exact_weights(trained, launch, settings, tmp_path):
    bf16 = ("--train.dtype", "bf16")
    whole = trained(*bf16, ranks=2)
    folder = interrupted_copy(whole, tmp_path / "resumed")
    launch(*settings, "--ds_config", "zero3", "--output_dir", str(folder), *bf16, ranks=2)
    first, second = weights(whole), weights(folder)
    differing = sum(int((first[name] != second[name]).sum()) for name in first) / sum(x.numel() for x in first.values())
    assert differing < 0.02  # weights that lie between two values of bf16


def test_bf16_without_zero_goes_on_bit_equal(trained, launch, settings, tmp_path):
    """The optimizer steps fp32 copies of the weights there, which no partition of ZeRO names."""
    stage_0 = tmp_path / "stage0.json"
    blocks = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 0}}
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
    stage_0.write_text(json.dumps({**blocks, "bf16": {"enabled": "auto"}, "optimizer": optimizer}))
    bf16 = ("--train.dtype", "bf16")
    whole = trained(*bf16, ds_config=str(stage_0))
    folder = interrupted_copy(whole, tmp_path / "resumed")
    launch(*settings, "--ds_config", str(stage_0), "--output_dir", str(folder), *bf16)
    assert largest_difference(whole, folder) == 0
    assert logged(folder, "loss") == logged(whole, "loss")


def test_the_score_of_the_kept_student_is_the_best_in_the_log_of_sharded_ranks(trained):
    greedy = """--recipe quickstart --student.factorize.weighting none --student.factorize.allocation uniform
    --student.factorize.target_params null --student.factorize.rank 40 --data.tests {} --data.max_prompt_length 96
    --data.max_length 108 --train.steps 4 --train.global_batch_size 16 --train.validate_every 2 --train.keep_best score
    --scoring.decoding greedy --scoring.limit 2 --scoring.models student"""
    run = trained(*greedy.split(), ranks=2, ds_config="zero3")
    scores = logged(run, "valid_score")
    metrics = json.loads((run / "metrics.json").read_text())
    assert len(scores) == 2
    assert max(scores) > 0
    # The kept student is loaded and scored again.
    assert metrics["student"]["valid"]["rougeL"] == pytest.approx(max(scores), abs=1e-9)
    assert (metrics["kept"]["value"], metrics["kept"]["metric"]) == (max(scores), "ROUGE-L")
    sentence = f"The student is that of step {metrics['kept']['step']}, the best validation (ROUGE-L {max(scores):.4g})"
    assert sentence in (run / "report.md").read_text()


CALIBRATION = "--student.factorize.calibration"


@pytest.mark.slow
def test_two_ranks_of_a_sharded_teacher_weigh_a_student_as_one_does(trained):
    """The factors of two ranks are compared in test_weighing.py."""
    weighted = f"""--student.factorize.rank null --student.factorize.target_params 85% --student.factorize.form pivoted
    --student.factorize.weighting gradients --student.factorize.allocation loss --train.steps 1
    {CALIBRATION}.examples 16 {CALIBRATION}.micro_batch_size 4""".split()
    one, two = trained(*weighted), trained(*weighted, "--teacher.sharding", "zero3", ranks=2)
    told = [json.loads((each / "weighting.json").read_text()) for each in (one, two)]
    assert told[0]["ranks"] == told[1]["ranks"]
    assert len(set(told[0]["ranks"].values())) > 3
    assert told[0]["tokens"] == told[1]["tokens"] > 16
    for name in ("predicted_loss", "held_out"):
        assert told[0][name] == pytest.approx(told[1][name], rel=1e-3)
    metrics = json.loads((one / "metrics.json").read_text())
    ranks = sorted(told[0]["ranks"].values())
    student = metrics["run"]["about"]["Student"]
    assert student.startswith(f"svd, {metrics['untrained']['params']:,} parameters (")
    assert student.endswith(f", rank {ranks[0]} to {ranks[-1]}")


def test_two_ranks_prune_a_student_as_one_does(trained):
    pruned = f"""--method kd --student.factorize.rank null --student.shape 1x16x2x30 --student.init important
    --train.steps 1 {CALIBRATION}.examples 20 {CALIBRATION}.micro_batch_size 4""".split()
    one, two = trained(*pruned), trained(*pruned, "--teacher.sharding", "zero3", ranks=2)
    first, second = (load_file(each / "untrained/model.safetensors") for each in (one, two))
    assert first["model.layers.0.mlp.down_proj.weight"].shape == (16, 30)
    assert all(torch.allclose(first[name], second[name], rtol=1e-6, atol=0) for name in first)
    told = [json.loads((each / "importance.json").read_text()) for each in (one, two)]
    assert told[0]["tokens"] == told[1]["tokens"] > 20
    assert told[0]["layers"] == told[1]["layers"]
    assert told[0]["influence"] == pytest.approx(told[1]["influence"], rel=1e-6)
    most = max(range(2), key=lambda layer: told[0]["influence"][layer])
    assert told[0]["layers"] == [most + 1]


def test_a_finished_run_shows_its_table_and_is_not_taken_for_another(trained, rank_server, launch, settings):
    folder = trained(ranks=2)
    stamp = (folder / "student" / "model.safetensors").stat().st_mtime_ns
    assert "trained" in launch(*settings, "--output_dir", str(folder), ranks=2).stdout
    assert not [path for path in Path("/dev/shm").iterdir() if rank_server.port in path.name]
    failed = launch(*settings, "--output_dir", str(folder), "--seed", "5", ranks=2, code=2)
    assert failed.stderr.count("error: ") == 1, "rank 0 finds it"
    assert "it holds a run of another configuration: seed was 0 and is now 5" in failed.stderr
    assert "Traceback" not in failed.stdout + failed.stderr
    assert (folder / "student" / "model.safetensors").stat().st_mtime_ns == stamp
