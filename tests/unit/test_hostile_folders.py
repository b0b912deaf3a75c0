"""Folders that somebody has made on purpose, with checksums that fit: each is refused by a sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import refuses
from safetensors.torch import save_file

from llmdistill.artifacts import MANIFEST, entries_of, manifest_damage
from llmdistill.files import write_json
from llmdistill.fingerprints import fingerprint
from llmdistill.runtime.distributed import World
from llmdistill.teacher.cache_folder import CACHE_FILE, CacheFolder, shard_name

PROVEN = {"bytes": 1, "sha256": "0"}
ENTRIES = [
    ({"a": 5}, "a: nothing tells its size and sha256"),
    ({"a": {"bytes": 1}}, "a: nothing tells its size and sha256"),
    ({"a": {"bytes": "1", "sha256": "0"}}, "a: nothing tells its size and sha256"),
    ({"n" * 5_000: PROVEN}, "is missing"),
    ({"a\0b": PROVEN}, "is missing"),
]


@pytest.mark.parametrize(("files", "said"), ENTRIES, ids=lambda each: str(each)[:40])
def test_the_entries_of_a_manifest(tmp_path: Path, files: dict[str, Any], said: str) -> None:
    write_json(tmp_path / MANIFEST, {"files": files})
    damage = manifest_damage(tmp_path)
    assert damage is not None
    assert said in damage
    write_json(tmp_path / CACHE_FILE, {"files": files, "held": {}, "data": {}})
    refuses(said, lambda: CacheFolder(tmp_path).check_files(World(0, 1, torch.device("cpu"))))


SHARDS: list[tuple[dict[str, torch.Tensor], dict[str, str] | None]] = [
    ({"a": torch.zeros(2)}, None),
    ({"ids": torch.zeros(2, 2, dtype=torch.int64)}, {"scaling": "[]"}),
    ({"ids": torch.zeros(2)}, {"scaling": "[" * 28_000}),
    ({"ids": torch.zeros(2, dtype=torch.bfloat16)}, {"scaling": '{"a": 1}'}),
]


@pytest.mark.parametrize(("tensors", "metadata"), SHARDS, ids=lambda each: str(each)[:30])
def test_a_shard_that_is_none(tmp_path: Path, tensors: Any, metadata: Any) -> None:
    file = tmp_path / shard_name(0)
    file.parent.mkdir()
    save_file(tensors, file, metadata)
    write_json(tmp_path / CACHE_FILE, {"files": entries_of(tmp_path, [shard_name(0)]), "held": {}, "data": {}})
    refuses("cannot be read as a shard of a teacher's cache", lambda: CacheFolder(tmp_path).missing([1]))
    refuses("cannot be read as a shard of a teacher's cache", lambda: CacheFolder(tmp_path).scaling)


@pytest.mark.parametrize("levels", [600, 28_000])
def test_the_fingerprint_of_a_config_with_many_levels(tmp_path: Path, levels: int) -> None:
    (tmp_path / "config.json").write_text('{"a": ' * levels + "1" + "}" * levels)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Python's own: some libraries raise it for their process
    try:
        refuses("nested too deeply", fingerprint, tmp_path)
    finally:
        sys.setrecursionlimit(limit)


def header_of(tensor: Any) -> bytes:
    header = json.dumps({"a": tensor}).encode() if not isinstance(tensor, bytes) else tensor
    return len(header).to_bytes(8, "little") + header + bytes(5_000_000)  # only of a large file it is read


OFFSETS = [{"data_offsets": [-(10**12), 5]}, {"data_offsets": [0.5, 1.5]}, {"data_offsets": [5, 0]}, b"[" * 28_000]


@pytest.mark.parametrize("tensor", OFFSETS, ids=lambda each: str(each)[:40])
def test_the_fingerprint_of_weights_whose_header_lies(tmp_path: Path, tensor: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(header_of(tensor))
    refuses("its header is not that of a safetensors file", fingerprint, tmp_path)
