"""The examples of tasks in which an encoder writes texts, from files of rows or from data sets on the hub."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from llmdistill.config.data import TaskConfig
from llmdistill.data.questions import QuestionExample
from llmdistill.data.readers import READERS, by_lower_case, with_names
from llmdistill.data.sources import open_rows
from llmdistill.data.targets import TargetExample
from llmdistill.errors import UserError
from llmdistill.tasks import squad, task_folder
from llmdistill.tasks.stored import TaskFiles
from llmdistill.tasks.text_metrics import TextMetric

Split = Literal["train", "dev", "test"]

_NAMES: dict[Split, tuple[str, ...]] = {"train": ("train",), "dev": ("dev", "valid", "validation"), "test": ("test",)}
"""The names of a split's file, without its ending."""

_PAIRS = (
    ("source", "target"),
    ("src", "tgt"),
    ("context", "question"),
    ("document", "summary"),
    ("article", "highlights"),
    ("text", "summary"),
)
"""The keys of source and target in rows."""
_KEYS = by_lower_case((*chain.from_iterable(_PAIRS), "answer"))


@dataclass(frozen=True, kw_only=True)
class WritingTask:
    """The properties of a task in which texts are written."""

    title: str
    hub: str | None
    """The data set on the hub, with its configuration; None without one."""
    metrics: tuple[TextMetric, ...]
    """The first metric chooses settings."""
    asks_for_answers: bool = False
    """Whether a text is a question that asks for an answer in its source; then the files may be those of SQuAD 1.1."""


_SUMMARIES: tuple[TextMetric, ...] = ("rougeL", "rouge1", "rouge2")
_SQUAD = "squad1"

WRITING_TASKS: dict[str, WritingTask] = {
    "questiongeneration": WritingTask(
        title="QuestionGeneration",
        hub="rajpurkar/squad",
        metrics=("bleu4", "meteor", "rougeL"),
        asks_for_answers=True,
    ),
    "summarization": WritingTask(title="Summarization", hub=None, metrics=_SUMMARIES),
    "xsum": WritingTask(title="XSum", hub="EdinburghNLP/xsum", metrics=_SUMMARIES),
    "cnndailymail": WritingTask(title="CNN-DailyMail", hub="abisee/cnn_dailymail:3.0.0", metrics=_SUMMARIES),
}
"""The tasks by their keys in `tasks.TASKS`."""


@dataclass(frozen=True, kw_only=True)
class TextSet:
    """The examples that models are scored on: those with one source are one example, with several references."""

    examples: list[TargetExample]
    references: list[list[str]]
    """The targets of each source."""

    @classmethod
    def of(cls, examples: Iterable[TargetExample]) -> TextSet:
        """Group examples by their source."""
        groups: dict[tuple[str, str | None], list[TargetExample]] = {}
        for example in examples:
            groups.setdefault((example.source, example.hint), []).append(example)
        return cls(
            examples=[several[0] for several in groups.values()],
            references=[[example.target for example in several] for several in groups.values()],
        )

    def to_json(self) -> dict[str, Any]:
        return {"examples": [astuple(example) for example in self.examples], "references": self.references}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TextSet:
        return cls(examples=[TargetExample(*values) for values in value["examples"]], references=value["references"])


def read_files(key: str, settings: TaskConfig, *, only_scores: bool = False) -> TaskFiles[TargetExample, TextSet]:
    """Read the examples of a task, or only the sets that score; `settings.limit` counts training examples.

    The sets are dev, by which settings are chosen, and test if there is one.

    Raises:
        UserError: a file is missing or malformed, or a split holds no example.
    """
    train: list[TargetExample]
    if _is_squad(settings.dir, key):
        files = squad.read_questions(_SQUAD, settings, only_scores=only_scores)
        train, skipped = [_example_of(question) for question in files.train], files.skipped
        sets = {"dev": TextSet.of(_example_of(question) for question in files.sets["dev"].questions)}
    else:
        has_test = settings.dir is None or _find_file(settings.dir, key, "test") is not None
        splits: list[Split] = ["dev", "test"] if has_test else ["dev"]
        sets = {split: TextSet.of(row.example for row in _read_rows(key, settings.dir, split)) for split in splits}
        rows = [] if only_scores else _read_rows(key, settings.dir, "train")[: settings.limit]
        train, skipped = [row.example for row in rows if row.fits], [row.place for row in rows if not row.fits]
    if not (train or only_scores):
        raise UserError(f"{_reference(key, settings.dir, 'train')}: no answer is in its context; fix the file")
    return TaskFiles(train, sets, skipped)


