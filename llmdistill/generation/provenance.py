"""Who wrote the answers of a training set: fingerprints of models and data, and the record beside the file."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.factorize.checkpoint import local_folder
from llmdistill.models.adapters import CONFIG_FILE, WEIGHTS_FILE, base_of

_VOLATILE_KEYS = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype"})
"""Keys of a config.json that change from one save to the next while the model stays the same."""
_SAMPLES = 64
_SAMPLE_BYTES = 64 * 1024
_TENSOR_BYTES = 4 * 1024
_LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors format."""


def side_file(data: Path) -> Path:
    """Where the record of a file of answers stands."""
    return data.with_name(f"{data.name}.provenance.json")


def read_provenance(data: str | Path) -> dict[str, Any] | None:
    """The record beside a file of answers, or None where there is none.

    Raises:
        UserError: it is there, but is no JSON object.
    """
    path = side_file(Path(data))
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON; generate the answers again, or remove it") from error
    if not isinstance(record, dict):
        raise UserError(f"{path}: not a JSON object; generate the answers again, or remove it")
    return record


def check_teacher(data: str | Path, teacher: str | Path) -> str | None:
    """What speaks against the answers in `data` being the teacher's own, as sentences for a warning; None if nothing.

    Raises:
        UserError: the teacher is no model folder, or the record beside the data cannot be read.
    """
    path = locate(str(data))
    record = read_provenance(path)
    if record is None:
        return (
            f"{data}: there is no {side_file(path).name} beside it, so nothing says which model wrote its answers; "
            "`llmdistill generate` makes both."
        )
    said = []
    own, recorded = model_fingerprint(locate(str(teacher))), record.get("teacher_fingerprint")
    if own != recorded:
        said.append(
            f"{data}: its answers were written by {record.get('teacher')} ({recorded}), not by the teacher "
            f"{teacher} ({own})."
        )
    now = file_sha256(path) if path.is_file() else "missing"
    if now != record.get("output_sha256"):
        said.append(
            f"{data}: it changed after it was generated (sha256 {record.get('output_sha256')} then, {now} now), "
            f"so {side_file(path).name} does not tell who wrote what it holds."
        )
    return " ".join(said) or None


def model_fingerprint(path: str | Path) -> str:
    """ "sha256:…" of a model's config and weights, at a cost that does not grow with the model.

    Of each safetensors file the size, the header (names, shapes and places of all tensors), up to 64 evenly spaced
    samples of 64 KiB, and 4 KiB from the middle of each tensor are read. So any tensor that was trained on, replaced
    or reordered shows; a change of a few bytes between the samples of a large file can be missed. The fingerprint
    of a peft adapter includes that of its base.

    Args:
        path: a folder, or a name on the hub.

    Raises:
        UserError: no config or no safetensors there, or a damaged file.
    """
    folder = local_folder(path)
    digest = hashlib.sha256()
    if (folder / CONFIG_FILE).is_file():
        config = _read_config(folder / CONFIG_FILE)
        files = [folder / WEIGHTS_FILE]
        # The base may have moved and still be the same.
        config.pop("base_model_name_or_path", None)
        digest.update(model_fingerprint(base_of(folder)).encode())
    else:
        config = _read_config(folder / "config.json")
        files = sorted(folder.glob("*.safetensors"))
    if not all(file.is_file() for file in files) or not files:
        raise UserError(f"{folder}: no safetensors there; a model's weights must be saved as safetensors")
    digest.update(_canonical(_stable(config)))
    for file in files:
        _add_weights(digest, file)
    return f"sha256:{digest.hexdigest()}"


def content_fingerprint(value: Any) -> str:
    """ "sha256:…" of plain JSON values."""
    return f"sha256:{hashlib.sha256(_canonical(value)).hexdigest()}"


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a whole file."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode()


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file}: no such file: a model's folder needs its config.json") from None
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON: mend or replace it") from error
    if not isinstance(config, dict):
        raise UserError(f"{file}: not a JSON object: mend or replace it")
    return config


def _stable(value: Any) -> Any:
    """A config without its volatile keys, those of nested configs too."""
    if isinstance(value, dict):
        return {key: _stable(inner) for key, inner in value.items() if key not in _VOLATILE_KEYS}
    return [_stable(inner) for inner in value] if isinstance(value, list) else value


def _add_weights(digest: hashlib._Hash, path: Path) -> None:
    """Size, header and samples of one safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else _LONGEST_HEADER
        if length > min(size - 8, _LONGEST_HEADER):
            raise UserError(f"{path}: not a whole safetensors file: copy or download it again")
        header = file.read(length)
        digest.update(f"{size}:{length}:".encode() + header)
        body = size - 8 - length
        for start, count in _places(header, body, path):
            file.seek(8 + length + start)
            _add(digest, file, min(count, body - start))


def _add(digest: hashlib._Hash, file: BinaryIO, count: int) -> None:
    while count > 0 and (block := file.read(min(count, 1 << 20))):
        digest.update(block)
        count -= len(block)


def _places(header: bytes, body: int, path: Path) -> list[tuple[int, int]]:
    """(start, bytes) of the samples, within the body of a safetensors file."""
    if body <= _SAMPLES * _SAMPLE_BYTES:
        return [(0, body)]
    last = body - _SAMPLE_BYTES
    places = [(number * last // (_SAMPLES - 1), _SAMPLE_BYTES) for number in range(_SAMPLES)]
    try:
        tensors = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
        for begin, end in tensors:
            places.append((max(begin, (begin + end - _TENSOR_BYTES) // 2), min(_TENSOR_BYTES, end - begin)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: its header is not that of a safetensors file: copy or download it again") from error
    return places
