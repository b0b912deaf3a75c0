"""Tokens on disk: made once, found again by what they were made from, and mapped into memory by every process.

CACHE/KIND/KEY/meta.json    what the tokens were made from, and their counts
CACHE/KIND/KEY/manifest.json    size and sha256 of each file
CACHE/KIND/KEY/...          the tokens: Arrow files of examples (`columns`), arrays of a text (`corpus`)
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from llmdistill.artifacts import MANIFEST, manifest_damage, new_proven_folder
from llmdistill.errors import UserError
from llmdistill.files import cache_folder, write_json
from llmdistill.fingerprints import digest

_META = "meta.json"


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

    The request is everything that decides the tokens, as plain JSON values.
    """
    return cache_folder(cache_dir) / kind / digest(request)[:16]


def store(folder: Path, meta: Mapping[str, Any], write: Callable[[Path], Mapping[str, Any]]) -> Path:
    """Make the tokens of a folder of `store_folder` if they are not there, whole or not at all; return the folder.

    Damaged tokens are made again. If another process has made them in the meantime, those are kept.

    Args:
        folder: their folder.
        meta: what is kept in meta.json beside what `write` returns.
        write: writes the tokens into a folder, and returns more of meta.json.

    Raises:
        UserError: of `write`; or the folder cannot be written.
    """
    if folder.is_dir():
        if _is_whole(folder):
            return folder
        shutil.rmtree(folder, ignore_errors=True)
    try:
        with new_proven_folder(folder) as part:
            write_json(part / _META, {**meta, **write(part)})
    except UserError as error:
        if _is_whole(folder):
            return folder
        if not isinstance(error.__cause__, OSError):
            raise
        raise UserError(
            f"{folder}: tokens cannot be written there ({error.__cause__}); name another folder as data.cache_dir"
        ) from error
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether a folder has all files as they were written: every byte is read, 1.8 GB/s on a core of 2026."""
    return (folder / MANIFEST).is_file() and manifest_damage(folder) is None


@contextmanager
def reading(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the content of meta.json to a block that opens the files; a UserError if they are damaged."""
    try:
        yield json.loads((folder / _META).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}: damaged tokens in the cache ({error}); remove the folder") from error
