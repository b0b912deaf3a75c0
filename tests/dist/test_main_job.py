"""The main job under DeepSpeed: the same numbers however it is cut, killed or sharded."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from llmdistill.factorize.export import export_dense
from llmdistill.run.checkpoints import checkpoints

from support import (
    ROOT,
    environment,
    interrupted_copy,
    largest_difference,
    launch_command,
    log_rows,
    logged,
    weights,
    write_rows,
)


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


LORA = ("--student.lora.rank", "4")
PIVOTED = ("--student.factorize.form", "pivoted", "--student.factorize.embedding_rank", "12")
SHORT = ("--data.max_prompt_length", "96", "--data.max_length", "104")
OWN = ("--method", "kd", "--kd.divergence", "jsd", "--kd.ratio", "1.0", *SHORT)
OWN_ANSWERS = (*OWN, "--data.on_policy", "1.0")
STREAMED = ("--data.streaming", "true", "--data.shuffle_buffer", "100", "--data.bucket_steps", "2")
SAME = {
    "padding to a multiple": ((), ("--data.pad_to_multiple_of", "64"), 1, "zero2"),
    "accumulation": ((), ("--train.micro_batch_size", "2"), 1, "zero2"),
    "a sharded teacher": ((), ("--teacher.sharding", "zero3", "--train.activation_checkpointing", "true"), 2, "zero2"),
    "adapters": (LORA, (), 2, "zero3"),
    "pivoted factors": (PIVOTED, (), 2, "zero3"),
    "answers of the student": (OWN_ANSWERS, (), 2, "zero3"),
    "a stream": (STREAMED, (), 2, "zero2"),
}
"""Settings of a run, and more settings, ranks and a stage that change nothing."""


@pytest.mark.parametrize(("run", "more", "ranks", "ds_config"), SAME.values(), ids=SAME)
def test_what_changes_nothing(trained, run, more, ranks, ds_config):
    assert largest_difference(trained(*run), trained(*run, *more, ranks=ranks, ds_config=ds_config)) < 1e-6


@pytest.mark.parametrize(("run", "ranks", "ds_config"), [((), 2, "zero2"), ((), 2, "zero3"), (LORA, 1, "zero2")])
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


def test_pivoted_factors_are_exported_like_any(trained, tmp_path):
    folder, name = trained(*PIVOTED), "model.layers.0.mlp.up_proj"
    after = weights(folder)
    assert [after[f"{name}.{factor}.weight"].shape for factor in "AB"] == [(6, 32), (42, 6)]
    assert any(after[f"{name}.order"] != torch.arange(48))
    export_dense(folder / "student", tmp_path / "dense")
    both, tokens = (folder / "student", tmp_path / "dense"), torch.arange(20)[None]
    assert torch.allclose(*(AutoModelForCausalLM.from_pretrained(at)(tokens).logits for at in both), atol=1e-5, rtol=0)


def test_the_student_learns_from_its_own_answers(trained):
    own, given = trained(*OWN_ANSWERS), trained(*OWN)
    assert largest_difference(own, given) > 0
    assert min(logged(own, "jsd")) > 0
    # Its answers end within eight tokens, the given ones need not.
    assert logged(own, "tokens") != logged(given, "tokens")


def test_killed_run_goes_on_and_ends_bit_equal(trained, rank_server, launch, settings, tmp_path):
    long = ("--train.steps", "30", "--train.save_every", "5")
    whole = trained(*long)
    folder = tmp_path / "killed"
    arguments = (*settings, "--output_dir", str(folder), *long)
    rank_server.start(arguments).kill_when(lambda: checkpoints(folder))
    assert not (folder / "student").exists(), "the run was over before it could be killed"
    launch(*arguments)
    assert largest_difference(whole, folder) == 0
    assert logged(folder, "step") == list(range(1, 31))
    assert logged(folder, "loss") == logged(whole, "loss")


@pytest.mark.parametrize("run", [(), LORA])
def test_two_ranks_of_zero3_resume_bit_equal(trained, launch, settings, tmp_path, run):
    whole = trained(*run, ranks=2, ds_config="zero3")
    folder = interrupted_copy(whole, tmp_path / "resumed")
    launch(*settings, "--ds_config", "zero3", "--output_dir", str(folder), *run, ranks=2)
    assert largest_difference(whole, folder) == 0
    assert logged(folder, "step") == [1, 2, 3, 4, 5]


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


VALIDATED = shlex.split("""--makd.scale plain --data.valid embedded:valid --train.schedule constant
--train.validate_every 1 --train.learning_rate 0.03 --scoring.models []""")


def test_the_student_of_the_smallest_loss_is_that_of_a_run_that_ends_there(trained):
    best = trained(*VALIDATED, "--train.steps", "6", "--train.keep_best", "loss")
    losses = dict(zip(logged(best, "step"), logged(best, "valid_loss"), strict=True))
    step = min(losses, key=losses.__getitem__)
    assert step < 6, losses
    kept = json.loads((best / "metrics.json").read_text())["kept"]
    assert (kept["step"], kept["value"]) == (step, losses[step])
    assert largest_difference(best, trained(*VALIDATED, "--train.steps", str(step))) == 0
    assert not (best / "best").exists()


def test_the_score_of_the_kept_student_is_the_best_in_the_log_of_sharded_ranks(trained):
    greedy = """--recipe quickstart --student.factorize.weighting none --student.factorize.allocation uniform
    --student.factorize.target_params null --student.factorize.rank 40 --data.tests {} --data.max_length 128
    --train.steps 4 --train.global_batch_size 16 --train.validate_every 2 --train.keep_best score
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
WEIGHTED = f"""--student.factorize.rank null --student.factorize.target_params 60% --student.factorize.form pivoted
--student.factorize.weighting gradients --student.factorize.allocation loss
{CALIBRATION}.examples 16 {CALIBRATION}.micro_batch_size 4""".split()


