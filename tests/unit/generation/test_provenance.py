from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmdistill.errors import UserError
from llmdistill.generation import provenance
from llmdistill.generation.provenance import (
    check_teacher,
    content_fingerprint,
    file_sha256,
    model_fingerprint,
    read_provenance,
    side_file,
)


def write_record(data: Path, **record: object) -> None:
    side_file(data).write_text(json.dumps({"output_sha256": file_sha256(data), **record}), encoding="utf-8")


def test_fingerprint_belongs_to_the_model_and_not_to_its_folder(teacher: Path, tmp_path: Path) -> None:
    own = model_fingerprint(teacher)
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", own)
    copy = tmp_path / "copy"
    shutil.copytree(teacher, copy)
    config = json.loads((copy / "config.json").read_text())
    config.update(transformers_version="4.0.0", _name_or_path="elsewhere", dtype="bfloat16", torch_dtype="float16")
    (copy / "config.json").write_text(json.dumps(dict(sorted(config.items()))))
    assert model_fingerprint(str(copy)) == own
    config["num_attention_heads"] = 2
    (copy / "config.json").write_text(json.dumps(config))
    assert model_fingerprint(copy) != own


def test_fingerprint_shows_a_change_of_any_one_tensor_in_a_large_file(
    teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As a file far beyond 64 samples would be: two samples of 16 bytes, and 8 bytes of each tensor.
    for name, value in (("_SAMPLES", 2), ("_SAMPLE_BYTES", 16), ("_TENSOR_BYTES", 8)):
        monkeypatch.setattr(provenance, name, value)
    weights = load_file(teacher / "model.safetensors")
    seen = {model_fingerprint(teacher)}
    for name in weights:
        changed = {key: value + 0.01 * (key == name) for key, value in weights.items()}
        save_file(changed, teacher / "model.safetensors", metadata={"format": "pt"})
        seen.add(model_fingerprint(teacher))
    assert len(seen) == len(weights) + 1


def test_fingerprint_reads_a_bounded_share_of_a_large_file(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"wide": torch.zeros(40_000_000, dtype=torch.int8)}, teacher / "model.safetensors")
    read = 0
    real = provenance._add

    def counted(digest, file, count):
        nonlocal read
        read += count
        real(digest, file, count)

    monkeypatch.setattr(provenance, "_add", counted)
    before = model_fingerprint(teacher)
    assert read == 64 * 65536 + 4096
    save_file({"wide": torch.ones(40_000_000, dtype=torch.int8)}, teacher / "model.safetensors")
    assert model_fingerprint(teacher) != before


def test_fingerprint_of_an_adapter_covers_adapter_and_base(teacher: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 2, "base_model_name_or_path": str(teacher)}))
    save_file({"lora_A": torch.zeros(2, 4)}, adapter / "adapter_model.safetensors")
    first = model_fingerprint(adapter)
    assert first != model_fingerprint(teacher)
    moved = tmp_path / "moved"
    shutil.copytree(teacher, moved)
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 2, "base_model_name_or_path": str(moved)}))
    assert model_fingerprint(adapter) == first
    save_file({"lora_A": torch.ones(2, 4)}, adapter / "adapter_model.safetensors")
    second = model_fingerprint(adapter)
    weights = load_file(moved / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, moved / "model.safetensors", metadata={"format": "pt"})
    assert len({first, second, model_fingerprint(adapter)}) == 3


def test_damaged_models_are_refused(teacher: Path) -> None:
    weights = teacher / "model.safetensors"
    content = weights.read_bytes()
    for damaged in (b"", content[:100], b"\xff" * 200):
        weights.write_bytes(damaged)
        with pytest.raises(UserError, match=r"model\.safetensors: not a whole safetensors file"):
            model_fingerprint(teacher)
    weights.unlink()
    with pytest.raises(UserError, match="no safetensors there"):
        model_fingerprint(teacher)
    (teacher / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        model_fingerprint(teacher)


def test_content_fingerprint_depends_on_values_and_order() -> None:
    assert content_fingerprint([{"a": 1, "b": "ü"}]) == content_fingerprint([{"b": "ü", "a": 1}])
    assert len({content_fingerprint(value) for value in ([1, 2], [2, 1], [12], ["1", "2"])}) == 4


def test_the_teacher_that_wrote_the_answers_passes_and_another_does_not(teacher: Path, data: Path) -> None:
    hash_now = model_fingerprint(teacher)
    write_record(data, teacher="gpt2-xl", teacher_fingerprint=hash_now)
    assert check_teacher(data, teacher) is None
    write_record(data, teacher="gpt2-xl", teacher_fingerprint="sha256:abc")
    assert check_teacher(str(data), str(teacher)) == (
        f"{data}: its answers were written by gpt2-xl (sha256:abc), not by the teacher {teacher} ({hash_now})."
    )


def test_answers_of_unknown_or_changed_origin_are_said_to_be(teacher: Path, data: Path) -> None:
    assert "there is no prompts.jsonl.provenance.json beside it" in (check_teacher(data, teacher) or "")
    assert "there is no train.jsonl.provenance.json" in (check_teacher("embedded:train", teacher) or "")
    write_record(data, teacher="t", teacher_fingerprint=model_fingerprint(teacher))
    before = file_sha256(data)
    data.write_text(data.read_text() + "\n")
    said = check_teacher(data, teacher)
    assert said is not None
    assert f"it changed after it was generated (sha256 {before} then, {file_sha256(data)} now)" in said
    side_file(data).write_text("[")
    with pytest.raises(UserError, match=r"provenance\.json: not valid JSON"):
        read_provenance(data)
