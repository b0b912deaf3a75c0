"""The questions of SQuAD 1.1 and 2.0 and of MLQA, from files in the official format or from the Hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmdistill.config.data import TaskConfig
from llmdistill.data.questions import Answer, QuestionExample
from llmdistill.data.readers import READERS, Rows
from llmdistill.data.sources import benchmark_rows
from llmdistill.errors import UserError
from llmdistill.tasks import task_folder
from llmdistill.tasks.squad_metrics import LANGUAGES
from llmdistill.tasks.stored import TaskFiles


@dataclass(frozen=True, kw_only=True)
class SquadTask:
    """The properties of a task of question answering."""

    title: str
    hub: str
    """The data set on the Hub."""
    has_unanswerable: bool = False
    """Whether some questions have no answer in their context."""
    is_multilingual: bool = False
    """Whether the training set is English, and the test sets are in LANGUAGES."""


SQUAD_TASKS: dict[str, SquadTask] = {
    "squad1": SquadTask(title="SQuAD1", hub="rajpurkar/squad"),
    "squad2": SquadTask(title="SQuAD2", hub="rajpurkar/squad_v2", has_unanswerable=True),
    "mlqa": SquadTask(title="MLQA", hub="facebook/mlqa", is_multilingual=True),
}
"""The tasks of question answering, by their keys in `tasks.TASKS`."""


@dataclass(frozen=True)
class Pair:
    """The languages of a set of MLQA."""

    context: str
    """The language of the context and so of the answer."""
    question: str

    @property
    def column(self) -> str:
        """The column of the pair in tables: MLQA-de, or MLQA-de-en for English questions on German contexts."""
        return f"MLQA-{self.context}" if self.context == self.question else f"MLQA-{self.context}-{self.question}"

    def file(self, split: str) -> str:
        """The name of a file in MLQA's own download."""
        return f"{split}-context-{self.context}-question-{self.question}.json"


ENGLISH = Pair("en", "en")


@dataclass(frozen=True, kw_only=True)
class QuestionSet:
    """A set of questions that models are scored on."""

    column: str
    """The column of its scores in tables."""
    language: str | None
    """The language of the answers for MLQA's normalization; None for that of SQuAD."""
    is_averaged: bool = False
    """Whether the column counts in MLQA's average over languages, in which question and context have one language."""
    questions: list[QuestionExample]


def to_json(questions: Sequence[QuestionExample]) -> dict[str, Any]:
    """Return questions as plain JSON values, each context once."""
    contexts = {context: number for number, context in enumerate(dict.fromkeys(each.context for each in questions))}
    rows = [
        [each.id, each.question, contexts[each.context], [[answer.text, answer.start] for answer in each.answers]]
        for each in questions
    ]
    return {"contexts": list(contexts), "questions": rows}


def from_json(value: Mapping[str, Any]) -> list[QuestionExample]:
    contexts = value["contexts"]
    return [
        QuestionExample(key, question, contexts[context], tuple(Answer(*answer) for answer in answers))
        for key, question, context, answers in value["questions"]
    ]


def read_files(key: str, settings: TaskConfig, *, only_scores: bool = False) -> TaskFiles[QuestionExample, QuestionSet]:
    """Read the questions of a task, or only the sets that score; `settings.limit` counts training questions.

    The sets are dev, by which settings are chosen, and the test sets of MLQA by pair of languages.

    Raises:
        UserError: a file is missing or malformed, holds no question, or a language has no data.
    """
    task = SQUAD_TASKS[key]
    sets = {}
    if not task.is_multilingual:
        if settings.languages is not None:
            raise UserError(f"data.task.languages is {settings.languages}, but {task.title} is English: leave it out")
        rows, place = _split_rows(key, settings.dir, "dev", None)
        sets["dev"] = QuestionSet(column=task.title, language=None, questions=_checked(rows, place, key))
    else:
        splits = [("dev", "dev", ENGLISH), *((each.column, "test", each) for each in _pairs(settings))]
        for name, split, pair in splits:
            rows, place = _split_rows(key, settings.dir, split, pair)
            sets[name] = QuestionSet(
                column=f"{pair.column} dev" if name == "dev" else name,
                language=pair.context,
                is_averaged=name != "dev" and pair.context == pair.question,
                questions=_checked(rows, place, key),
            )
    if only_scores:
        return TaskFiles([], sets)
    source = "squad1" if SQUAD_TASKS[key].is_multilingual else key
    place = SQUAD_TASKS[source].hub + ", train" if settings.dir is None else str(_train_file(settings.dir, key))
    rows = _hub_rows(source, "train", None) if settings.dir is None else _file_rows(Path(place))
    found = _checked(rows, place, key)[: settings.limit]
    train = [question for question in found if question.is_located]
    if not train:
        raise UserError(f"{place}: no training question has its answer in its context; take the official file")
    return TaskFiles(train, sets, [question.id for question in found if not question.is_located])


def task_paths(folder: str, key: str) -> list[Path]:
    """Return the files of a task, without MLQA's test sets; raise UserError if one is missing."""
    return [_train_file(folder, key), _dev_file(folder, key)]


def test_files(key: str, settings: TaskConfig) -> list[Path]:
    """Return the files of MLQA's test sets; raise UserError if a language has no data."""
    pairs = _pairs(settings) if SQUAD_TASKS[key].is_multilingual else []
    return [_mlqa_folder(str(settings.dir), "test") / each.file("test") for each in pairs]


