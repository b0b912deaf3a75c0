"""What a calibration keeps in a folder, so that one measurement serves students of many sizes.

statistics.json says what was measured. `sums/` has a file of each pass and rank with its sums over the data, which is
also the state of a pass that was interrupted, and the folder of each weighting one with the leading factors of each
matrix. These are safetensors; beside each a JSON file of the same name has its size and sha256.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from llmdistill.artifacts import compare_records, read_record
from llmdistill.errors import UserError
from llmdistill.files import cannot_write, is_unused, remove_abandoned, share, temporary_folder, write_json
from llmdistill.fingerprints import file_damage, file_entry
from llmdistill.students.start.moments import Begun
from llmdistill.students.start.weighted import WeightedSVD

RECORD = "statistics.json"
_SUFFIX = ".safetensors"


def _write(file: Path, tensors: Mapping[str, Tensor], words: Mapping[str, str] = {}) -> None:
    """Write a file of tensors; one of this name is replaced when the new one is complete."""
    try:
        with temporary_folder(file) as folder:
            part = folder / file.name
            save_file({key: each.cpu().contiguous() for key, each in tensors.items()}, part, dict(words))
            share(part)
            # The entry first: tensors that are there after a kill always have theirs, and never another's.
            file.unlink(missing_ok=True)
            write_json(file.with_suffix(".json"), file_entry(part))
            os.replace(part, file)
    except (OSError, SafetensorError) as error:
        raise cannot_write(file, error) from error


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """Read a file of `_write` and its words; None if there is none.

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
    with safe_open(file, framework="pt") as kept:
        return {key: kept.get_tensor(key) for key in kept.keys()}, kept.metadata() or {}  # noqa: SIM118


def read_sums(file: Path, names: list[str], *, gradients: bool) -> Begun:
    """Return what a pass of one rank has summed up of the named linears: nothing without gradients that are needed."""
    found = _read(file)
    if found is None:
        return Begun()
    sums, words = found
    if json.loads(words["names"]) != names or (gradients and words["gradients"] != "True"):
        return Begun()
    return Begun(int(words["done"]), sums, json.loads(words["sources"]))


def write_sums(file: Path, names: list[str], begun: Begun, *, gradients: bool) -> None:
    """Keep what a pass of one rank has summed up."""
    words = {
        "names": json.dumps(names),
        "gradients": str(gradients),
        "done": str(begun.done),
        "sources": json.dumps(begun.sources),
    }
    _write(file, begun.sums, words)


class KeptFactors(Mapping[str, WeightedSVD]):
    """The factors in a folder, by the name of the matrix in the base model; each is read when it is asked for."""

    def __init__(self, folder: Path, record: Mapping[str, Any], weighting: str = "gradients") -> None:
        """Claim a folder for what `record` describes, in plain JSON values; create the folder if necessary.

        `weighting` is that of the factors; each has a folder of its own.

        What killed processes have left in it is removed; other living ones may use it at the same time.

        Raises:
            UserError: the folder holds something else.
        """
        self.folder, self._factors = folder, folder / weighting
        remedy = "choose another folder, or null to keep nothing"
        subject = f"student.factorize.calibration.folder {folder}"
        old = read_record(folder / RECORD, remedy=remedy)
        if old is None and folder.exists() and not (folder.is_dir() and is_unused(folder)):
            raise UserError(f"{subject} is not empty and holds no statistics; {remedy}")
        subject = f"{subject}: it holds statistics of another measurement"
        compare_records(old, record, subject=subject, remedy=remedy)
        if old is None:
            write_json(folder / RECORD, record)
        for each in (folder, self._factors, folder / "sums"):
            each.mkdir(exist_ok=True)
            remove_abandoned(each)

    def __setitem__(self, name: str, factors: WeightedSVD) -> None:
        """Write the factors of a matrix; a file of this name is replaced when the new one is complete."""
        figures = torch.tensor([factors.energy, factors.scale, factors.tokens, factors.seconds], dtype=torch.float64)
        tensors = {key: getattr(factors, key) for key in ("left", "values", "right")}
        _write(self._file(name), {**tensors, "figures": figures})

    def __getitem__(self, name: str) -> WeightedSVD:
        """Return the factors of a matrix.

        Raises:
            KeyError: there are none.
            UserError: their file is damaged.
        """
        found = _read(self._file(name))
        if found is None:
            raise KeyError(name)
        tensors, _ = found
        energy, scale, tokens, seconds = tensors.pop("figures").tolist()
        return WeightedSVD(**tensors, energy=energy, scale=scale, tokens=int(tokens), seconds=seconds)

    @property
    def costs(self) -> dict[str, Tensor]:
        """What `cut_costs` measured for these factors; empty if it was not measured yet."""
        found = _read(self.folder / f"costs{_SUFFIX}")
        return {} if found is None else found[0]

    @costs.setter
    def costs(self, costs: Mapping[str, Tensor]) -> None:
        _write(self.folder / f"costs{_SUFFIX}", costs)

    def _file(self, name: str) -> Path:
        return self._factors / f"{name}{_SUFFIX}"

    def __iter__(self) -> Iterator[str]:
        return (file.name.removesuffix(_SUFFIX) for file in sorted(self._factors.glob(f"*{_SUFFIX}")))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        """Return whether the matrix was measured, without reading its factors."""
        return self._file(str(name)).is_file()
