"""XNLI: a model is fine-tuned on English pairs of sentences and scored on the test sets of fifteen languages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from llmdistill.config.data import TaskConfig
from llmdistill.data.pairs import PairExample
from llmdistill.data.readers import Rows, read_benchmark_tsv
from llmdistill.data.sources import benchmark_rows
from llmdistill.errors import UserError
from llmdistill.tasks import task_folder
from llmdistill.tasks.glue import GLUE_TASKS, Glue, GlueData, PairSet
from llmdistill.tasks.stored import TaskFiles

NAME = "XNLI"
LANGUAGES = ("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")
_HUB = "facebook/xnli"
_SPLITS = {"dev": "xnli.dev.tsv", "test": "xnli.test.tsv"}
_TRAIN = (("xnli", "multinli.train.en.tsv"), ("xnli", "train.tsv"), ("mnli", "train.tsv"))
"""The task in whose folder a training file may be, and its name, the first one first."""
_SYNONYMS = {"contradictory": "contradiction"}  # as XNLI's multinli.train.en.tsv spells it
_COLUMNS = (("sentence1", "sentence2", "gold_label"), ("premise", "hypo", "label"))
"""The columns of XNLI and MNLI, and of XNLI's own copy of the training set."""


@dataclass(frozen=True, kw_only=True, eq=False)
class XnliData(GlueData):
    """The pairs of XNLI, and the scores of models by language."""

    task: Xnli
    main_column = NAME
    """The mean over the languages."""

    def column(self, name: str) -> str:
        return f"{NAME} {name}" if name == "dev" else name

    def summary(self, scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """See Glue; the column XNLI is the mean over the test sets of the languages."""
        summary = super().summary(scores)
        mean = fmean(summary["dev"][column]["accuracy"] for column in self.labels)
        return {**summary, "dev": {**summary["dev"], NAME: {"accuracy": mean}}}

    def legend(self) -> str:
        languages = ", ".join(name.removeprefix(f"{NAME}-") for name in self.labels)
        return (
            f"Accuracy x 100 on the joint dev set, by which settings are chosen, and on the test sets of {languages}; "
            f"{NAME} is the mean of the test sets. {self.sizes['train']:,} English training examples."
        )


class Xnli(Glue):
    """XNLI; settings are chosen on the joint dev set of all languages (Conneau et al. 2020)."""

    data_class = XnliData
    hub = _HUB

    @classmethod
    def files_in(cls, folder: str, key: str, *, setting: str) -> list[Path]:
        return [_find_train_file(folder), *(_find_split_file(folder, split) for split in _SPLITS)]

    def read_files(self) -> TaskFiles[PairExample, PairSet]:
        return read_xnli(self.config.data.task, only_scores=self.only_scores)

    def token_settings(self) -> dict[str, Any]:
        return {**super().token_settings(), "languages": self.config.data.task.languages}


def read_xnli(settings: TaskConfig, *, only_scores: bool = False) -> TaskFiles[PairExample, PairSet]:
    """Read the English training set, the joint dev set, and the test set of each language; or only the latter two.

    Raises:
        UserError: a file is missing or malformed, or a language has no data.
    """
    folder, train = settings.dir, list[PairExample]()
    if not only_scores:
        if folder is None:
            train = _read_examples(_read_hub_rows("en", "train"))
        else:
            train = _read_examples(read_benchmark_tsv(_find_train_file(folder)))
        if not train:
            raise UserError(f"{folder or _HUB}: holds no example of XNLI; take the official files, whole")
    examples: dict[str, dict[str, list[PairExample]]] = {split: {} for split in _SPLITS}
    for split, by_language in examples.items():
        if folder is None:
            wanted = [language for language in settings.languages or LANGUAGES if language in LANGUAGES]
            by_language |= {language: _read_examples(_read_hub_rows(language, split)) for language in wanted}
            continue
        for row, place in read_benchmark_tsv(_find_split_file(folder, split)):
            if not row.get("language"):
                raise UserError(f"{place}: has no language, only {', '.join(row)}; take XNLI's own file")
            of_language = by_language.setdefault(row["language"], [])
            of_language.append(_read_example(row, place, len(of_language)))
    dev, test = examples.values()
    there = [language for language in LANGUAGES if language in dev and language in test]
    languages = there if settings.languages is None else settings.languages
    missing = next((language for language in languages if language not in there), None)
    if missing is not None or not languages:
        raise UserError(
            f"data.task.languages: {folder or _HUB} has no dev and test examples for "
            f"{missing or 'any language'}, only for {', '.join(there) or 'none'}; add them, or name languages that are "
            "there"
        )
    classes = tuple(range(len(GLUE_TASKS[NAME].classes)))
    sets = {"dev": PairSet([example for language in languages for example in dev[language]])}
    # With labels of its own a set is scored by accuracy alone, and no setting is chosen on it.
    sets |= {f"{NAME}-{language}": PairSet(test[language], classes) for language in languages}
    return TaskFiles(train[: settings.limit], sets)


def _read_examples(rows: Rows) -> list[PairExample]:
    return [_read_example(row, place, number) for number, (row, place) in enumerate(rows)]


def _read_example(row: Mapping[str, Any], place: str, number: int) -> PairExample:
    columns = next((names for names in _COLUMNS if all(row.get(key) is not None for key in names)), None)
    if columns is None:
        raise UserError(f"{place}: expected {', '.join(_COLUMNS[0])}, it has {', '.join(row)}; take the official file")
    first, second, label = (str(row[key]) for key in columns)
    classes = GLUE_TASKS[NAME].classes
    label = _SYNONYMS.get(label, label)
    if label not in classes:
        raise UserError(f"{place}: label {label!r}, expected one of {', '.join(classes)}; fix the line")
    return PairExample(first, second, classes.index(label), number)


def _find_train_file(folder: str) -> Path:
    paths = [Path(task_folder(folder, task)) / name for task, name in _TRAIN]
    file = next((path for path in paths if path.is_file()), None)
    if file is None:
        raise UserError(
            f"{folder}: it has no training set of XNLI, {' or '.join(name for _, name in _TRAIN[:2])} in a folder "
            "XNLI or train.tsv in a folder MNLI; add one of them"
        )
    return file


def _find_split_file(folder: str, split: str) -> Path:
    path = Path(task_folder(folder, NAME)) / _SPLITS[split]
    if not path.is_file():
        raise UserError(f"{path}: no such file; take XNLI's own download, whole, or none for the hub")
    return path


def _read_hub_rows(language: str, split: str) -> Rows:
    rows = benchmark_rows(_HUB, language, split.replace("dev", "validation"), files="the folder of XNLI's own files")
    classes = dict(enumerate(GLUE_TASKS[NAME].classes))
    for row, place in rows:
        label: Any = row.get("label")
        yield {"premise": row.get("premise"), "hypo": row.get("hypothesis"), "label": classes.get(label, label)}, place