@pytest.mark.slow
def test_two_ranks_of_a_sharded_teacher_weigh_a_student_as_one_does(trained, tmp_path):
    """A whole teacher and the plain form on two ranks are in test_weighing.py."""
    more = ("--teacher.sharding", "zero3", f"{CALIBRATION}.folder", str(tmp_path / "kept"))
    one, two = trained(*WEIGHTED), trained(*WEIGHTED, *more, ranks=2, ds_config="zero3")
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
    pruned = f"""--method kd --student.factorize.rank null --student.shape 3x16x2x30 --student.init important
    {CALIBRATION}.examples 20 {CALIBRATION}.micro_batch_size 4""".split()
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


def test_only_the_optimizers_step_of_deepspeed_waits_for_a_value(launch, settings, tmp_path):
    # One example a micro batch has no padding.
    more = ("--train.micro_batch_size", "1", "--train.steps", "3", "--train.dtype", "bf16")
    folder = ("--output_dir", str(tmp_path / "run"), "--ds_config", "zero3")
    done = launch(*settings, *folder, *more, program="tests/waiting_run.py")
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["timer"] is False
    assert found["places"], "nothing was watched"
    for stack in found["places"]:
        # On a CPU a loss scales matrices by numbers, where a GPU has kernels that read them there.
        in_loss = any("/llmdistill/losses/" in frame for frame in stack)
        assert in_loss or any(frame.endswith(":_take_model_step") for frame in stack), stack
        assert not any("/transformers/" in frame for frame in stack) or in_loss, stack


def test_finished_run_only_shows_its_table_and_leaves_no_shared_memory_behind(trained, rank_server, launch, settings):
    folder = trained(ranks=2)
    stamp = (folder / "student" / "model.safetensors").stat().st_mtime_ns
    again = launch(*settings, "--output_dir", str(folder), ranks=2)
    assert "trained" in again.stdout
    assert not [path for path in Path("/dev/shm").iterdir() if rank_server.port in path.name]
    assert (folder / "student" / "model.safetensors").stat().st_mtime_ns == stamp


def test_mistake_that_rank_0_finds_is_said_once(trained, launch, settings):
    arguments = ["--output_dir", str(trained()), "--seed", "5"]
    failed = launch(*settings, *arguments, ranks=2, code=2)
    assert failed.stderr.count("error: ") == 1
    assert "it holds a run of another configuration: seed was 0 and is now 5" in failed.stderr
    assert "Traceback" not in failed.stdout + failed.stderr


def test_mistake_reaches_the_user_through_the_launcher(settings):
    command = launch_command(*settings, "--sede", "5", ranks=2)
    failed = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert failed.returncode == 2, failed.stdout + failed.stderr
    assert failed.stderr.count("error: ") == 1
    assert "--sede: there is no such setting; did you mean --seed?" in failed.stderr
    assert "Traceback" not in failed.stdout + failed.stderr


def test_a_malformed_row_of_a_stream_is_said_once(launch, settings, tmp_path):
    rows = [{"instruction": f"Count {n}.", "output": "a b"} for n in range(30)]
    data = write_rows(tmp_path / "bad.jsonl", [*rows, {"instruction": "Count."}])
    given = ("--data.train", str(data), "--data.streaming", "true", "--data.shuffle_buffer", "2")
    done = launch(*settings, "--output_dir", str(tmp_path / "run"), *given, ranks=2, code=2)
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert said == [f"error: {data}:31: the key \"output\" is missing (there are ['instruction']); add it"]


def test_teacher_at_chance_is_warned_of(launch, settings, tmp_path):
    folder = tmp_path / "run"
    words = ("--method", "none", "--data.valid", "embedded:valid", "--scoring.limit", "30")
    done = launch(*settings, "--output_dir", str(folder), *words, "--scoring.decoding", "greedy", *SHORT)
    assert "WARNING" in done.stderr
    (warning,) = json.loads((folder / "metrics.json").read_text())["warnings"]
    assert warning.startswith("the teacher scores at chance on the validation set")
    assert warning in (folder / "report.md").read_text()
