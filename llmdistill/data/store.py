"""Token arrays on disk: made once, found again by what they were made from, and mapped into memory by every process.

    CACHE/KIND/KEY/meta.json    what the arrays were made from, their counts and types
    CACHE/KIND/KEY/NAME.bin     the numbers of one array
    CACHE/KIND/KEY/manifest.json    size and sha256 of each file

All ranks of a node share the pages of a mapped file, so a set of tokens is in the memory of a node once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from transformers import PreTrainedTokenizerBase

from llmdistill.artifacts import MANIFEST, manifest_damage, new_proven_folder
from llmdistill.errors import UserError
from llmdistill.files import cache_folder, write_json
from llmdistill.fingerprints import digest

_META = "meta.json"


class ArrayWriter:
    """Writes one-dimensional arrays piece by piece, so that they may be larger than memory."""

    def __init__(self, folder: Path, dtypes: Mapping[str, np.dtype[Any]]) -> None:
        """Create a file for each array; `dtypes` names the type of its numbers."""
        self._folder = folder
        self._dtypes = dtypes
        self._files: dict[str, BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> ArrayWriter:
        for name in self._dtypes:
            self._files[name] = self._stack.enter_context((self._folder / f"{name}.bin").open("wb"))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, name: str, values: Any) -> None:
        """Append numbers, a sequence or a single one, to an array."""
        self._files[name].write(np.asarray(values, self._dtypes[name]).tobytes())

    def record(self) -> dict[str, dict[str, str]]:
        """Return the type of each array."""
        return {name: {"dtype": dtype.name} for name, dtype in self._dtypes.items()}


def token_dtype(tokenizer: PreTrainedTokenizerBase) -> np.dtype[Any]:
    """Return the smallest type of number that holds every token id."""
    return np.dtype(np.uint16 if max(tokenizer.get_vocab().values()) < 2**16 else np.uint32)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a fingerprint of the properties that decide how a tokenizer splits text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decides: Any
    if backend is None:
        decides = [type(tokenizer).__name__, tokenizer.get_vocab(), tokenizer.special_tokens_map]
    else:
        decides = json.loads(backend.to_str())
        # Each call of the tokenizer sets these two, so they differ before and after the first call.
        for passing in ("truncation", "padding"):
            decides.pop(passing, None)
    return digest(json.loads(json.dumps(decides, default=str)))


def store_folder(cache_dir: str | Path | None, kind: str, request: Mapping[str, Any]) -> Path:
    """Return the folder of what a request asks for; cache_dir is by default $LLMDISTILL_CACHE or ~/.cache/llmdistill.

    The request is everything that decides the arrays, as plain JSON values.
    """
    return cache_folder(cache_dir) / kind / digest(request)[:16]


def store(folder: Path, meta: Mapping[str, Any], write: Callable[[Path], Mapping[str, Any]]) -> Path:
    """Make the arrays of a folder of `store_folder` if they are not there, whole or not at all; return the folder.

    Damaged arrays are made again. If another process has made them in the meantime, those are kept.

    Args:
        folder: their folder.
        meta: what is kept in meta.json beside what `write` returns.
        write: writes the arrays into a folder by an ArrayWriter, and returns more of meta.json, with the writer's
            record as ``arrays``.

    Raises:
        UserError: of `write`; or the folder cannot be written.
    """
    if folder.is_dir():
        if is_whole(folder):
            return folder
        shutil.rmtree(folder, ignore_errors=True)
    try:
        with new_proven_folder(folder) as part:
            write_json(part / _META, {**meta, **write(part)})
    except UserError as error:
        if is_whole(folder):
            return folder
        if not isinstance(error.__cause__, OSError):
            raise
        raise UserError(
            f"{folder}: tokens cannot be written there ({error.__cause__}); name another folder as data.cache_dir"
        ) from error
    return folder


def is_whole(folder: Path) -> bool:
    """Whether a folder has all arrays as they were written: every byte is read, 1.8 GB/s on a core of 2026."""
    return (folder / MANIFEST).is_file() and manifest_damage(folder) is None


def mapped(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the content of meta.json, and the arrays, whose numbers are read from the disk when they are used.

    Raises UserError if the arrays are damaged.
    """
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
        arrays: dict[str, np.ndarray] = {
            name: np.memmap(folder / f"{name}.bin", each["dtype"], "r") for name, each in meta["arrays"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: damaged tokens in the cache ({error}); remove the folder") from error
    return meta, arrays
