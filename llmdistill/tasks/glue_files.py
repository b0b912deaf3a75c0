"""GLUE (Wang et al. 2019): the properties of its tasks, and their examples from GLUE's files or from the Hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from llmdistill.data.pairs import PairExample
from llmdistill.data.readers import Rows, read_benchmark_tsv
from llmdistill.data.sources import benchmark_rows
from llmdistill.errors import UserError

Metric = Literal["accuracy", "f1", "matthews", "pearson", "spearman"]

Split = Literal["train", "dev", "dev_mismatched", "test", "test_mismatched"]
"""Only MNLI has mismatched splits; its dev and test are the matched splits."""

DEV: tuple[Split, ...] = ("dev", "dev_mismatched")
TEST: tuple[Split, ...] = ("test", "test_mismatched")
"""Of these splits, and of those of DEV, most tasks have only the first."""

HUB_NAME = "nyu-mll/glue"


@dataclass(frozen=True, kw_only=True)
class GlueTask:
    """The properties of one task and its files; the name of a task is the name of its folder in GLUE's download."""

    hub: str
    """The configuration name of the task in the data set on the Hub."""
    sentences: tuple[str, ...]
    """The column of the sentence, or the columns of the two sentences."""
    hub_sentences: tuple[str, ...] | None = None
    """The names of these columns on the Hub, if they differ."""
    label: str = "label"
    """The column of the label; on the Hub it is always `label`."""
    headerless: tuple[str, ...] = ()
    """The columns of the training and dev files, if these files have no header line."""
    index: str = "index"
    """The column of the example number in the test files."""
    classes: tuple[str, ...] = ("0", "1")
    """The labels in the files, in the order of the class numbers on the Hub; empty if the label is a score."""
    metrics: tuple[Metric, ...] = ("accuracy",)
    """The metrics that GLUE reports; settings are chosen by the first metric on dev."""
    has_mismatched: bool = False
    """Whether there are separate dev and test splits for the genres of the training set and for other genres."""
    has_torn_lines: bool = False
    """Whether the published training file has lines that are broken in two; such lines are left out, as usual."""

    @property
    def num_outputs(self) -> int:
        """The number of outputs of the classifier: the number of classes, or 1 for a score."""
        return len(self.classes) or 1


TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("glue.yaml").read_text(encoding="utf-8"))
"""The published tasks, the columns of the papers' tables, and sets of other data."""

GLUE: tuple[str, ...] = tuple(TABLES["tasks"])
"""The names of the tasks of GLUE."""

GLUE_TASKS: dict[str, GlueTask] = {
    name: GlueTask(
        **cast("Any", {key: tuple(each) if isinstance(each, list) else each for key, each in fields.items()})
    )
    for name, fields in {**TABLES["tasks"], **TABLES["others"]}.items()
}
"""The tasks on sentences and pairs of sentences by name: those of GLUE, and others."""

BEST_SCORE = 5.0
"""The maximum score of STS-B; the minimum is 0."""


@dataclass(frozen=True)
class PairSet:
    """A split of a task, or a set of other data on which models are scored."""

    examples: list[PairExample]
    labels: tuple[int, ...] = ()
    """The label that each class of the task stands for, if the targets are numbers of the set's own labels."""


def glue_name(task: str) -> str:
    """Return the name in GLUE_TASKS of a task in `tasks.TASKS`, such as SST-2 for sst2."""
    return next(name for name, glue in GLUE_TASKS.items() if glue.hub == task)


def column_of(name: str, split: Split) -> str:
    """Return the column name of a split in papers and on the GLUE server: MNLI-m, MNLI-mm, or the task's name."""
    if not GLUE_TASKS[name].has_mismatched:
        return name
    return f"{name}-mm" if split.endswith("_mismatched") else f"{name}-m"


def task_paths(name: str, data_dir: str, *, setting: str) -> list[Path]:
    """Return the files of a task's folder, some of which are read; raise UserError if there is no folder."""
    folder = Path(data_dir) / name
    if not folder.is_dir():
        there = [name for name in GLUE if (Path(data_dir) / name).is_dir()]
        raise UserError(
            f"{setting} {data_dir}: it has no folder {name} (of GLUE's tasks it has {', '.join(there) or 'none'}); add "
            "it, or name a task that is there"
        )
    return sorted(path for path in folder.iterdir() if path.suffix in (".tsv", ".txt"))


