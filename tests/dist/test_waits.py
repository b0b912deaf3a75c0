"""With a real engine a step waits for the device only where DeepSpeed's optimizer step looks at the norm."""

import json
from pathlib import Path

WAITING_RUN = str(Path(__file__).parents[1] / "waiting_run.py")


def test_only_the_optimizers_step_looks_at_a_value(launch, settings, tmp_path):
    # One example a micro batch has no padding.
    more = ("--train.micro_batch_size", "1", "--train.steps", "3", "--train.dtype", "bf16")
    folder = ("--output_dir", str(tmp_path / "run"), "--ds_config", "zero3")
    done = launch(*settings, *folder, *more, program=WAITING_RUN)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["timer"] is False
    assert found["places"], "nothing was watched"
    for stack in found["places"]:
        # On a CPU a loss scales matrices by numbers, where a GPU has kernels that read them there.
        in_loss = any("/llmdistill/losses/" in frame for frame in stack)
        assert in_loss or any(frame.endswith(":_take_model_step") for frame in stack), stack
        assert not any("/transformers/" in frame for frame in stack) or in_loss, stack
