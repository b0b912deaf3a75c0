"""Models as ONNX, with their factors, run by ONNX Runtime and compared with transformers."""

import json
import logging
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from shrunk import shrunk_model
from tiny import random_student, shaken, tiny_config, tiny_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from llmdistill import messages
from llmdistill.artifacts import manifest_damage
from llmdistill.errors import UserError
from llmdistill.serving import onnx_export
from llmdistill.serving.onnx_export import export_onnx

WIDE = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 96, "num_hidden_layers": 1}
pytestmark = pytest.mark.skipif(
    any(onnx_export.importlib.util.find_spec(name) is None for name in onnx_export._PACKAGES),
    reason="the extra onnx is not installed",
)


def session(file):
    import onnxruntime

    return onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A folder with a student and its export, the student, and what the export returned."""
    folder = tmp_path_factory.mktemp("encoder")
    config = tiny_config("roberta", **WIDE, max_position_embeddings=66, pad_token_id=1, type_vocab_size=2)
    student = random_student(AutoModelForSequenceClassification, config, {"rank": 3, "embedding_rank": 8})
    student.save_pretrained(folder / "student")
    return folder, student, export_onnx(folder / "student", folder / "out", int8=True)


def test_an_encoder_keeps_its_factors(encoder):
    folder, student, result = encoder
    assert result["largest_difference"] <= 1e-5 < result["int8_largest_difference"]
    assert result["int8_bytes"] < result["bytes"] < result["dense_bytes"]
    assert {"milliseconds", "int8_milliseconds", "dense_milliseconds"} <= result.keys()
    config = json.loads((folder / "out/config.json").read_text())
    assert not config.keys() & {"quantization_config", "transformers_weights"}
    assert manifest_damage(folder / "out") is None
    # Another batch, length and padding than any that were exported or compared, and other types.
    ids = torch.randint(3, 96, (5, 23), generator=torch.Generator().manual_seed(3))
    mask, types = torch.ones_like(ids), torch.arange(23).ge(9).long().expand(5, -1)
    mask[2, 17:] = 0
    with torch.no_grad():
        expected = student(input_ids=ids, attention_mask=mask, token_type_ids=types).logits
    feed = {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), "token_type_ids": types.numpy()}
    (logits,) = session(folder / "out/model.onnx").run(["logits"], feed)
    torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=0, atol=1e-5)


def test_a_decoder_writes_token_by_token_what_transformers_writes(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(onnx_export, "is_factorized", lambda _: False)  # one graph: the dense one takes as long
    config = tiny_config("llama", **WIDE, tie_word_embeddings=True)
    student = random_student(AutoModelForCausalLM, config, {"shapes": {"*": "8x4"}, "sums": 2})
    student.save_pretrained(tmp_path / "student")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    result = export_onnx(tmp_path / "student", tmp_path / "out")
    assert "deprecated" not in caplog.text
    assert result["largest_difference"] <= 1e-5
    assert {"milliseconds", "milliseconds_per_token"} <= result.keys()
    prompt = torch.tensor([[5, 6, 7, 8, 9]])
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 1, "eos_token_id": []}
    expected = student.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0].tolist()
    run = session(tmp_path / "out/model.onnx")
    names = [each.name for each in run.get_outputs()]
    past = {
        each.name: np.zeros((1, each.shape[1], 0, each.shape[3]), np.float32)
        for each in run.get_inputs()
        if each.name.startswith("past_key_values")
    }
    written, new = prompt[0].tolist(), prompt.numpy()
    while len(written) < len(expected):
        count = len(written)
        feed = {
            "input_ids": new,
            "attention_mask": np.ones((1, count), np.int64),
            "position_ids": np.arange(count - new.shape[1], count)[None],
        }
        outputs = dict(zip(names, run.run(names, {**feed, **past}), strict=True))
        written.append(int(outputs["logits"][0, -1].argmax()))
        new = np.array([written[-1:]])
        past = {name: outputs[name.replace("past_key_values", "present")] for name in past}
    assert written == expected


def test_a_decoder_without_a_cache_is_refused(tmp_path):
    shrunk_model("openai-gpt").save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"openai-gpt models take no keys and values .* take --to dense"):
        export_onnx(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_difference_is_a_warning_and_the_file_is_there(encoder, tmp_path, monkeypatch, caplog):
    folder, model, _ = encoder
    _, inputs, outputs, _ = onnx_export.make_traceable(model)
    once = onnx_export._Graph(folder / "out" / onnx_export.FILE, inputs, outputs)
    with torch.no_grad():
        assert max(once.difference(model)) < 1e-6, "this model rounds less"
    assert model.dtype == torch.float32
    monkeypatch.setattr(
        onnx_export, "_write_graph", lambda _, file: replace(once, file=Path(shutil.copy(once.file, file)))
    )
    monkeypatch.setattr(onnx_export, "is_factorized", lambda _: False)
    monkeypatch.setattr(onnx_export, "_time_graphs", lambda *_: {})
    monkeypatch.setattr(messages.logger, "propagate", True)
    for number, (told, own, is_fine) in enumerate([(3e-5, 2e-5, True), (5e-5, 2e-5, False), (2e-5, 0, False)]):
        monkeypatch.setattr(onnx_export._Graph, "difference", lambda *_, both=(told, own): both)
        caplog.clear()
        assert export_onnx(folder / "student", tmp_path / f"out-{number}")["largest_difference"] == told
        assert (tmp_path / f"out-{number}" / onnx_export.FILE).is_file()
        assert ("is not equal to" in caplog.text) != is_fine
    monkeypatch.setattr(onnx_export._Graph, "difference", lambda *_: (float("nan"), 0.0))
    caplog.clear()
    assert export_onnx(folder / "student", tmp_path / "broken")["largest_difference"] is None
    assert (tmp_path / "broken" / onnx_export.FILE).is_file()
    assert "with padding and a cache, outputs are not finite" in caplog.text


@torch.no_grad()
def test_padding_does_not_break_the_reference_in_fp64(monkeypatch):
    """Gemma 2 runs by eager attention alone, in which a place that sees nothing is NaN in fp64."""
    model = shaken(tiny_model("gemma2", num_hidden_layers=3)).eval()

    class Session:
        def run(self, names, feed):
            tensors = {name: torch.from_numpy(array) for name, array in feed.items()}
            return [model(**tensors)[0].numpy()]

    monkeypatch.setattr(onnx_export._Graph, "session", lambda _: Session())
    names = dict.fromkeys(("input_ids", "attention_mask", "position_ids"))
    difference, own = onnx_export._Graph(Path("none"), names, ["logits"]).difference(model)
    assert difference == own, "the session is the model itself"
    assert 0 < difference < 1e-5


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr(onnx_export.importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else name)
    with pytest.raises(UserError, match=r'--to onnx needs onnxruntime: pip install -e "\.\[onnx\]"'):
        export_onnx(tmp_path, tmp_path / "out")
