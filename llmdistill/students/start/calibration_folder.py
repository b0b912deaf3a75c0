"""The folder in which a calibration saves its measurement, which serves students of many sizes.

statistics.json says what was measured. `sums/` has a file of each pass and rank with its sums over the data, which is
also the state of a pass that was interrupted, and the folder of each weighting one with the leading factors of each
matrix; `table` has the moments of the token embedding. These are safetensors; beside each a JSON file of the same name
has its size and sha256.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from llmdistill.artifacts import compare_records, read_record
from llmdistill.errors import UserError
from llmdistill.files import apply_umask, is_unused, remove_abandoned, temporary_folder, write_error, write_json
from llmdistill.fingerprints import file_damage, file_entry
from llmdistill.students.start.moments import PartialSums
from llmdistill.students.start.table_moments import TableMoments
from llmdistill.students.start.weighted import WeightedSVD

RECORD = "statistics.json"
_SUFFIX = ".safetensors"


def _write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] = {}) -> None:
    """Write a file of tensors; one of this name is replaced when the new one is complete."""
    try:
        with temporary_folder(file) as folder:
            part = folder / file.name
            save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, part, dict(metadata))
            apply_umask(part)
            # The entry first: tensors that are there after a kill always have theirs, and never another's.
            file.unlink(missing_ok=True)
            write_json(file.with_suffix(".json"), file_entry(part))
            os.replace(part, file)
    except (OSError, SafetensorError) as error:
        raise write_error(file, error) from error


def _read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """Read a file of `_write_tensors` and its metadata; None if there is none.

    Raises:
        UserError: it is damaged.
    """
    if not file.is_file():
        return None
    remedy = f"remove {file}, and it is measured again"
    entry = read_record(file.with_suffix(".json"), remedy=remedy)
    damage = f"{file} has no entry beside it" if entry is None else file_damage(file, entry)
    if damage is not None:
        raise UserError(f"{damage}; {remedy}")
    with safe_open(file, framework="pt") as stored:
        return {key: stored.get_tensor(key) for key in stored.keys()}, stored.metadata() or {}  # noqa: SIM118


def read_sums(file: Path, names: list[str], *, gradients: bool, table: bool = False) -> PartialSums:
    """Return the sums that a pass of one rank has saved for the named linears; none if they lack the gradients or the
    token embedding, where these are needed."""
    stored = _read_tensors(file)
    if stored is None:
        return PartialSums()
    sums, metadata = stored
    # With another limit of memory the pass of this number may be one of other linears.
    if json.loads(metadata["names"]) != names or (gradients and metadata["gradients"] != "True"):
        return PartialSums()
    if table and "table counts" not in sums:
        return PartialSums()
    return PartialSums(int(metadata["done"]), sums, json.loads(metadata["sources"]))


def write_sums(file: Path, names: list[str], sums: PartialSums, *, gradients: bool) -> None:
    """Save the sums of a pass of one rank."""
    metadata = {
        "names": json.dumps(names),
        "gradients": str(gradients),
        "done": str(sums.done),
        "sources": json.dumps(sums.sources),
    }
    _write_tensors(file, sums.sums, metadata)


class SavedFactors(Mapping[str, WeightedSVD]):
    """The factors in a folder, by the name of the matrix in the base model; a matrix is read on access."""

    def __init__(self, folder: Path, record: Mapping[str, Any], weighting: str = "gradients") -> None:
        """Open a folder for what `record` describes, in plain JSON values; nothing is written before `claim`.

        `weighting` is that of the factors; each has a folder of its own.

        Raises:
            UserError: the folder holds something else.
        """
        self.folder, self._factors, self._record = folder, folder / weighting, record
        self._table, self._gradients = folder / f"table{_SUFFIX}", weighting == "gradients"
        self._is_recorded()

    def _is_recorded(self) -> bool:
        """Whether the folder holds statistics of this record. Raises a UserError if it holds something else."""
        folder, remedy = self.folder, "choose another folder, or null to keep nothing"
        subject = f"student.factorize.calibration.folder {folder}"
        old = read_record(folder / RECORD, remedy=remedy)
        if old is None and folder.exists() and not (folder.is_dir() and is_unused(folder)):
            raise UserError(f"{subject} is not empty and holds no statistics; {remedy}")
        subject = f"{subject}: it holds statistics of another measurement"
        compare_records(old, self._record, subject=subject, remedy=remedy)
        return old is not None

    def claim(self) -> SavedFactors:
        """Create the folder if necessary and record what it is for, before anything is kept in it; return itself.

        Leftovers of killed processes are removed; other processes may use the folder at the same time.

        Raises:
            UserError: the folder holds something else.
        """
        if not self._is_recorded():
            write_json(self.folder / RECORD, self._record)
        for path in (self.folder, self._factors, self.folder / "sums"):
            path.mkdir(exist_ok=True)
            remove_abandoned(path)
        return self

    def __setitem__(self, name: str, factors: WeightedSVD) -> None:
        """Write the factors of a matrix; a file of this name is replaced when the new one is complete."""
        # As a tensor beside the others: fp64 keeps Python's floats exactly.
        figures = torch.tensor([factors.energy, factors.scale, factors.tokens, factors.seconds], dtype=torch.float64)
        tensors = {key: getattr(factors, key) for key in ("left", "values", "right")}
        _write_tensors(self._path_of(name), {**tensors, "figures": figures})

    def __getitem__(self, name: str) -> WeightedSVD:
        """Return the factors of a matrix.

        Raises:
            KeyError: there are none.
            UserError: their file is damaged.
        """
        stored = _read_tensors(self._path_of(name))
        if stored is None:
            raise KeyError(name)
        tensors, _ = stored
        energy, scale, tokens, seconds = tensors.pop("figures").tolist()
        return WeightedSVD(**tensors, energy=energy, scale=scale, tokens=int(tokens), seconds=seconds)

    @property
    def predicted_losses(self) -> dict[str, Tensor]:
        """The result of `predict_losses` for these factors; empty if it was not measured yet."""
        stored = _read_tensors(self.folder / f"costs{_SUFFIX}")
        return {} if stored is None else stored[0]

    @predicted_losses.setter
    def predicted_losses(self, losses: Mapping[str, Tensor]) -> None:
        _write_tensors(self.folder / f"costs{_SUFFIX}", losses)

    @property
    def table(self) -> TableMoments | None:
        """The moments of the token embedding that this weighting needs; None if they were not measured yet."""
        stored = _read_tensors(self._table)
        if stored is None:
            return None
        tensors, _ = stored
        moments = TableMoments(tokens=int(tensors.pop("tokens")), **tensors)
        if not self._gradients:
            return replace(moments, gradients=None, head_outputs=None)
        return None if moments.gradients is None else moments

    @table.setter
    def table(self, moments: TableMoments) -> None:
        tensors = {key: value for key, value in vars(moments).items() if isinstance(value, Tensor)}
        _write_tensors(self._table, {**tensors, "tokens": torch.tensor(moments.tokens)})

    def _path_of(self, name: str) -> Path:
        return self._factors / f"{name}{_SUFFIX}"

    def __iter__(self) -> Iterator[str]:
        return (file.name.removesuffix(_SUFFIX) for file in sorted(self._factors.glob(f"*{_SUFFIX}")))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        """Return whether the matrix was measured, without reading its factors."""
        return self._path_of(str(name)).is_file()