def task_paths(folder: str, key: str, *, setting: str) -> list[Path]:
    """Return the files of a task in a folder; raise UserError if there is none of the train or dev split."""
    if _is_squad(folder, key):
        return squad.task_paths(folder, _SQUAD)
    paths = {split: _find_file(folder, key, split) for split in _NAMES}
    missing = next((split for split in paths if split != "test" and paths[split] is None), None)
    if missing is not None:
        names = " or ".join(f"{name}.jsonl" for name in _NAMES[missing])
        raise UserError(f"{setting} {folder}: has no {names} (or .json, .parquet, .csv); put the {missing} split there")
    return [path for path in paths.values() if path is not None]


def _is_squad(folder: str | None, key: str) -> bool:
    """Whether the examples are those of SQuAD 1.1: on the hub, or in a folder with JSON in the official format."""
    if not WRITING_TASKS[key].asks_for_answers:
        return False
    rows = [] if folder is None else [path for path in _list_files(folder, key, "train") if path.suffix != ".json"]
    return not any(path.is_file() for path in rows)


def _example_of(question: QuestionExample) -> TargetExample:
    return TargetExample(question.context, question.answers[0].text, question.question)


class _Row(NamedTuple):
    """One row of a file."""

    example: TargetExample
    place: str
    fits: bool
    """Whether its answer, if it needs one, is in the source."""


def _read_rows(key: str, folder: str | None, split: Split) -> list[_Row]:
    reference, task, rows = _reference(key, folder, split), WRITING_TASKS[key], list[_Row]()
    for given, place in open_rows(reference):
        row = with_names(given, _KEYS, place)
        keys = next((pair for pair in _PAIRS if row.keys() >= set(pair)), None)
        if keys is None:
            pairs = ", ".join(" and ".join(pair) for pair in _PAIRS)
            raise UserError(f"{place}: has {', '.join(row) or 'nothing'}, expected one of these pairs as text: {pairs}")
        for name in keys:
            if not isinstance(row[name], str) or not row[name].strip():
                raise UserError(f"{place}: {name} is {row[name]!r}, expected a text that is not empty; fix the row")
        source, target = row[keys[0]], row[keys[1]]
        answer = row.get("answer") if task.asks_for_answers else None
        if answer is not None and not isinstance(answer, str):
            raise UserError(f"{place}: answer is {answer!r}, expected a text; fix the row")
        # Sources may hold the answer already, after a separator, as in UniLM's files.
        fits = answer in source if answer else not (task.asks_for_answers and keys[0] == "context")
        rows.append(_Row(TargetExample(source, answer or None, target), place, fits))
    if not rows:
        raise UserError(f"{reference}: holds no example; give at least one row of source and target")
    return rows


def _reference(key: str, folder: str | None, split: Split) -> str:
    if folder is None:
        return f"{WRITING_TASKS[key].hub}:{'validation' if split == 'dev' else split}"
    return str(_find_file(folder, key, split))


def _find_file(folder: str, key: str, split: Split) -> Path | None:
    return next((path for path in _list_files(folder, key, split) if path.is_file()), None)


def _list_files(folder: str, key: str, split: Split) -> list[Path]:
    inside = Path(task_folder(folder, key))
    return [inside / f"{name}{ending}" for name in _NAMES[split] for ending in READERS]
