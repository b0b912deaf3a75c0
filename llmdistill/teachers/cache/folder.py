"""The folder of a teacher's cache: its record, and its shards, from which only the rows of a batch are read.

    cache.json            what was asked for, and the size and checksum of each file; written last
    request.json          what was asked for, until cache.json is there
    head.safetensors      weight and bias of the LM head, and its scale if it has one, for hidden states
    shards/00000.safetensors ...
        ids               (n,) the ids of the examples
        offsets.PLACE     (n + 1,) where the rows of each example begin, for each kind of positions
        NAME              the rows of one of the tensors of `teachers.output_rows`
    shards/00000.json     size and checksum of a shard, until cache.json is there

A file is written whole or not at all, and its size and checksum after it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from llmdistill.artifacts import entries_damage, read_record
from llmdistill.batch import HeadInputs, LogitScale
from llmdistill.errors import UserError
from llmdistill.files import apply_umask, write_json
from llmdistill.fingerprints import content_fingerprint, file_damage, file_entry
from llmdistill.runtime.distributed import World, on_every
from llmdistill.teachers.output_rows import row_positions

CACHE_FILE = "cache.json"
REQUEST_FILE = "request.json"
HEAD_FILE = "head.safetensors"
_REMEDY = "remove the file if it is there, and `llmdistill cache` with the same settings makes it again"
_OPEN_SHARDS = 1024
"""Shards that are mapped at the same time; more would come near the limits of an operating system."""


def shard_name(number: int) -> str:
    """Return the path of a shard below the folder."""
    return f"shards/{number:05d}.safetensors"


def write_tensors(folder: Path, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file of a cache, and then beside it its size and checksum."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, part, metadata=dict(metadata))
    # Before the name is given, so that whoever sees the file may read it.
    apply_umask(part)
    entry = file_entry(part)
    os.replace(part, file)
    write_json(file.with_suffix(".json"), entry)


def is_whole(folder: Path, name: str, record: Mapping[str, Any] | None) -> bool:
    """Whether a file is there as it was written; every byte of it is read. The arguments are those of `entry_of`."""
    entry = entry_of(folder, name, record)
    return entry is not None and file_damage(folder / name, entry) is None


def entry_of(folder: Path, name: str, record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return size and checksum of a file that is there in its whole size; None if it must be written.

    `record` is the content of cache.json; None if there is none yet.
    """
    file = folder / name
    # It is newer than the record if the file was lost.
    entry = read_record(file.with_suffix(".json"), remedy=_REMEDY, keys={"bytes": int})
    if entry is None and record is not None:
        entry = record["files"].get(name)
    return entry if entry is not None and file.is_file() and file.stat().st_size == entry["bytes"] else None


def read_cache_record(folder: Path) -> dict[str, Any]:
    """Read cache.json; raises UserError if the folder has no finished cache."""
    keys = {"files": dict, "held": dict, "data": dict}  # the others are only compared
    record = read_record(folder / CACHE_FILE, remedy="make the cache again with `llmdistill cache`", keys=keys)
    if record is None:
        unfinished = (folder / REQUEST_FILE).is_file()
        raise UserError(
            f"teacher.cache {folder}: it has no {CACHE_FILE}, so it is "
            + ("an unfinished cache: go on with the same `llmdistill cache`" if unfinished else "no teacher's cache")
            + ("" if unfinished else ": make one with `llmdistill cache`, or name another folder")
        )
    return record


def cache_fingerprint(folder: Path) -> str:
    """Return the fingerprint of all that a cache holds; raises UserError if the folder has no finished cache."""
    return content_fingerprint(read_cache_record(folder)["files"])


