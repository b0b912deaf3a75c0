"""GLUE (Wang et al. 2019): the properties of its tasks, and their examples from GLUE's files or from the Hub."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import yaml

from llmdistill.data.pairs import PairExample
from llmdistill.data.sources import benchmark_rows
from llmdistill.errors import UserError
from llmdistill.tasks.out_of_domain import FurtherSet

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
"""The published tasks, and the columns of the papers' tables."""


def _task(fields: dict[str, Any]) -> GlueTask:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return GlueTask(**values)


GLUE: tuple[str, ...] = tuple(TABLES["tasks"])
"""The names of the tasks of GLUE."""

GLUE_TASKS: dict[str, GlueTask] = {
    name: _task(fields) for name, fields in {**TABLES["tasks"], **TABLES["others"]}.items()
}
"""The tasks on sentences and pairs of sentences by name: those of GLUE, and others."""

_MOST_DIGITS = 18
"""Digits of the number of an example, which fits into 64 bits."""

BEST_SCORE = 5.0
"""The maximum score of STS-B; the minimum is 0."""


@dataclass(frozen=True, kw_only=True)
class TaskFiles:
    """A task with its examples. Two instances are equal if their training and dev examples are equal."""

    name: str
    """The name of the task in GLUE_TASKS."""
    train: list[PairExample] = field(compare=False)
    dev: dict[Split, list[PairExample]] = field(compare=False)
    """The split dev, and dev_mismatched if the task has it."""
    test: dict[Split, list[PairExample]] = field(compare=False)
    """The split test, and test_mismatched if the task has it; empty without test files."""
    further: dict[str, FurtherSet] = field(default_factory=dict, compare=False)
    """Sets on which models are scored, and by which no settings are chosen, by the names of their columns."""
    digest: str
    """A digest of the examples of training, dev and further sets."""

    @property
    def task(self) -> GlueTask:
        """The properties of the task in GLUE."""
        return GLUE_TASKS[self.name]

    def parts(self) -> Iterator[object]:
        """See `benchmark.TaskExamples`."""
        yield from chain(self.train, *self.dev.values(), *self.test.values())
        for name, each in self.further.items():
            yield from (name, each.labels, *each.examples)


def glue_name(task: str) -> str:
    """Return the name in GLUE_TASKS of a task in `tasks.TASKS`, such as SST-2 for sst2."""
    return next(name for name, glue in GLUE_TASKS.items() if glue.hub == task)


def check_data_dir(data_dir: str | None, names: Sequence[str], *, key: str) -> None:
    """Check that the folder has a subfolder for each task; raise UserError otherwise."""
    if data_dir is None:
        return
    if not Path(data_dir).is_dir():
        raise UserError(f"{key} {data_dir}: no such folder; give that of GLUE's own download, or none for the hub")
    missing = [name for name in names if not (Path(data_dir) / name).is_dir()]
    if missing:
        there = [name for name in GLUE if (Path(data_dir) / name).is_dir()]
        raise UserError(
            f"{key} {data_dir}: it has no folder {missing[0]} (of GLUE's tasks it has "
            f"{', '.join(there) or 'none'}); add it, or name a task that is there"
        )


def column_of(name: str, split: Split) -> str:
    """Return the column name of a split in papers and on the GLUE server: MNLI-m, MNLI-mm, or the task's name."""
    if not GLUE_TASKS[name].has_mismatched:
        return name
    return f"{name}-mm" if split.endswith("_mismatched") else f"{name}-m"


def read_task(name: str, data_dir: str | None, limit: int | None) -> TaskFiles:
    """Read the examples of a task, with only the first `limit` examples of the training set.

    Raises:
        UserError: a file is missing or malformed.
    """
    splits = 2 if GLUE_TASKS[name].has_mismatched else 1
    train = read_split(name, "train", data_dir)[:limit]
    dev = {split: read_split(name, split, data_dir) for split in DEV[:splits]}
    has_test = data_dir is None or _has_test(Path(data_dir) / name)
    test = {split: read_split(name, split, data_dir) for split in TEST[:splits]} if has_test else {}
    return TaskFiles(name=name, train=train, dev=dev, test=test, digest=examples_digest([train, *dev.values()]))


