"""Files and folders that are written whole or not at all, records of them, and fingerprints of their content."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from damage import flip
from safetensors.torch import load_file, save_file

from llmdistill import fingerprints
from llmdistill.artifacts import MANIFEST, entries_damage, manifest_damage, new_proven_folder, read_record
from llmdistill.errors import UserError
from llmdistill.files import byte_size, final_path, new_folder, remove_abandoned, temporary_folder, write_json
from llmdistill.fingerprints import fingerprint


def test_folder_gets_its_name_only_at_the_end(tmp_path):
    with new_folder(tmp_path / "out") as partial:
        (partial / "a").write_text("1")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "a").read_text() == "1"
    with pytest.raises(RuntimeError), new_folder(tmp_path / "failed"):
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_people_read_the_name_that_a_folder_gets(tmp_path):
    final = tmp_path / "my.model.i4"
    with temporary_folder(final) as partial:
        assert final_path(partial) == final != partial
    for other in (final, Path("hub/name"), tmp_path / "a.part", tmp_path / ".hidden"):
        assert final_path(other) == other


def test_a_folder_has_the_permissions_that_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        with new_folder(tmp_path / "out") as partial:
            (partial / "in").mkdir(mode=0o700)
            for name in ("a", "in/b"):
                (partial / name).write_text("1")
                (partial / name).chmod(0o600)  # as safetensors writes
    finally:
        assert os.umask(before) == 0o027
    modes = {each.name: each.stat().st_mode & 0o777 for each in (tmp_path / "out", *(tmp_path / "out").rglob("*"))}
    assert modes == {"out": 0o750, "in": 0o750, "a": 0o640, "b": 0o640}


def kill(path: Path) -> None:
    """Begin a folder in another process, and kill it there."""
    code = f"import os, signal\nfrom llmdistill.files import new_folder\nwith new_folder({str(path)!r}) as part:\n"
    code += "    (part / 'a').write_text('half')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL


def test_what_a_kill_has_left_is_removed_and_what_is_being_written_is_not(tmp_path):
    for _ in range(2):
        kill(tmp_path / "out")
    assert len(list(tmp_path.iterdir())) == 1  # the second has removed what the first left
    for name in (".out.by-user", ".other.abcdefgh.part"):
        (tmp_path / name).mkdir()
    with new_folder(tmp_path / "out") as first:
        (first / "a").write_text("1")
        with new_folder(tmp_path / "out") as second:
            (second / "b").write_text("2")
        assert (first / "a").read_text() == "1"
        (tmp_path / "out" / "b").unlink()
    assert (tmp_path / "out" / "a").read_text() == "1"
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.by-user", ".other.abcdefgh.part"}


def test_what_kills_have_left_of_any_name_is_removed_at_once(tmp_path):
    (tmp_path / ".two.safetensors.abcdefgh.part").mkdir()
    mine = {".vscode", ".other.settings", "out.abcdefgh.part", "metrics.json"}
    for name in mine:
        (tmp_path / name).mkdir()
    with temporary_folder(tmp_path / "three") as living:
        remove_abandoned(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {*mine, living.name}


def test_json_is_written_whole_and_a_file_in_place_of_the_folder_is_one_sentence(tmp_path):
    write_json(tmp_path / "new" / "a.json", {"x": "é"})
    assert json.loads((tmp_path / "new" / "a.json").read_text(encoding="utf-8")) == {"x": "é"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]
    (tmp_path / "file").write_text("")
    said = r"the system refuses it \((not a directory|file exists)\): choose another path"
    with pytest.raises(UserError, match=said):
        write_json(tmp_path / "file" / "a.json", {})
    with pytest.raises(UserError, match=said):
        new_folder(tmp_path / "file" / "out").__enter__()


def test_sizes_have_the_unit_that_fits():
    sizes = (None, 1_550, 999_999, 1_000_000, 1_234_560_000_000)
    assert [byte_size(size) for size in sizes] == ["–", "1.6 kB", "1000.0 kB", "1.0 MB", "1,234.6 GB"]


def test_a_record_of_another_kind_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    for content, said in (('"text"', "not a JSON object"), ('{"step": "1"}', "it has no step, or one of another type")):
        file.write_text(content)
        with pytest.raises(UserError, match=rf"^{file}: {said}; remove it$"):
            read_record(file, remedy="remove it", keys={"step": int})


def test_a_manifest_names_the_first_file_that_changed(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    with new_proven_folder(folder) as part:
        (part / "sub").mkdir()
        for name, text in (("a", "first"), ("sub/b", "second"), ("c", "third"), ("d.jsonl", "fourth")):
            (part / name).write_text(text)
    assert manifest_damage(folder) is None
    entries = json.loads((folder / MANIFEST).read_text())["files"]
    hashed = {name for name, entry in entries.items() if "sha256" in entry}
    assert (entries.keys() - hashed, entries["d.jsonl"]) == ({"d.jsonl"}, {"bytes": 6})
    with flip(folder / "d.jsonl", 0):  # damage of text is seen when it is read
        assert manifest_damage(folder) is None
    entries["d.jsonl"]["sha256"] = "of an earlier version"
    assert entries_damage(folder, entries) is None
    del entries["a"]["sha256"]
    assert entries_damage(folder, entries) == f"{folder}/a: nothing tells its size and sha256"
    (folder / "new").write_text("of the user")
    assert manifest_damage(folder) is None
    with flip(folder / "a", 0):
        assert [manifest_damage(folder, slice(rank, None, 2)) is None for rank in (0, 1)] == [False, True]
    (folder / "sub" / "b").write_text("cut")
    assert manifest_damage(folder) == f"{folder}/sub/b has 3 bytes and had 6 when it was written"
    (folder / "sub" / "b").unlink()
    assert manifest_damage(folder) == f"{folder}/sub/b is missing"
    (folder / MANIFEST).unlink()
    assert manifest_damage(folder) is None


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