def read_split(task: str, split: Split, data_dir: str | Path | None) -> list[PairExample]:
    """Read the examples of a split of a task in GLUE_TASKS, in order.

    data_dir is the folder of GLUE's download, with one subfolder per task, which contains train.tsv and so on (for MRPC
    also the original msr_paraphrase_train.txt and _test.txt, with dev_ids.tsv). Without it the examples are loaded from
    the Hub.

    Raises:
        UserError: the file does not exist, there are no examples, a column is missing, or a line is malformed; the
            message names the line.
    """
    named = GLUE_TASKS[task]
    rows = _hub_rows(named, split) if data_dir is None else _file_rows(named, split, Path(data_dir) / task)
    examples = [_example(named, split, row, number, place) for number, (row, place) in enumerate(rows)]
    if not examples:
        where = f"{HUB_NAME}, {named.hub}" if data_dir is None else Path(data_dir) / task
        raise UserError(f"{where}: {split} holds no example; take GLUE's own download, whole")
    return examples


def _example(task: GlueTask, split: Split, row: dict[str, str], number: int, place: str) -> PairExample:
    first, second = row[task.sentences[0]], row[task.sentences[1]] if len(task.sentences) > 1 else None
    if not split.startswith("test"):
        return PairExample(first, second, _target(task, row[task.label], place), number)
    text = row.get(task.index, str(number))  # the lines of MRPC's original file have no numbers
    if not text.isdecimal() or len(text) > 18:  # what fits into 64 bits
        raise UserError(f"{place}: {task.index} {text[:40]!r}, expected a whole number; take GLUE's own test file")
    return PairExample(first, second, None, int(text))


def _target(task: GlueTask, text: str, place: str) -> int | float:
    if task.classes:
        if text not in task.classes:
            raise UserError(f"{place}: label {text!r}, expected one of {', '.join(task.classes)}; fix the line")
        return task.classes.index(text)
    try:
        score = float(text)
    except ValueError:
        score = -1.0
    if not 0 <= score <= BEST_SCORE:
        raise UserError(f"{place}: label {text!r}, expected a score from 0 to {BEST_SCORE:g}; fix the line")
    return score


def _file_rows(task: GlueTask, split: Split, folder: Path) -> Rows:
    names = {"dev": "dev_matched", "test": "test_matched"} if task.has_mismatched else {}
    path = folder / f"{names.get(split, split)}.tsv"
    original = folder / f"msr_paraphrase_{'test' if split == 'test' else 'train'}.txt"
    if path.is_file() or task.hub != "mrpc" or not original.is_file():
        return _tsv_rows(task, split, path)
    return _tsv_rows(task, split, original) if split == "test" else _original_mrpc(task, split, original)


def _original_mrpc(task: GlueTask, split: Split, path: Path) -> Rows:
    """Read MRPC from its original files; GLUE's dev split is a part of the training set, given by a list of pairs."""
    ids = ("#1 ID", "#2 ID")
    # Whether the list has a header does not matter: that is no pair.
    dev = {tuple(row.values()) for row, _ in read_benchmark_tsv(_there(path.with_name("dev_ids.tsv")), header=ids)}
    for row, place in _tsv_rows(task, split, path):
        if (tuple(row.get(each) for each in ids) in dev) == (split == "dev"):
            yield row, place


def _tsv_rows(task: GlueTask, split: Split, path: Path) -> Rows:
    is_test = split.startswith("test")
    needed = [*task.sentences, *([] if is_test else [task.label])]
    for row, place in read_benchmark_tsv(_there(path), header=None if is_test else task.headerless or None):
        missing = [name for name in needed if name not in row]
        if not missing:
            yield row, place
        elif is_test or not task.has_torn_lines:
            raise UserError(
                f"{place}: has no column {', '.join(missing)}, only {', '.join(row)}; expected {', '.join(needed)}, "
                "with tabs between them, as in GLUE's own download"
            )


def _there(path: Path) -> Path:
    if not path.is_file():
        raise UserError(
            f"{path}: no such file; give the folder of GLUE's own download as the data folder, or none for the hub's"
        )
    return path


def _hub_rows(task: GlueTask, split: Split) -> Rows:
    """Read rows from the Hub and convert them to the column names and labels of the files."""
    name = split.replace("dev", "validation")
    if task.has_mismatched and name in ("validation", "test"):
        name += "_matched"
    rows = benchmark_rows(HUB_NAME, task.hub, name, files="the folder of GLUE's own download")
    sentences = dict(zip(task.hub_sentences or task.sentences, task.sentences, strict=True))
    for row, place in rows:
        if not row.keys() >= {*sentences, "label", "idx"} or not all(isinstance(row[key], str) for key in sentences):
            raise UserError(
                f"{place}: has {', '.join(row)}, expected {', '.join(sentences)} as text, label and idx; "
                "give the folder of GLUE's own download as the data folder"
            )
        label = row["label"]
        if task.classes and isinstance(label, int) and 0 <= label < len(task.classes):
            label = task.classes[label]
        texts = {column: row[key] for key, column in sentences.items()}
        yield {**texts, task.label: str(label), task.index: str(row["idx"])}, place
