"""Fingerprints: the content counts, not the place."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmdistill import fingerprints
from llmdistill.errors import UserError
from llmdistill.fingerprints import fingerprint


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """Folder of what looks like a model."""
    folder = tmp_path / "teacher"
    folder.mkdir()
    config = {"num_attention_heads": 4, "transformers_version": "5.0.0", "rope": {"dtype": "float32"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    weights = {"model.norm.weight": torch.ones(16), "embed": torch.randn(15, 16), "up": torch.randn(16, 16)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_fingerprint_belongs_to_the_model_and_not_to_its_folder(teacher: Path, tmp_path: Path) -> None:
    own, copy = fingerprint(teacher), tmp_path / "copy"
    shutil.copytree(teacher, copy)
    config = json.loads((copy / "config.json").read_text())
    config.update(transformers_version="4.0.0", _name_or_path="elsewhere", dtype="bfloat16", torch_dtype="float16")
    (copy / "config.json").write_text(json.dumps(dict(sorted(config.items()))))
    (copy / "README.md").write_text("nothing of importance")
    assert fingerprint(str(copy)) == own
    (copy / "merges.txt").write_text("a b")
    assert fingerprint(copy) != own
    (copy / "merges.txt").unlink()
    config["num_attention_heads"] = 2
    (copy / "config.json").write_text(json.dumps(config))
    assert fingerprint(copy) != own


def test_fingerprint_shows_a_change_of_any_one_tensor_in_a_large_file(teacher, monkeypatch):
    # As a file far beyond 64 samples would be: two samples of 16 bytes, and 8 bytes of each tensor.
    for name, value in (("_SAMPLES", 2), ("_SAMPLE_BYTES", 16), ("_TENSOR_BYTES", 8)):
        monkeypatch.setattr(fingerprints, name, value)
    weights = load_file(teacher / "model.safetensors")
    seen = {fingerprint(teacher)}
    for name in weights:
        changed = {key: value + 0.01 * (key == name) for key, value in weights.items()}
        save_file(changed, teacher / "model.safetensors", metadata={"format": "pt"})
        seen.add(fingerprint(teacher))
    assert len(seen) == len(weights) + 1


def test_fingerprint_of_an_adapter_covers_adapter_and_base(teacher: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 2, "base_model_name_or_path": str(teacher)}))
    save_file({"lora_A": torch.zeros(2, 4)}, adapter / "adapter_model.safetensors")
    first = fingerprint(adapter)
    assert first != fingerprint(teacher)
    moved = teacher.rename(tmp_path / "moved")
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 2, "base_model_name_or_path": str(moved)}))
    assert fingerprint(adapter) == first
    save_file({"lora_A": torch.ones(2, 4)}, adapter / "adapter_model.safetensors")
    second = fingerprint(adapter)
    (moved / "merges.txt").write_text("a b")
    assert len({first, second, fingerprint(adapter)}) == 3


def test_damaged_models_are_refused(teacher: Path) -> None:
    weights = teacher / "model.safetensors"
    content = weights.read_bytes()
    for damaged in (b"", content[:100], b"\xff" * 200):
        weights.write_bytes(damaged)
        with pytest.raises(UserError, match=r"model\.safetensors: not a whole safetensors file"):
            fingerprint(teacher)
    weights.unlink()
    without = fingerprint(teacher)
    weights.write_bytes(content)
    assert fingerprint(teacher) != without, "a config alone, as a dry run needs it, is not the model"
    (teacher / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        fingerprint(teacher)


def test_files_and_folders_of_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "folder" / "b.txt"
    second.parent.mkdir()
    first.write_bytes(b"0123456789" * 100)
    second.write_bytes(first.read_bytes())
    assert fingerprint(first) == fingerprint(second)
    folder = fingerprint(second.parent)
    second.write_bytes(b"0123456780" + first.read_bytes()[10:])
    assert fingerprint(second) != fingerprint(first)
    assert fingerprint(second.parent) != folder
    # Of a large file the size and some places count.
    for name, value in (("_WHOLE_BYTES", 100), ("_SAMPLES", 3), ("_SAMPLE_BYTES", 10)):
        monkeypatch.setattr(fingerprints, name, value)
    seen = {fingerprint(first)}
    for place in (5, 495, 999):
        changed = bytearray(first.read_bytes())
        changed[place] ^= 1
        second.write_bytes(changed)
        seen.add(fingerprint(second))
    second.write_bytes(first.read_bytes() + b"0123456789")
    assert len(seen | {fingerprint(second)}) == 5
