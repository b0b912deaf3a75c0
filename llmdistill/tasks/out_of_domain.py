"""Sets of other data on which a fine-tuned classifier is scored, with a map of labels (KroneckerBERT A.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from llmdistill.data.pairs import PairExample
from llmdistill.data.sources import Rows, open_rows, tsv_rows
from llmdistill.errors import UserError
from llmdistill.tasks import plain_name
from llmdistill.tasks.glue_files import PairSet

_KEY = "data.task.out_of_domain"
_FIELDS = ("task", "data", "sentences", "label", "labels")


@cache
def known_sets() -> Mapping[str, Mapping[str, Any]]:
    """Return the sets whose columns and labels are known, by name."""
    found: Mapping[str, Mapping[str, Any]] = yaml.safe_load(
        Path(__file__).with_name("out_of_domain.yaml").read_text(encoding="utf-8")
    )
    return found


def read_further(
    asked: Mapping[str, Mapping[str, Any]], task: str, classes: Sequence[str], num_sentences: int
) -> dict[str, PairSet]:
    """Read the sets that belong to a task.

    Args:
        asked: the settings of each set by its name; those of known sets need not say what is known.
        task: the task on which models are fine-tuned, as tables name it, such as MRPC.
        classes: the classes of the task.
        num_sentences: the number of sentences of an example of the task.

    Raises:
        UserError: a setting is missing or unknown, a map leaves out a class, or the data are missing or malformed.
    """
    return {name: _read(name, given, classes, num_sentences) for name, given in sets_of(asked, task).items()}


def check_further(
    asked: Mapping[str, Mapping[str, Any]], task: str, classes: Sequence[str], num_sentences: int
) -> None:
    """Check the settings of the sets that belong to a task, and that their files exist; nothing is read.

    The arguments are those of `read_further`.

    Raises:
        UserError: a setting is missing or unknown, a map leaves out a class, or a file does not exist.
    """
    for name, given in sets_of(asked, task).items():
        _labels(name, given, classes, num_sentences)
        table_rows(str(given["data"]))


def sets_of(asked: Mapping[str, Mapping[str, Any]], task: str) -> dict[str, dict[str, Any]]:
    """Return the settings of the sets that belong to a task, with what is known of them."""
    return {name: given for name, given in _whole(asked).items() if plain_name(str(given["task"])) == plain_name(task)}


def _whole(asked: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the settings of each set with what is known of it."""
    sets = {}
    for name, given in asked.items():
        unknown = [key for key in given if key not in _FIELDS]
        if unknown:
            raise UserError(f"{_KEY}.{name}.{unknown[0]}: there is no such setting; there are {', '.join(_FIELDS)}")
        sets[name] = {**known_sets().get(name, {}), **given}
        missing = [key for key in _FIELDS if key not in sets[name]]
        if missing:
            raise UserError(
                f"{_KEY}.{name} lacks {', '.join(missing)}: give them, or take a known set "
                f"({', '.join(known_sets())}), which needs at most data"
            )
    return sets


def _labels(
    name: str, given: Mapping[str, Any], classes: Sequence[str], num_sentences: int
) -> tuple[dict[str, int], tuple[int, ...]]:
    """Return the number of each label of a set by its spelling, and the label that each class stands for."""
    columns, map_of_labels = list(given["sentences"]), given["labels"]
    if len(columns) != num_sentences:
        raise UserError(
            f"{_KEY}.{name}.sentences is {columns}, but an example of {given['task']} has {num_sentences}: name as many"
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


def _read(name: str, given: Mapping[str, Any], classes: Sequence[str], num_sentences: int) -> PairSet:
    spellings, of_classes = _labels(name, given, classes, num_sentences)
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


def table_rows(reference: str) -> Rows:
    """Read the rows of a set with their places; a .txt is a table with tabs too (HANS).

    Raises:
        UserError: immediately if there is no such file; for a row or a file that cannot be read, when it is read.
    """
    path = Path(reference)
    return tsv_rows(path) if path.suffix.lower() == ".txt" and path.is_file() else open_rows(reference, streaming=True)
