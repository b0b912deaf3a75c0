"""Students of few bits under DeepSpeed: the same numbers however the run is cut, and what learned is saved."""

import json

import pytest
import torch
from safetensors.torch import load_file

from llmdistill.config.student import QuantizeConfig
from llmdistill.models.load import load_model
from llmdistill.models.quantized import fake_quantize

from support import interrupted_copy, largest_difference, logged, weights

pytest.importorskip("torchao")

KD = ("--method", "kd")
INT8 = ("--student.quantize.weights", "int8")
GROUP, EXACT = ("--student.quantize.group_size", "8"), ("--student.quantize.embeddings", "exact")
INT4 = ("--student.quantize.weights", "int4", *GROUP, *EXACT, *KD)
FACTORIZED = (*INT8, "--student.factorize.embedding_rank", "16")
DENSE = (*INT8, *KD, "--student.shape", "1x32x4", "--student.init", "layers")


@pytest.mark.parametrize(("run", "ds_config"), [(FACTORIZED, "zero1"), (DENSE, "zero2")])
def test_two_ranks_equal_one(trained, run, ds_config):
    one, two = trained(*run), trained(*run, ranks=2, ds_config=ds_config)
    assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=1e-4)
    integers = [{name: each for name, each in weights(run).items() if name.endswith("qdata")} for run in (one, two)]
    assert integers[0].keys() == integers[1].keys()
    table = "model.embed_tokens.A" if run is FACTORIZED else "model.embed_tokens"
    assert f"{table}._weight_qdata" in integers[0]
    # Sums of gradients in another order may let a number that is half an integer fall to the other side.
    assert max(int((each.int() - integers[1][name].int()).abs().max()) for name, each in integers[0].items()) <= 1


def test_a_resumed_run_is_bit_equal(trained, launch, settings, tmp_path):
    whole = trained(*INT4)
    folder = interrupted_copy(whole, tmp_path / "resumed")
    launch(*settings, "--ds_config", "zero2", "--output_dir", str(folder), *INT4)
    assert largest_difference(whole, folder) == 0
    assert logged(folder, "loss") == logged(whole, "loss")


def test_the_untrained_student_is_whole_and_the_trained_one_is_what_learned(trained):
    folder = trained(*INT4)
    # It rounds from the first step on.
    assert abs(logged(folder, "loss")[0] - logged(trained(*KD, "--train.steps", "1"), "loss")[0]) > 1e-4
    before, after = load_file(folder / "untrained" / "model.safetensors"), weights(folder)
    name = "model.layers.0.mlp.up_proj.A"
    assert before[f"{name}.weight"].dtype == torch.float32
    assert after[f"{name}._weight_qdata"].dtype == torch.uint8
    saved = json.loads((folder / "student" / "config.json").read_text())["quantization_config"]
    assert saved["quantize"] == {"weights": "int4", "group_size": 8}
    assert saved["modules"]
    assert "int4, by torchao" in (folder / "student" / "README.md").read_text()

    # The weights of the last checkpoint, as they rounded in the last step, are those that were saved.
    learned, unlearned = (load_model(folder / "untrained", dtype=torch.float32) for _ in range(2))
    checkpoint = load_file(next((folder / "checkpoints").glob("step-5")) / "rank-00000.safetensors")
    for key, parameter in learned.named_parameters():
        parameter.data = checkpoint[f"weight/0/{key}"].view(parameter.shape)
    for model in (learned, unlearned):
        fake_quantize(model, QuantizeConfig(weights="int4", group_size=8))
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        saved_logits = load_model(folder / "student", dtype=torch.float32)(tokens).logits
        assert torch.equal(saved_logits, learned(tokens).logits)
        assert (saved_logits - unlearned(tokens).logits).abs().max() > 1e-2
