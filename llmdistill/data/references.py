"""References to data sets: several sets with commas between them, their weights, and the files that they name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from llmdistill.data.readers import READERS, read_error
from llmdistill.embedded import locate_data
from llmdistill.errors import UserError
from llmdistill.fingerprints import content_fingerprint, fingerprint

TEACHER = "teacher"
"""Stands for what the teacher of a run writes itself, in data.train and in the calibration data."""

_COMMA = re.compile(r",(?![^\[]*\])")  # a comma inside the brackets of a slice separates nothing
_WEIGHT = re.compile(r"(?P<name>.+)=(?P<weight>\d+(\.\d*)?|\.\d+)")
_LONGEST_NAME = 255
"""Bytes of a file's name, on all file systems that are in use."""
_ABOUT_DATA = (".md", ".provenance.json")
"""How the names of files end that may be in a folder of data and hold no rows."""
_ROWS_ARE_IN = "only JSONL, JSON, Parquet, CSV and TSV files hold rows; name the files, with commas between them"


class Part(NamedTuple):
    """One of the sets of a reference, with its weight if the reference gives weights."""

    reference: str
    weight: float | None = None


def parts_of(reference: str | Path) -> list[Part]:
    """Split a reference into its sets, which have commas between them: ``a.jsonl,b.jsonl``, or with weights
    ``a.jsonl=2,b.jsonl=1``. A path that exists is one set, whatever is in its name.

    Raises:
        UserError: a set has no name, or only some have a weight, or one has the weight 0, or one with a weight is named
            twice.
    """
    text = str(reference)
    if os.path.exists(text):
        return [Part(text)]
    if not text:
        raise UserError("the name of a data set is empty; name a file, or leave the setting out")
    names, parts = _COMMA.split(text), list[Part]()
    # A call with a text in place of its file is likely; the text has line ends, or is longer than any name.
    if "\n" in text or any(
        len(piece.encode(errors="replace")) > _LONGEST_NAME for name in names for piece in name.split("/")
    ):
        raise UserError(
            f"{text[:40]}...: this is a text, not the name of a data set; give a list of texts, or write it to a file"
        )
    for name in names:
        # A file may have a name like a.jsonl=2.
        weighted = None if os.path.exists(name) else _WEIGHT.fullmatch(name.strip())
        parts.append(
            Part(name.strip()) if weighted is None else Part(weighted["name"].strip(), float(weighted["weight"]))
        )
    if not all(part.reference for part in parts):
        raise UserError(f"{text}: the name before or after a comma is missing; write it, or take the comma out")
    weights = [part.weight for part in parts]
    if weights != [None] * len(parts) and not all(weights):
        raise UserError(f"{text}: give a weight over 0 to every set, as in a.jsonl=2,b.jsonl=1, or to none")
    if any(weights) and len({part.reference for part in parts}) < len(parts):
        raise UserError(f"{text}: a set is named twice; name it once, with the sum of its weights")
    return parts


def is_weighted(reference: str | Path) -> bool:
    return any(part.weight is not None for part in parts_of(reference))


def data_fingerprint(reference: str) -> str:
    """Return the `fingerprint` of a set; of several sets with their weights one of all."""
    parts = parts_of(reference) if reference else []
    if len(parts) < 2:
        return fingerprint(reference)
    return content_fingerprint([[fingerprint(part.reference), part.weight] for part in parts])


def is_saved_set(path: Path) -> bool:
    """Return whether a folder is a Dataset that `save_to_disk` of the datasets library wrote."""
    return (path / "state.json").is_file() and (path / "dataset_info.json").is_file()


def local_files(reference: str) -> list[Path] | None:
    """Return the file of a set, or those of a folder in the order of their names.

    Returns None if the set is not local, or was saved by `save_to_disk` of the datasets library.

    Raises:
        UserError: a folder holds no rows, or a file of something else.
    """
    path = locate_data(reference)
    if not os.path.isdir(path):
        return [path] if os.path.exists(path) else None
    if (path / "dataset_dict.json").is_file():  # of a DatasetDict
        splits = sorted(subfolder.name for subfolder in path.iterdir() if subfolder.is_dir())
        raise UserError(f"{reference}: the folder of the splits {', '.join(splits)}; give the folder of one of them")
    if is_saved_set(path):
        return None
    files = []
    for file in visible_files(path):
        if file.suffix.lower() in READERS and not file.name.endswith(_ABOUT_DATA):
            files.append(file)
        elif file.suffix and not file.name.endswith(_ABOUT_DATA):
            text = "; a corpus is read with --data.kind text" if file.suffix.lower() == ".txt" else ""
            raise UserError(f"{reference}: the folder holds {file.relative_to(path)}, and {_ROWS_ARE_IN}{text}")
    if not files:
        raise UserError(f"{reference}: the folder holds no file of rows, and {_ROWS_ARE_IN}")
    return files


def text_files(reference: str | Path) -> list[Path] | None:
    """Return the files of a text in order, or of several with commas between them; None if the text is not local.

    Raises:
        UserError: one does not exist, or has a weight; or several are not all local.
    """
    parts = parts_of(reference)
    files_of_parts: list[list[Path] | None] = []
    for part in parts:
        path = locate_data(part.reference)
        if os.path.isdir(path):
            files_of_parts.append(list(visible_files(path)))
            if not files_of_parts[-1]:
                raise UserError(f"{part.reference}: a folder without files; put the text in or name a file")
        elif os.path.exists(path):
            files_of_parts.append([path])
        elif path.is_absolute() or path.suffix.lower() == ".txt":
            raise UserError(
                f"{part.reference}: no such file; give a plain text, JSONL, JSON, Parquet, CSV or TSV file, a folder "
                "of them, or OWNER/NAME[[:CONFIG]:SPLIT] of a data set on the hub; or several of these with commas "
                "between them"
            )
        else:  # a data set on the hub
            files_of_parts.append(None)
    if any(part.weight is not None for part in parts):
        raise UserError(f"{reference}: weights are for data.train; leave them out")
    if len(parts) > 1 and None in files_of_parts:
        other = parts[files_of_parts.index(None)].reference
        raise UserError(f"{other}: no such file; of several texts each is a file or a folder on this machine")
    return (
        None if files_of_parts[0] is None else [file for files in files_of_parts if files is not None for file in files]
    )


def visible_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and those below it, in the order of their names, without hidden ones."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise read_error(folder, "a folder", error) from error
    for name in names:
        path = folder / name
        if name.startswith("."):
            continue
        if os.path.isfile(path):
            yield path
        elif os.path.isdir(path) and not os.path.islink(path):  # a link may lead into a circle
            yield from visible_files(path)