def with_further(files: TaskFiles, further: Mapping[str, FurtherSet]) -> TaskFiles:
    """Return the files with further sets."""
    if not further:
        return files
    parts = [[name, files.digest, each.labels, examples_digest([each.examples])] for name, each in further.items()]
    return replace(files, further=dict(further), digest=hashlib.sha256(repr(parts).encode()).hexdigest()[:16])


def examples_digest(sets: Iterable[Sequence[PairExample]]) -> str:
    """Return a digest of the examples of several sets."""
    digest = hashlib.sha256()
    for example in chain.from_iterable(sets):
        digest.update(repr((example.sentence1, example.sentence2, example.target)).encode())
    return digest.hexdigest()[:16]


def task_paths(name: str, data_dir: str) -> list[Path]:
    """Return the files of a task's folder, of which `read_task` reads some."""
    return sorted(path for path in (Path(data_dir) / name).iterdir() if path.suffix in (".tsv", ".txt"))


def _has_test(folder: Path) -> bool:
    return any(folder.glob("test*.tsv")) or (folder / "msr_paraphrase_test.txt").is_file()


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
        where = f"{HUB_NAME}, {named.hub}" if data_dir is None else f"{Path(data_dir) / task}"
        raise UserError(f"{where}: {split} holds no example; take GLUE's own download, whole")
    return examples


def _example(task: GlueTask, split: Split, row: dict[str, str], number: int, place: str) -> PairExample:
    first, second = row[task.sentences[0]], row[task.sentences[1]] if len(task.sentences) > 1 else None
    if not split.startswith("test"):
        return PairExample(first, second, _target(task, row[task.label], place), number)
    text = row.get(task.index, str(number))  # the lines of MRPC's original file have no numbers
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        shown = repr(text if len(text) <= 40 else f"{text[:37]}...")
        raise UserError(f"{place}: {task.index} {shown}, expected a whole number; take GLUE's own test file")
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


_Rows = Iterator[tuple[dict[str, str], str]]
"""Each row by column, with its place in the file."""


def _file_rows(task: GlueTask, split: Split, folder: Path) -> _Rows:
    names = {"dev": "dev_matched", "test": "test_matched"} if task.has_mismatched else {}
    path = folder / f"{names.get(split, split)}.tsv"
    original = folder / f"msr_paraphrase_{'test' if split == 'test' else 'train'}.txt"
    if path.is_file() or task.hub != "mrpc" or not original.is_file():
        return _tsv_rows(task, split, path)
    return _tsv_rows(task, split, original) if split == "test" else _original_mrpc(task, split, original)


def _original_mrpc(task: GlueTask, split: Split, path: Path) -> _Rows:
    """Read MRPC from its original files; GLUE's dev split is a part of the training set, given by a list of pairs."""
    listed = path.with_name("dev_ids.tsv")
    dev = {tuple(line.split("\t")[:2]) for _, line in _lines(listed)}
    for row, place in _tsv_rows(task, split, path):
        if ((row.get("#1 ID"), row.get("#2 ID")) in dev) == (split == "dev"):
            yield row, place


def _tsv_rows(task: GlueTask, split: Split, path: Path) -> _Rows:
    is_test = split.startswith("test")
    may_tear = task.has_torn_lines and not is_test
    lines = _lines(path)
    if task.headerless and not is_test:
        columns = list(task.headerless)
    else:
        columns = next((line.split("\t") for _, line in lines), [])
    needed = [*task.sentences, *([] if is_test else [task.label])]
    missing = [name for name in needed if name not in columns]
    if missing:
        raise UserError(
            f"{path}: has no column {', '.join(missing)}, only {', '.join(columns) or 'an empty first line'}; "
            f"expected {', '.join(needed)}, as in GLUE's own download"
        )
    least = 1 + max(columns.index(name) for name in needed)
    for number, line in lines:
        cells = line.split("\t")
        if len(cells) >= least:
            yield dict(zip(columns, cells, strict=False)), f"{path}:{number}"
        elif not may_tear:
            raise UserError(
                f"{path}:{number}: {len(cells)} columns, expected at least {least}, separated by tabs; fix the line"
            )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not empty, with their numbers. There is no quoting, and only a newline ends a line."""
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                text = line.rstrip("\r\n")
                if text:
                    yield number, text
    except FileNotFoundError as error:
        raise UserError(
            f"{path}: no such file; give the folder of GLUE's own download as the data folder, or none for the hub's"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({type(error).__name__}); fix or replace it") from error


def _hub_rows(task: GlueTask, split: Split) -> _Rows:
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
