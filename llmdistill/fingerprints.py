"""Fingerprints of models and data. They depend on the content, not on the path, and large files are only sampled."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from llmdistill.errors import UserError
from llmdistill.files import read_json

_VOLATILE_KEYS = frozenset({"transformers_version", "transformers_weights", "_name_or_path", "dtype", "torch_dtype"})
"""Keys of a config.json that can change each time the same model is saved."""
_TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "*.model")
_SAMPLES = 64
_SAMPLE_BYTES = 64 * 1024
_TENSOR_BYTES = 4 * 1024
_LONGEST_HEADER = 100_000_000
"""In bytes; the limit of the safetensors format."""
_WHOLE_BYTES = 1 << 26
"""In bytes; data files up to this size are read completely."""
_PLAIN = frozenset({".json", ".jsonl", ".tsv", ".txt", ".md", ".jinja"})
"""Endings of text files, whose damage shows when they are read; only their sizes are compared before."""


def fingerprint(reference: str | Path) -> str:
    """Return "sha256:…" of a local model folder, data folder or file; for any other reference return its name.

    The fingerprint of a model covers config.json (without the keys that change with each save), the tokenizer, the base
    of an adapter, and of each safetensors file the size, the header, up to 64 evenly spaced samples of 64 KiB and 4 KiB
    from the middle of each tensor. It therefore changes when any tensor is trained, replaced or reordered, but can miss
    a change of a few bytes between the samples of a large file, or in a data file over 64 MiB.

    Raises UserError if an adapter folder has no safetensors file, or a file is damaged.
    """
    path = Path(reference)
    if os.path.isfile(path):
        return _file_fingerprint(path)
    if not os.path.isdir(path):  # unlike is_dir also false for a name that no file can have
        return str(reference)
    adapter, base = path / "adapter_config.json", None
    if adapter.is_file():
        config = _read_config(adapter)
        # The base model may have moved to another path, so its content is fingerprinted, not its name.
        name = str(config.pop("base_model_name_or_path", None))
        base = fingerprint(path / name if os.path.isdir(path / name) else name)
        weights = [path / "adapter_model.safetensors"]
    elif (path / "config.json").is_file():
        config = _read_config(path / "config.json")
        weights = sorted(path.glob("*.safetensors"))
    else:
        files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        return content_fingerprint([[file.relative_to(path).as_posix(), _file_fingerprint(file)] for file in files])
    if not all(file.is_file() for file in weights):
        raise UserError(f"{path}: no safetensors there; save the model's weights as safetensors")
    tokenizer = sorted({file for pattern in _TOKENIZER_FILES for file in path.glob(pattern)})
    hashes = [[file.name, _file_fingerprint(file)] for file in [*weights, *tokenizer]]
    try:
        return content_fingerprint([base, _stable(config), hashes])
    except RecursionError as error:
        raise UserError(f"{path}: its config file is nested too deeply: fix or replace it") from error


def digest(value: Any) -> str:
    """Return the hexadecimal SHA-256 of a plain JSON value; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        _add(hashed, file, path.stat().st_size)
    return hashed.hexdigest()


def file_entry(path: Path) -> dict[str, Any]:
    """Return what a manifest records of a file: its size, and the sha256 unless it is text."""
    size = {"bytes": path.stat().st_size}
    return size if path.suffix in _PLAIN else {**size, "sha256": file_sha256(path)}


def file_damage(path: Path, entry: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a file, beginning with its path; None if it is as `file_entry` saw it.

    Earlier versions recorded the sha256 of text too; it is not compared.
    """
    if not isinstance(entry.get("bytes"), int) or not (path.suffix in _PLAIN or isinstance(entry.get("sha256"), str)):
        return f"{path}: nothing tells its size and sha256"
    if not os.path.isfile(path):  # unlike is_file also for a name that no file can have
        return f"{path} is missing"
    size = path.stat().st_size
    if size != entry["bytes"]:
        return f"{path} has {size:,} bytes and had {entry['bytes']:,} when it was written"
    is_same = path.suffix in _PLAIN or file_sha256(path) == entry["sha256"]
    return None if is_same else f"{path} changed after it was written (another sha256)"


def content_fingerprint(value: Any) -> str:
    return f"sha256:{digest(value)}"


def memory_fingerprint(config: Mapping[str, Any], tensors: Iterable[tuple[str, Any]]) -> str:
    """Return "sha256:…" of a model in memory, from its config as plain JSON values and the arrays of all tensors."""
    of_tensors = [[name, list(array.shape), hashlib.sha256(array).hexdigest()] for name, array in tensors]
    return content_fingerprint([_stable(config), of_tensors])


def _read_config(file: Path) -> dict[str, Any]:
    config = read_json(file)
    if not isinstance(config, dict):
        raise UserError(f"{file}: not a JSON object: fix or replace it")
    return config


def _stable(value: Any) -> Any:
    """Return a config without its volatile keys; they are also removed from nested configs."""
    if isinstance(value, dict):
        return {key: _stable(inner) for key, inner in value.items() if key not in _VOLATILE_KEYS}
    return [_stable(inner) for inner in value] if isinstance(value, list) else value


def _file_fingerprint(path: Path) -> str:
    size = path.stat().st_size
    hashed = hashlib.sha256(f"{size}:".encode())
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            places = _tensor_places(file, size, path)
        else:
            places = [(0, size)] if size <= _WHOLE_BYTES else _spread(0, size)
        for start, count in places:
            file.seek(start)
            _add(hashed, file, count)
    return f"sha256:{hashed.hexdigest()}"


def _add(hashed: hashlib._Hash, file: BinaryIO, count: int) -> None:
    while count > 0 and (block := file.read(min(count, 1 << 20))):
        hashed.update(block)
        count -= len(block)


def _spread(start: int, size: int) -> list[tuple[int, int]]:
    last = size - _SAMPLE_BYTES
    # The first sample is at the start and the last one at the end.
    return [(start + number * last // (_SAMPLES - 1), _SAMPLE_BYTES) for number in range(_SAMPLES)]


def _tensor_places(file: BinaryIO, size: int, path: Path) -> list[tuple[int, int]]:
    """Return the parts of a safetensors file that are read, the header and tensor samples, as (start, bytes)."""
    # The file begins with the length of its header, in 8 bytes.
    length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else _LONGEST_HEADER
    if length > min(size - 8, _LONGEST_HEADER):
        raise UserError(f"{path}: not a whole safetensors file: copy or download it again")
    start, body = 8 + length, size - 8 - length
    if body <= _SAMPLES * _SAMPLE_BYTES:
        return [(0, size)]
    places = [(0, start), *_spread(start, body)]
    try:
        header = json.loads(file.read(length))
        tensors = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        # Evenly spaced samples may miss small tensors, so every tensor gives one more.
        for begin, end in tensors:
            if not (isinstance(begin, int) and isinstance(end, int) and 0 <= begin <= end <= body):
                raise ValueError("a tensor lies outside of the file")
            count = min(_TENSOR_BYTES, end - begin)
            places.append((start + max(begin, (begin + end - _TENSOR_BYTES) // 2), count))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: its header is not that of a safetensors file: copy or download it again") from error
    return places
