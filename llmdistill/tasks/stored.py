"""The examples of a benchmark, read and tokenized once, kept on disk and mapped into memory by every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from transformers import PreTrainedTokenizerBase

from llmdistill.data.columns import SplitWriter
from llmdistill.data.store import store, store_folder, token_dtype, tokenizer_fingerprint
from llmdistill.fingerprints import file_sha256

if TYPE_CHECKING:
    from llmdistill.config import RunConfig

_FORMAT = 2
"""Version of the files' format. Increase it with every change of the files' contents or of the tokenization."""


class StoredTask(Protocol):
    """What `store_task` asks of a task; `tasks.benchmark.Benchmark` describes the methods."""

    config: RunConfig

    @property
    def key(self) -> str: ...
    def paths(self) -> Sequence[Path] | None: ...
    def read_files(self) -> Any: ...
    def decides(self) -> Mapping[str, Any]: ...
    def write(self, files: Any, tokenizer: PreTrainedTokenizerBase, writer: SplitWriter) -> dict[str, Any]: ...


def store_task(task: StoredTask, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Read and tokenize the examples of a task into a folder; reuse that of the same data, tokenizer and settings.

    The tokens are stored in the folder ``tasks`` of data.cache_dir. Local files are identified by their paths and
    content and read only if their tokens are missing, data sets of the hub by their examples.

    Returns:
        The folder, for `data.columns.StoredSplits`.

    Raises:
        UserError: as in `Benchmark.read_files` and `Benchmark.write`, or the cache has no room.
    """
    hashes = _hashes(task.paths())
    files = task.read_files() if hashes is None else None
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    splits_by = [tokenizer_fingerprint(tokenizer), tokenizer.model_input_names, tokenizer.truncation_side, special]
    request = {
        "format": _FORMAT,
        "task": task.key,
        "examples": hashes if files is None else _digest(files.parts()),
        "tokenizer": splits_by,
        **task.decides(),
    }

    def write(folder: Path) -> dict[str, Any]:
        writer = SplitWriter(folder, token_dtype(tokenizer))
        found = task.write(task.read_files() if files is None else files, tokenizer, writer)
        return {**found, **writer.record()}

    return store(store_folder(task.config.data.cache_dir, "tasks", request), request, write)


def _hashes(paths: Sequence[Path] | None) -> list[list[str]] | None:
    """The paths of local files with their hashes; None if some data are not local, or a file cannot be read."""
    try:
        return None if paths is None else [[str(path), file_sha256(path)] for path in paths]
    except OSError:  # `Benchmark.read_files` says which and why
        return None


def _digest(parts: Iterable[object]) -> str:
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(repr(part).encode() + b"\n")
    return hashed.hexdigest()