def _pairs(settings: TaskConfig) -> list[Pair]:
    """Return the pairs of languages that are scored, those of one language first.

    Raises:
        UserError: a language has no data.
    """
    folder = None if settings.dir is None else _mlqa_folder(settings.dir, "test")
    there = [each for each in LANGUAGES if folder is None or (folder / Pair(each, each).file("test")).is_file()]
    languages = there if settings.languages is None else settings.languages
    missing = [each for each in languages if each not in there]
    if missing or not languages:
        where = "MLQA" if folder is None else str(folder)
        lacking = missing[0] if missing else LANGUAGES[0]
        raise UserError(
            f"data.task.languages: {where} has no data for {lacking} ({Pair(lacking, lacking).file('test')}), only for "
            f"{', '.join(there) or 'none'}; add the file, or name languages that are there"
        )
    crossed = [Pair(one, other) for one in languages for other in languages if one != other]
    return [*(Pair(each, each) for each in languages), *(crossed if settings.crossed else [])]


def _split_rows(key: str, folder: str | None, split: str, pair: Pair | None) -> tuple[Rows, str]:
    if folder is None:
        name = "" if pair is None else f" {pair.column}"
        return _hub_rows(key, split, pair), f"{SQUAD_TASKS[key].hub}{name}, {split}"
    path = _dev_file(folder, key) if pair is None else _mlqa_folder(folder, split) / pair.file(split)
    return _file_rows(path), str(path)


def _checked(rows: Rows, place: str, key: str) -> list[QuestionExample]:
    questions = [_question(row, where) for row, where in rows]
    if not questions:
        raise UserError(f"{place}: holds no question; take the official file, whole")
    ids: set[str] = set()
    for question in questions:
        if question.id in ids:
            raise UserError(f"{place}: two questions have the id {question.id}; give each its own")
        ids.add(question.id)
        if not question.answers and not SQUAD_TASKS[key].has_unanswerable:
            raise UserError(
                f"{place}: question {question.id} has no answer, but every question of {SQUAD_TASKS[key].title} has "
                "one; for SQuAD 2.0 name the task squad2"
            )
    return questions


def _question(row: Mapping[str, Any], place: str) -> QuestionExample:
    answers = row.get("answers")
    texts, starts = (answers.get("text"), answers.get("answer_start")) if isinstance(answers, Mapping) else (None, None)
    fields = [row.get("id"), row.get("question"), row.get("context")]
    is_right = (
        all(isinstance(each, str) and each.strip() for each in fields)
        and isinstance(texts, list)
        and isinstance(starts, list)
        and len(texts) == len(starts)
        and all(isinstance(each, str) for each in texts)
        and all(isinstance(each, int) and 0 <= each < 2**31 for each in starts)
    )
    if not is_right:
        raise UserError(
            f"{place}: expected id, question and context as text, and answers with text and answer_start, as in the "
            f"official files; it has {', '.join(row) or 'nothing'}"
        )
    found = tuple(Answer(text, start) for text, start in zip(texts or [], starts or [], strict=True))
    return QuestionExample(str(fields[0]), str(fields[1]), str(fields[2]), found)


def _file_rows(path: Path) -> Rows:
    """Yield the questions of a file in the official format.

    Raises:
        UserError: the file does not exist, or has another format.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; take the official download, whole, or none for the hub's")
    for article, place in READERS[".json"](path):
        try:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    listed = question["answers"]
                    answers = {key: [each[key] for each in listed] for key in ("text", "answer_start")}
                    row = {**question, "context": paragraph["context"], "answers": answers}
                    yield row, f"{place}, question {question.get('id')}"
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{place}: not in the official format ({type(error).__name__}: {error}); take a file that is"
            ) from error


def _train_file(folder: str, key: str) -> Path:
    """Return the training file; MLQA's is that of SQuAD 1.1, in its own folder or in MLQA's."""
    if not SQUAD_TASKS[key].is_multilingual:
        return _only_file(task_folder(folder, key), "train*.json")
    inside = [task_folder(folder, "squad1"), task_folder(folder, key), folder]
    return _only_file(next((each for each in inside if any(Path(each).glob("train*.json"))), folder), "train*.json")


def _dev_file(folder: str, key: str) -> Path:
    if SQUAD_TASKS[key].is_multilingual:
        path = _mlqa_folder(folder, "dev") / ENGLISH.file("dev")
        if not path.is_file():
            raise UserError(f"{path}: no such file, by which settings are chosen; take MLQA's own download, whole")
        return path
    return _only_file(task_folder(folder, key), "dev*.json")


def _mlqa_folder(folder: str, split: str) -> Path:
    """Return the folder of a split: MLQA's own download has the folders dev and test."""
    own = Path(task_folder(folder, "mlqa"))
    return own / split if (own / split).is_dir() else own


def _only_file(folder: str, pattern: str) -> Path:
    found = sorted(Path(folder).glob(pattern))
    if len(found) != 1:
        there = ", ".join(path.name for path in found) or "no such file"
        raise UserError(
            f"{folder}: expected one file {pattern} of the official download, found {there}; leave one there"
        )
    return found[0]


def _hub_rows(key: str, split: str, pair: Pair | None) -> Rows:
    config = None if pair is None else f"mlqa.{pair.context}.{pair.question}"
    name = split.replace("dev", "validation")
    return benchmark_rows(SQUAD_TASKS[key].hub, config, name, files="the folder of the official download")
