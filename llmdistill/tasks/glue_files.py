"""GLUE (Wang et al. 2019): its tasks, and their examples from its own files or from the hub."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmdistill.data.pairs import PairExample
from llmdistill.errors import UserError

Metric = Literal["accuracy", "f1", "matthews", "pearson", "spearman"]

Split = Literal["train", "dev", "dev_mismatched", "test", "test_mismatched"]
"""The mismatched ones are MNLI's alone, whose dev and test are the matched ones."""

HUB_NAME = "nyu-mll/glue"


@dataclass(frozen=True, kw_only=True)
class GlueTask:
    """One task as its files have it; its name is that of its folder in GLUE's download."""

    hub: str
    """Its configuration in the data set on the hub."""
    sentences: tuple[str, ...]
    """Columns of the one sentence, or of the two."""
    hub_sentences: tuple[str, ...] | None = None
    """Their names on the hub, where they differ."""
    label: str = "label"
    """Column of the label; on the hub it is always `label`."""
    headerless: tuple[str, ...] = ()
    """Columns of the training and dev files, where these do not name them in a first line."""
    index: str = "index"
    """Column of the example's number in the test files."""
    classes: tuple[str, ...] = ("0", "1")
    """Labels in the files, in the order of the hub's numbers; none where the label is a score."""
    metrics: tuple[Metric, ...] = ("accuracy",)
    """Those that GLUE reports; the first one chooses settings on dev."""
    has_mismatched: bool = False
    """Whether dev and test come from the training set's genres and, apart, from others."""
    has_torn_lines: bool = False
    """Whether the published training file has lines broken in two, which are then left out, as is usual."""


TASKS: dict[str, GlueTask] = {
    "CoLA": GlueTask(
        hub="cola", sentences=("sentence",), headerless=("source", "label", "star", "sentence"), metrics=("matthews",)
    ),
    "SST-2": GlueTask(hub="sst2", sentences=("sentence",)),
    "MRPC": GlueTask(
        hub="mrpc",
        sentences=("#1 String", "#2 String"),
        hub_sentences=("sentence1", "sentence2"),
        label="Quality",
        metrics=("f1", "accuracy"),
    ),
    "QQP": GlueTask(
        hub="qqp",
        sentences=("question1", "question2"),
        label="is_duplicate",
        index="id",
        metrics=("accuracy", "f1"),
        has_torn_lines=True,
    ),
    "STS-B": GlueTask(
        hub="stsb",
        sentences=("sentence1", "sentence2"),
        label="score",
        classes=(),
        metrics=("pearson", "spearman"),
    ),
    "MNLI": GlueTask(
        hub="mnli",
        sentences=("sentence1", "sentence2"),
        hub_sentences=("premise", "hypothesis"),
        label="gold_label",
        classes=("entailment", "neutral", "contradiction"),
        has_mismatched=True,
    ),
    "QNLI": GlueTask(hub="qnli", sentences=("question", "sentence"), classes=("entailment", "not_entailment")),
    "RTE": GlueTask(hub="rte", sentences=("sentence1", "sentence2"), classes=("entailment", "not_entailment")),
    "WNLI": GlueTask(hub="wnli", sentences=("sentence1", "sentence2")),
}
"""GLUE's tasks by name."""

BEST_SCORE = 5.0
"""STS-B's scores go from 0 to this."""


def task_named(name: str) -> GlueTask:
    """A task by its name. UserError where there is none of that name."""
    if name not in TASKS:
        raise UserError(f"GLUE has no task {name!r}; there are {', '.join(TASKS)}")
    return TASKS[name]


def column_of(name: str, split: Split) -> str:
    """What papers' tables and the GLUE server call a split of a task: MNLI-m, MNLI-mm, or the task's name.

    Raises:
        UserError: no such task, or no such split of it.
    """
    is_other = split.endswith("_mismatched")
    if not task_named(name).has_mismatched:
        if is_other:
            raise UserError(f"{name} has no split {split}; there are train, dev and test")
        return name
    return f"{name}-mm" if is_other else f"{name}-m"


def read_split(task: str, split: Split, data_dir: str | Path | None) -> list[PairExample]:
    """The examples of a split, in order.

    Args:
        task: a name in TASKS.
        split: dev and test are the matched ones for MNLI.
        data_dir: the folder of GLUE's download, with a folder a task and in it train.tsv and so on (of MRPC also the
            original msr_paraphrase_train.txt and _test.txt, with dev_ids.tsv); without it the hub is asked.

    Raises:
        UserError: no such task, split or file, no examples, a missing column, or a malformed line, which is named.
    """
    named = task_named(task)
    column_of(task, split)  # refuses splits that the task does not have
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
    text = row.get(task.index, str(number))  # MRPC's original file does not number its lines
    if not text.isdecimal():
        raise UserError(f"{place}: {task.index} {text!r}, expected a whole number; take GLUE's own test file")
    return PairExample(first, second, None, int(text))


def _target(task: GlueTask, text: str, place: str) -> int | float:
    if task.classes:
        if text not in task.classes:
            raise UserError(f"{place}: label {text!r}, expected one of {', '.join(task.classes)}; mend the line")
        return task.classes.index(text)
    try:
        score = float(text)
    except ValueError:
        score = -1.0
    if not 0 <= score <= BEST_SCORE:
        raise UserError(f"{place}: label {text!r}, expected a score from 0 to {BEST_SCORE:g}; mend the line")
    return score


_Rows = Iterator[tuple[dict[str, str], str]]
"""Each row by column, with where it stands."""


def _file_rows(task: GlueTask, split: Split, folder: Path) -> _Rows:
    names = {"dev": "dev_matched", "test": "test_matched"} if task.has_mismatched else {}
    path = folder / f"{names.get(split, split)}.tsv"
    original = folder / f"msr_paraphrase_{'test' if split == 'test' else 'train'}.txt"
    if path.is_file() or task.hub != "mrpc" or not original.is_file():
        return _tsv_rows(task, split, path)
    return _tsv_rows(task, split, original) if split == "test" else _original_mrpc(task, split, original)


def _original_mrpc(task: GlueTask, split: Split, path: Path) -> _Rows:
    """GLUE's dev split of MRPC is a part of the original training set, given by a list of pairs."""
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
                f"{path}:{number}: {len(cells)} columns, expected at least {least}, separated by tabs; mend the line"
            )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not empty, with their numbers. Nothing is quoted there, and only a newline ends a line."""
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
        raise UserError(f"{path}: cannot be read as UTF-8 text ({type(error).__name__}); mend or replace it") from error


def _hub_rows(task: GlueTask, split: Split) -> _Rows:
    """The hub's rows under the names and labels of the files."""
    import datasets

    name = split.replace("dev", "validation")
    if task.has_mismatched and name in ("validation", "test"):
        name += "_matched"
    try:
        rows: Any = list(datasets.load_dataset(HUB_NAME, task.hub, split=name))
    except Exception as error:  # the datasets library raises what its readers and the network raise
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise UserError(
            f"{HUB_NAME}, {task.hub}, {name}: not loaded from the hub ({reason}); "
            "check the network, or give the folder of GLUE's own download as the data folder"
        ) from error
    sentences = dict(zip(task.hub_sentences or task.sentences, task.sentences, strict=True))
    for number, row in enumerate(rows, start=1):
        place = f"{HUB_NAME}, {task.hub}, {name}: row {number}"
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