class CacheFolder:
    """A finished cache, opened for reading."""

    def __init__(self, folder: Path) -> None:
        """Read the record; raises UserError if the folder has no finished cache."""
        self.folder = folder
        self.record = read_cache_record(folder)
        # safetensors maps the files, so that only the rows that are used are read from the disk.
        self._shard = lru_cache(_OPEN_SHARDS)(lambda shard: _open_shard(folder / shard_name(shard)))

    def check_files(self) -> None:
        """Check size and sha256 of every file; each rank reads its share of the files, and every rank must call this.

        Raises:
            UserError: a file is missing, truncated or changed; the message names it.
        """
        world = World.current()

        def check() -> None:
            damage = entries_damage(self.folder, self.record["files"], slice(world.rank, None, world.size))
            if damage is not None:
                raise UserError(f"{damage}; {_REMEDY}")

        on_every(check)

    def find_missing(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of examples that are not in the cache, in their order."""
        there = np.isin(np.asarray(ids, dtype=np.int64), self._index[0])
        return [sample_id for sample_id, known in zip(ids, there.tolist(), strict=True) if not known]

    def find(self, ids: Sequence[int]) -> np.ndarray:
        """Return where examples are, (n, 2): the shard, and the number of the example in it.

        Raises:
            UserError: an example is not in the cache.
        """
        wanted = np.asarray(ids, dtype=np.int64)
        sorted_ids, shard_places, _ = self._index
        # An id above all others has the place behind the end, where there is nothing to compare.
        order = np.searchsorted(sorted_ids, wanted).clip(max=max(0, len(sorted_ids) - 1))
        known = sorted_ids[order] == wanted
        if not known.all():
            raise UserError(
                f"{self.folder}: the teacher's cache has no example {wanted[~known][0]}; make a cache of this run's "
                "data with `llmdistill cache`"
            )
        return np.asarray(shard_places[order])

    def rows(self, name: str, places: np.ndarray) -> Tensor:
        """Return the rows of one tensor for the examples at these places, one after the other; others are not read.

        `places` comes from `find`.
        """
        offsets = self._index[2][row_positions(name)]
        parts = []
        for shard, number in places.tolist():
            first, end = offsets[shard][number : number + 2].tolist()
            parts.append(self._shard(shard).get_slice(name)[first:end])
        return torch.cat(parts)

    @cached_property
    def scaling(self) -> dict[int, float]:
        """`Taps.scaling` of the teacher, by layer."""
        with _read_shard(self.folder / shard_name(0)) as file:
            return {int(layer): value for layer, value in json.loads(file.metadata()["scaling"]).items()}

    def head(self, device: torch.device) -> HeadInputs | None:
        """Return weight and bias of the LM head, without rows; None if the cache has no hidden states."""
        if HEAD_FILE not in self.record["files"]:
            return None
        with _read_shard(self.folder / HEAD_FILE) as file:
            weight = file.get_tensor("weight").to(device)
            bias = file.get_tensor("bias").to(device) if "bias" in file.keys() else None  # noqa: SIM118  # no mapping
            scale = LogitScale(*json.loads((file.metadata() or {}).get("scale", "[]")))
        return HeadInputs(weight.new_empty(0, weight.shape[1]), weight, bias, scale)

    @cached_property
    def _index(self) -> tuple[np.ndarray, np.ndarray, dict[str, list[np.ndarray]]]:
        """The ids in ascending order, the shard and number of each, and the offsets of each shard, by positions."""
        count = len(self.record["files"].keys() - {HEAD_FILE})
        if count == 0:
            raise UserError(f"{self.folder / CACHE_FILE}: it names no shard; {_REMEDY}")
        ids: list[np.ndarray] = []
        places: list[np.ndarray] = []
        offsets: dict[str, list[np.ndarray]] = {}
        for shard in range(count):
            with _read_shard(self.folder / shard_name(shard)) as file:
                own = file.get_tensor("ids").numpy()
                if own.ndim != 1 or own.dtype != np.int64:
                    raise ValueError(f"ids of {own.dtype} and shape {own.shape}")
                for key in file.keys():  # noqa: SIM118  # no mapping
                    if key.startswith("offsets."):
                        offsets.setdefault(key.removeprefix("offsets."), []).append(file.get_tensor(key).numpy())
            ids.append(own)
            places.append(np.stack([np.full(len(own), shard), np.arange(len(own))], axis=1))
        all_ids, all_places = np.concatenate(ids), np.concatenate(places)
        order = np.argsort(all_ids, kind="stable")
        return all_ids[order], all_places[order], offsets


def _open_shard(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise _no_shard(file, error) from error


@contextmanager
def _read_shard(file: Path) -> Iterator[Any]:
    """Open a shard for a block that reads from it; a UserError if it does not hold what a cache writes."""
    try:
        with _open_shard(file) as opened:
            yield opened
    except UserError:  # a ValueError too, but it has its sentence already
        raise
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _no_shard(file, error) from error


def _no_shard(file: Path, error: Exception) -> UserError:
    return UserError(f"{file}: it cannot be read as a shard of a teacher's cache ({error}); {_REMEDY}")
