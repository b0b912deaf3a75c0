"""Numbers that go wrong in a real run: it names where, keeps its good checkpoint, and goes on with a lower rate."""

import json
import shutil

import torch
from safetensors.torch import load_file, save_file


def said_by(done) -> str:
    return " ".join(done.stderr.replace("│", "").split())


def test_an_overflow_in_the_teacher_is_named_and_nothing_is_saved(launch, settings, tiny_teacher, tmp_path):
    """Its weights are finite, and their product is inf, in the second layer."""
    run, teacher = tmp_path / "run", tmp_path / "teacher"
    shutil.copytree(tiny_teacher, teacher)
    state = load_file(teacher / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"] = torch.full_like(state["model.layers.1.mlp.up_proj.weight"], 3e38)
    save_file(state, teacher / "model.safetensors", metadata={"format": "pt"})
    shape = ("--method", "kd", "--student.factorize.rank", "null", "--student.shape", "1x32x4")
    student = (*shape, "--teacher.model", str(teacher))
    done = launch(*settings, *student, "--output_dir", str(run), ranks=2, code=2)
    said = said_by(done)
    assert "step 3 was skipped, because its gradient is not finite" in said
    assert "on rank 0, 1, in the micro batches of the samples" in said
    assert "with an output that is not finite is the teacher, in model.layers.1.mlp.up_proj" in said
    assert not (run / "student").exists()
    assert {each.name for each in (run / "not_finite").iterdir()} == {"step-1", "step-2", "step-3", "ended.json"}
    assert len(list((run / "not_finite" / "step-2").glob("rank-*.safetensors"))) == 2


def test_a_run_that_burst_goes_on_with_a_lower_learning_rate(faulty, launch, settings, tmp_path):
    """Without ZeRO, DeepSpeed applies a step of any gradient: the student is ruined, and no checkpoint has it."""
    stage_0, run = tmp_path / "stage0.json", tmp_path / "run"
    blocks = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 0}}
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
    stage_0.write_text(json.dumps({**blocks, "gradient_clipping": "auto", "optimizer": optimizer}))
    shared = (*settings, "--ds_config", str(stage_0), "--output_dir", str(run), "--train.save_every", "2")
    done = faulty("rate", "3e37", "0", *shared)
    assert done.returncode == 2
    assert "which goes on from the last checkpoint" in said_by(done), done.stderr
    assert not (run / "checkpoints").exists(), "the first step was finite and is not saved after the second"
    done = launch(*shared, "--train.learning_rate", "2e-3", code=2)
    assert "train.learning_rate was 0.001 and is now 0.002" in said_by(done)
    launch(*shared, "--train.learning_rate", "5e-4")
    (warning,) = json.loads((run / "metrics.json").read_text())["warnings"]
    assert warning.startswith("the learning rate was 0.001 until the loss or the gradient was not finite")
    launch(*shared, "--train.learning_rate", "5e-4")  # it is the same run from now on
    assert "train.learning_rate" in said_by(launch(*shared, "--train.learning_rate", "1e-4", code=2))


def test_weights_that_overflow_are_not_saved(faulty, settings, tmp_path):
    """The loss and the gradient of a step are finite, and the weights after it are not."""
    run = tmp_path / "run"
    more = ("--train.save_every", "1", "--train.weight_decay", "10", "--output_dir", str(run))
    done = faulty("rate", "3e38", "0", *settings, *more)
    assert done.returncode == 2
    assert "is not finite after step 1, so nothing is saved" in said_by(done), done.stderr
    assert not list((run / "checkpoints").glob("step-*"))
