"""Sets of other data on which a fine-tuned classifier is scored, with a map of labels (KroneckerBERT A.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from llmdistill.data.pairs import PairExample
from llmdistill.data.readers import Rows, by_lower_case, read_benchmark_tsv, with_names
from llmdistill.data.sources import open_rows
from llmdistill.errors import UserError
from llmdistill.tasks import plain_name

KNOWN_SETS: Mapping[str, Mapping[str, Any]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
"""The sets whose columns and labels are known, by name."""

_KEY = "data.task.out_of_domain"
_FIELDS = ("task", "data", "sentences", "label", "labels")


def complete_sets(settings_by_name: Mapping[str, Mapping[str, Any]], task: str) -> dict[str, dict[str, Any]]:
    """Return the settings of the sets that belong to a task, completed from KNOWN_SETS.

    Raises:
        UserError: a setting is missing or unknown.
    """
    sets: dict[str, dict[str, Any]] = {}
    for name, settings in settings_by_name.items():
        unknown = [key for key in settings if key not in _FIELDS]
        if unknown:
            raise UserError(f"{_KEY}.{name}.{unknown[0]}: there is no such setting; there are {', '.join(_FIELDS)}")
        completed = {**KNOWN_SETS.get(name, {}), **settings}
        missing = [key for key in _FIELDS if key not in completed]
        if missing:
            raise UserError(
                f"{_KEY}.{name} lacks {', '.join(missing)}: give them, or take a known set "
                f"({', '.join(KNOWN_SETS)}), which needs at most data"
            )
        if plain_name(str(completed["task"])) == plain_name(task):
            sets[name] = completed
    return sets


def check_set(name: str, settings: Mapping[str, Any], classes: Sequence[str], num_sentences: int) -> None:
    """Check the settings of a set of `complete_sets`, and that its file exists; nothing is read.

    `classes` are the labels of the task, whose examples have `num_sentences` sentences.

    Raises:
        UserError: a map leaves out a class, or the file does not exist.
    """
    _number_labels(name, settings, classes, num_sentences)
    table_rows(str(settings["data"]))


def read_set(
    name: str, settings: Mapping[str, Any], classes: Sequence[str], num_sentences: int
) -> tuple[list[PairExample], tuple[int, ...]]:
    """Read a set of `complete_sets`: its examples, and the label of the set that each class of the task stands for.

    Raises:
        UserError: a map leaves out a class, or the data are missing or malformed.
    """
    spellings, class_labels = _number_labels(name, settings, classes, num_sentences)
    columns = list(settings["sentences"])
    examples = []
    needed = [*columns, str(settings["label"])]
    names = by_lower_case(needed)
    for number, (given, place) in enumerate(table_rows(str(settings["data"]))):
        row = with_names(given, names, place)
        lacking = [key for key in needed if row.get(key) is None]
        if lacking:
            raise UserError(
                f"{place}: has no {lacking[0]}, only {', '.join(map(str, row))}; name the columns as "
                f"{_KEY}.{name}.sentences and .label"
            )
        label = str(row[needed[-1]]).strip()
        label = label if label in spellings else label.removesuffix(".0")
        if label not in spellings:
            raise UserError(
                f"{place}: label {label!r}, but {_KEY}.{name}.labels knows {', '.join(spellings)}; fix the line or "
                "the map"
            )
        texts = [str(row[key]) for key in columns]
        examples.append(PairExample(texts[0], texts[1] if len(texts) > 1 else None, spellings[label], number))
    if not examples:
        raise UserError(f"{settings['data']}: holds no example; give at least one for {_KEY}.{name}")
    return examples, class_labels


def _number_labels(
    name: str, settings: Mapping[str, Any], classes: Sequence[str], num_sentences: int
) -> tuple[dict[str, int], tuple[int, ...]]:
    """Return the number of each label of a set by its spelling, and the label that each class stands for."""
    columns, label_map = list(settings["sentences"]), settings["labels"]
    if len(columns) != num_sentences:
        raise UserError(
            f"{_KEY}.{name}.sentences is {columns}, but an example of {settings['task']} has {num_sentences}: "
            "name as many"
        )
    if not isinstance(label_map, Mapping) or set(map(str, label_map)) != set(classes):
        raise UserError(
            f"{_KEY}.{name}.labels is {label_map}: give a label of the set for each class of {settings['task']}, "
            f"which are {', '.join(classes)}"
        )
    spellings, class_labels = dict[str, int](), list[int]()
    labels = {str(key): value for key, value in label_map.items()}
    for class_name in classes:
        spellings_of_class = [
            str(label)
            for label in (labels[class_name] if isinstance(labels[class_name], list) else [labels[class_name]])
        ]
        # Classes may share a label (HANS has one for neutral and contradiction); a label that is new gets the next
        # number.
        number = next(
            (spellings[label] for label in spellings_of_class if label in spellings), len(set(spellings.values()))
        )
        spellings.update(dict.fromkeys(spellings_of_class, number))
        class_labels.append(number)
    return spellings, tuple(class_labels)


def table_rows(reference: str) -> Rows:
    """Read the rows of a set with their places; a .txt is a table with tabs too (HANS).

    Raises:
        UserError: immediately if there is no such file; for a row or a file that cannot be read, when it is read.
    """
    path = Path(reference)
    return (
        read_benchmark_tsv(path)
        if path.suffix.lower() == ".txt" and path.is_file()
        else open_rows(reference, streaming=True)  # nothing is read before the first row
    )
