"""Sets of other data on which a fine-tuned classifier is scored, with a map of labels (KroneckerBERT A.2)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmdistill.data.pairs import PairExample
from llmdistill.data.readers import Rows, tsv_rows
from llmdistill.data.sources import open_rows
from llmdistill.errors import UserError
from llmdistill.tasks import plain_name
from llmdistill.tasks.glue_files import GLUE_TASKS, TABLES, GlueTask, PairSet

KNOWN_SETS: Mapping[str, Mapping[str, Any]] = TABLES["out_of_domain"]
"""The sets whose columns and labels are known, by name."""

_KEY = "data.task.out_of_domain"
_FIELDS = ("task", "data", "sentences", "label", "labels")


def sets_of(asked: Mapping[str, Mapping[str, Any]], task: str) -> dict[str, dict[str, Any]]:
    """Return the settings of the sets that belong to a task of GLUE_TASKS, with what is known of them.

    A task without classes has no such sets.

    Raises:
        UserError: a setting is missing or unknown.
    """
    sets: dict[str, dict[str, Any]] = {}
    if not GLUE_TASKS[task].classes:
        return sets
    for name, given in asked.items():
        unknown = [key for key in given if key not in _FIELDS]
        if unknown:
            raise UserError(f"{_KEY}.{name}.{unknown[0]}: there is no such setting; there are {', '.join(_FIELDS)}")
        whole = {**KNOWN_SETS.get(name, {}), **given}
        missing = [key for key in _FIELDS if key not in whole]
        if missing:
            raise UserError(
                f"{_KEY}.{name} lacks {', '.join(missing)}: give them, or take a known set "
                f"({', '.join(KNOWN_SETS)}), which needs at most data"
            )
        if plain_name(str(whole["task"])) == plain_name(task):
            sets[name] = whole
    return sets


def check_set(name: str, given: Mapping[str, Any], task: GlueTask) -> None:
    """Check the settings of a set of `sets_of`, and that its file exists; nothing is read.

    Raises:
        UserError: a map leaves out a class, or the file does not exist.
    """
    _labels(name, given, task)
    table_rows(str(given["data"]))


def read_set(name: str, given: Mapping[str, Any], task: GlueTask) -> PairSet:
    """Read a set of `sets_of`.

    Raises:
        UserError: a map leaves out a class, or the data are missing or malformed.
    """
    spellings, of_classes = _labels(name, given, task)
    columns = list(given["sentences"])
    examples = []
    needed = [*columns, str(given["label"])]
    for number, (row, place) in enumerate(table_rows(str(given["data"]))):
        lacking = [key for key in needed if row.get(key) is None]
        if lacking:
            raise UserError(
                f"{place}: has no {lacking[0]}, only {', '.join(map(str, row))}; name the columns as "
                f"{_KEY}.{name}.sentences and .label"
            )
        label = str(row[needed[-1]]).strip()
        if label not in spellings:
            raise UserError(
                f"{place}: label {label!r}, but {_KEY}.{name}.labels knows {', '.join(spellings)}; fix the line or "
                "the map"
            )
        texts = [str(row[key]) for key in columns]
        examples.append(PairExample(texts[0], texts[1] if len(texts) > 1 else None, spellings[label], number))
    if not examples:
        raise UserError(f"{given['data']}: holds no example; give at least one for {_KEY}.{name}")
    return PairSet(examples, of_classes)


def _labels(name: str, given: Mapping[str, Any], task: GlueTask) -> tuple[dict[str, int], tuple[int, ...]]:
    """Return the number of each label of a set by its spelling, and the label that each class stands for."""
    columns, map_of_labels, classes = list(given["sentences"]), given["labels"], task.classes
    if len(columns) != len(task.sentences):
        raise UserError(
            f"{_KEY}.{name}.sentences is {columns}, but an example of {given['task']} has {len(task.sentences)}: name "
            "as many"
        )
    if not isinstance(map_of_labels, Mapping) or set(map(str, map_of_labels)) != set(classes):
        raise UserError(
            f"{_KEY}.{name}.labels is {map_of_labels}: give a label of the set for each class of {given['task']}, "
            f"which are {', '.join(classes)}"
        )
    spellings, of_classes = dict[str, int](), list[int]()
    labels = {str(key): value for key, value in map_of_labels.items()}
    for each in classes:
        written = [str(label) for label in (labels[each] if isinstance(labels[each], list) else [labels[each]])]
        number = next((spellings[label] for label in written if label in spellings), len(set(spellings.values())))
        spellings.update(dict.fromkeys(written, number))
        of_classes.append(number)
    return spellings, tuple(of_classes)


def table_rows(reference: str) -> Rows:
    """Read the rows of a set with their places; a .txt is a table with tabs too (HANS).

    Raises:
        UserError: immediately if there is no such file; for a row or a file that cannot be read, when it is read.
    """
    path = Path(reference)
    return tsv_rows(path) if path.suffix.lower() == ".txt" and path.is_file() else open_rows(reference, streaming=True)
