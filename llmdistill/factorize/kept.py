"""Factors of weighted matrices in a folder, so that one measurement serves students of many sizes.

statistics.json says what was measured, and one safetensors file for each matrix holds its leading factors; beside it a
JSON file of the same name has its size and sha256.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from llmdistill.artifacts import compare_records, read_record, write_record
from llmdistill.errors import UserError
from llmdistill.factorize.weighted import WeightedSVD
from llmdistill.files import cannot_write, is_unused, remove_abandoned, share, temporary_folder
from llmdistill.fingerprints import file_damage, file_entry

RECORD = "statistics.json"
_SUFFIX = ".safetensors"


class KeptFactors(MutableMapping[str, WeightedSVD]):
    """The factors in a folder, by the name of the matrix in the base model; each is read when it is asked for."""

    def __init__(self, folder: Path, record: Mapping[str, Any]) -> None:
        """Claim a folder for what `record` describes, in plain JSON values; create the folder if necessary.

        What killed processes have left in it is removed; other living ones may use it at the same time.

        Raises:
            UserError: the folder holds something else.
        """
        self.folder = folder
        remedy = "choose another folder, or null to keep nothing"
        subject = f"student.factorize.calibration.folder {folder}"
        old = read_record(folder / RECORD, remedy=remedy)
        if old is None and folder.exists() and not (folder.is_dir() and is_unused(folder)):
            raise UserError(f"{subject} is not empty and holds no statistics; {remedy}")
        subject = f"{subject}: it holds statistics of another measurement"
        compare_records(old, record, finished=False, subject=subject, remedy=remedy)
        if old is None:
            write_record(folder / RECORD, record)
        remove_abandoned(folder)

    def __setitem__(self, name: str, factors: WeightedSVD) -> None:
        """Write the factors of a matrix; a file of this name is replaced when the new one is complete."""
        figures = torch.tensor([factors.energy, factors.scale, factors.tokens, factors.seconds], dtype=torch.float64)
        tensors = {key: getattr(factors, key).contiguous() for key in ("left", "values", "right")}
        file = self.folder / f"{name}{_SUFFIX}"
        try:
            with temporary_folder(file) as folder:
                part = folder / file.name
                save_file({**tensors, "figures": figures}, part)
                share(part)
                # The entry first: factors that are there after a kill always have theirs.
                write_record(self.folder / f"{name}.json", file_entry(part))
                os.replace(part, file)
        except (OSError, SafetensorError) as error:
            raise cannot_write(file, error) from error

    def __getitem__(self, name: str) -> WeightedSVD:
        """Return the factors of a matrix.

        Raises:
            KeyError: there are none.
            UserError: their file is damaged.
        """
        file = self.folder / f"{name}{_SUFFIX}"
        if not file.is_file():
            raise KeyError(name)
        remedy = f"remove {file}, and the matrix is measured again"
        entry = read_record(self.folder / f"{name}.json", remedy=remedy, keys={"bytes": int, "sha256": str})
        damage = None if entry is None else file_damage(file, entry)  # versions up to 0.5 wrote no entry
        if damage is not None:
            raise UserError(f"{damage}; {remedy}")
        try:
            with safe_open(file, framework="pt") as kept:
                tensors = {key: kept.get_tensor(key) for key in ("left", "values", "right")}
                energy, scale, tokens, seconds = kept.get_tensor("figures").tolist()
        except (SafetensorError, ValueError, RuntimeError) as error:
            raise UserError(f"{file}: not a whole file of factors: {remedy}") from error
        return WeightedSVD(**tensors, energy=energy, scale=scale, tokens=int(tokens), seconds=seconds)

    def __delitem__(self, name: str) -> None:
        """Remove the factors of a matrix."""
        (self.folder / f"{name}{_SUFFIX}").unlink()
        (self.folder / f"{name}.json").unlink(missing_ok=True)

    def __iter__(self) -> Iterator[str]:
        """Return the names of the matrices."""
        return (file.name.removesuffix(_SUFFIX) for file in sorted(self.folder.glob(f"*{_SUFFIX}")))

    def __len__(self) -> int:
        """Return the number of matrices."""
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        """Return whether the matrix was measured, without reading its factors."""
        return (self.folder / f"{name}{_SUFFIX}").is_file()
