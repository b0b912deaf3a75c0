"""SQuAD 1.1, SQuAD 2.0 and MLQA: a model with a head for spans is fine-tuned, and its answers are scored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES

from llmdistill.batch import Batch
from llmdistill.config.data import TaskConfig
from llmdistill.data.chat_messages import from_json as read_cell
from llmdistill.data.collate import pad_rows
from llmdistill.data.questions import (
    NO_ANSWER,
    WINDOWS,
    Answer,
    EncodedWindow,
    QuestionExample,
    WindowLimits,
    encode_in_pieces,
)
from llmdistill.data.readers import READERS, Rows
from llmdistill.data.references import is_saved_set
from llmdistill.data.sources import benchmark_rows, open_rows
from llmdistill.data.store import SplitWriter
from llmdistill.errors import UserError
from llmdistill.files import write_json
from llmdistill.models.families import is_causal
from llmdistill.models.heads import SPANS
from llmdistill.objective import Objective
from llmdistill.runtime.distributed import World
from llmdistill.tasks import task_folder
from llmdistill.tasks.base import ScoredModel
from llmdistill.tasks.benchmark import Benchmark, BenchmarkData, describe_skipped_questions
from llmdistill.tasks.item_outputs import Forward, compute_values, scoring_forward
from llmdistill.tasks.squad_metrics import LANGUAGES, squad1_scores, squad2_scores
from llmdistill.tasks.stored import TaskFiles

_NO_SPAN = 1e4
"""The null odds of a question of whose context the tokenizer made no token."""


@dataclass(frozen=True)
class Spans:
    """The answers to the questions of a set, each by the id of its question, in order."""

    texts: dict[str, str]
    """The text of the best span, also where no answer is more probable."""
    null_odds: dict[str, float]
    """The score of no answer minus that of the best span; the score of a span is the sum of the logits of its ends."""


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
class LanguagePair:
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


ENGLISH = LanguagePair("en", "en")


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


@dataclass(frozen=True, kw_only=True, eq=False)
class SquadData(BenchmarkData):
    """The questions of a task in windows, and the scores of the answers of models."""

    task: Squad

    def describe_training(self) -> str:
        return f"{self.meta['questions']:,} questions in {len(self.train):,} windows"

    @property
    def facts(self) -> Mapping[str, Mapping[str, Any]]:
        """The fields of QuestionSet of each set that models are scored on, with the numbers of its questions as `size`
        and of those without an answer as `unanswerable`."""
        return self.meta["sets"]

    @property
    def main_column(self) -> str:
        """See Benchmark: for MLQA the mean over the languages."""
        return self.task.entry.title

    def column(self, name: str) -> str:
        return str(self.facts[name]["column"])

    @property
    def chance(self) -> float:
        """See Benchmark: the share of questions without an answer, which never answering gets right."""
        dev = self.facts["dev"]
        return 100 * float(dev["unanswerable"] / dev["size"])

    @property
    def sizes(self) -> dict[str, int]:
        """See Benchmark: questions."""
        return {
            "train": int(self.meta["questions"]),
            **{name: int(of_set["size"]) for name, of_set in self.facts.items()},
        }

    @property
    def sets(self) -> dict[str, dict[str, Any]]:
        """See Task: dev, and for MLQA the test set of each language or pair of languages."""
        asked = {"examples": self.digest, "max_answer_length": self.task.config.data.task.max_answer_length}
        return dict.fromkeys(self.facts, asked)

    def score_set(self, name: str, scored: ScoredModel) -> dict[str, Any]:
        """See Task: the metrics, and the predictions in the formats of the official scripts.

        predictions.json has the answers by the id of the question. For SQuAD 2.0 an answer is "" where the null odds
        are above 0; null_odds.json has the null odds, and spans.json the answers as if every question had one.
        """
        questions = from_json(self.text(name))
        with scoring_forward(scored.model) as forward:
            spans = predict_spans(
                forward,
                self.encoded[name],
                self.collate,
                questions,
                max_answer_length=self.task.config.data.task.max_answer_length,
                batch_size=self.batch_size,
            )
        if World.current().is_main:
            folder, answers = scored.predictions / name, spans.texts
            if self.task.entry.has_unanswerable:
                answers = {key: "" if spans.null_odds[key] > 0 else text for key, text in answers.items()}
                write_json(folder / "null_odds.json", spans.null_odds)
                write_json(folder / "spans.json", spans.texts)
            write_json(folder / "predictions.json", answers)
        references = {question.id: [answer.text for answer in question.answers] for question in questions}
        scores: dict[str, Any]
        if self.task.entry.has_unanswerable:
            scores = squad2_scores(spans.texts, spans.null_odds, references)
        else:
            scores = squad1_scores(spans.texts, references, language=self.facts[name]["language"])
        return {"metrics": scores, "examples": len(questions)}

    def summary(self, scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """See Task.

        Returns:
            That of Benchmark. For SQuAD 2.0 also ``"threshold"``, the null odds above which an answer is left out
            for the best F1, and ``"official"``, all scores of the official script. MLQA's columns are its dev set, each
            test set, and ``MLQA``, the mean over the languages.
        """
        summary = super().summary(scores)
        columns = summary["dev"]
        if self.task.entry.is_multilingual:
            same = [columns[of_set["column"]] for of_set in self.facts.values() if of_set["is_averaged"]]
            columns[self.main_column] = {
                metric: fmean(scores_of_set[metric] for scores_of_set in same) for metric in self.task.metrics
            }
        if self.task.entry.has_unanswerable:
            official = dict(scores["dev"]["metrics"])
            summary |= {"threshold": official["best_f1_threshold"], "official": official}
        return summary

    def metrics_of(self, score: Mapping[str, Any]) -> dict[str, float]:
        return {name: score["metrics"][name] for name in self.task.metrics}

    def sentence(self, model: str, summary: Mapping[str, Any]) -> str:
        threshold = f"  threshold {summary['threshold']:.3f}" if "threshold" in summary else ""
        return super().sentence(model, summary) + threshold

    def warnings(self, teacher: Mapping[str, Any] | None) -> list[str]:
        """See Task: skipped questions, and a teacher that is not better than never answering."""
        warnings = describe_skipped_questions(
            self.meta["skipped"], "their answer is not in the context where answer_start says"
        )
        if teacher is not None and teacher["score"] <= teacher["chance"]:
            warnings.append(
                f"the teacher {self.task.config.teacher.model} is not better than never answering on "
                f"{self.task.entry.title}: {self.task.metrics[0]} {teacher['score']:.1f} on dev, where that gets "
                f"{teacher['chance']:.1f}. Nothing can be learned from it: fine-tune it first"
            )
        return warnings

    def legend(self) -> str:
        text = f"{self.task.entry.title}: F1 and exact match as in the official script, x 100; "
        text += f"{self.sizes['train']:,} questions."
        if self.task.entry.has_unanswerable:
            text += " best_f1 and best_em are those at the best threshold of the null odds, f1 and em at 0."
        return text


class Squad(Benchmark):
    """One task of question answering, whose answers are spans of the context."""

    data_class = SquadData
    head = "span"
    usual_length = 384
    schema = WINDOWS
    has_classes = False
    num_outputs = 2
    """The outputs of the head at each token: its chances to be the start, and to be the end."""

    @classmethod
    def title(cls, key: str) -> str:
        return SQUAD_TASKS[key].title

    @classmethod
    def files_in(cls, folder: str, key: str, *, setting: str) -> list[Path]:
        """See Benchmark, without the test sets of MLQA."""
        return task_paths(folder, key)

    @classmethod
    def fine_tuned(cls, config: PreTrainedConfig, key: str) -> PreTrainedConfig:
        config = type(config).from_dict(config.to_dict())
        config.num_labels = 2  # start and end
        config.architectures = [MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES[config.model_type]]
        return config

    @property
    def hub(self) -> str:
        return self.entry.hub

    def check_model(self, key: str, reference: str, config: PreTrainedConfig) -> None:
        if is_causal(config):
            raise UserError(
                f"{key} {reference}: {self.entry.title} needs an encoder, because the tokens of a "
                f"{config.model_type} do not see those after them; give a model such as BERT or RoBERTa"
            )
        super().check_model(key, reference, config)

    def objective(self, teacher: PreTrainedConfig, *, uses_output: bool) -> Objective:
        return Objective(tokens=False, targets=SPANS)

    def configure(self, model: PreTrainedModel) -> None:
        """See Task: the outputs are no classes, whatever the model was fine-tuned on before."""
        model.config.problem_type = None

    def read_files(self) -> TaskFiles[QuestionExample, QuestionSet]:
        return read_questions(self.key, self.config.data.task, only_scores=self.only_scores)

    def paths(self) -> list[Path] | None:
        paths = super().paths()
        return None if paths is None else [*paths, *test_files(self.key, self.config.data.task)]

    def token_settings(self) -> dict[str, Any]:
        task = self.config.data.task
        asked = {"limit": task.limit, "languages": task.languages, "crossed": task.crossed}
        return {**asked, **asdict(self.limits)}

    def write(
        self, files: TaskFiles[QuestionExample, QuestionSet], tokenizer: PreTrainedTokenizerBase, writer: SplitWriter
    ) -> dict[str, Any]:
        """See StoredTask. The questions of the scored sets are kept too."""
        if files.train:
            writer.add("train", encode_in_pieces(files.train, tokenizer, self.limits, learned=True), WINDOWS)
        sets = {}
        for name, of_set in files.sets.items():
            writer.add(name, encode_in_pieces(of_set.questions, tokenizer, self.limits, learned=False), WINDOWS)
            writer.add_text(name, to_json(of_set.questions))
            sets[name] = {
                **{key: getattr(of_set, key) for key in ("column", "language", "is_averaged")},
                "size": len(of_set.questions),
                "unanswerable": sum(not question.answers for question in of_set.questions),
            }
        return {"questions": len(files.train), "skipped": files.skipped, "sets": sets}

    @property
    def limits(self) -> WindowLimits:
        settings = self.config.data.task
        return WindowLimits(self.config.data.max_length, settings.stride, settings.max_question_length)

    @property
    def entry(self) -> SquadTask:
        return SQUAD_TASKS[self.key]

    @property
    def metrics(self) -> tuple[str, ...]:
        """See Benchmark: the scores at the best threshold, if some questions have no answer, come first."""
        return ("best_f1", "best_em", "f1", "em") if self.entry.has_unanswerable else ("f1", "em")

    @property
    def shown(self) -> tuple[str, ...]:
        return self.metrics[:2]


def predict_spans(
    forward: Forward,
    windows: Sequence[EncodedWindow],
    collate: Callable[[Sequence[EncodedWindow]], Batch],
    questions: Sequence[QuestionExample],
    *,
    max_answer_length: int,
    batch_size: int,
) -> Spans:
    """Answer each question by the best span of up to max_answer_length tokens in any of its windows (Devlin et al.).

    Every rank must call this function. A question is unanswered as a whole only as far as each window says so: its
    score of no answer is the lowest of its windows.
    """

    def read_values(logits_B2T: Tensor, indices: Sequence[int]) -> Iterable[tuple[float, float, int, int]]:
        return best_spans(logits_B2T, [windows[index] for index in indices], max_answer_length)

    spans = compute_values(forward, windows, collate, read_values, batch_size=batch_size)
    best: dict[int, tuple[float, str]] = {}
    null: dict[int, float] = {}
    for window, (no_answer, score, first, last) in zip(windows, spans, strict=True):
        question = window.question
        null[question] = min(no_answer, null.get(question, float("inf")))
        if score > best.get(question, (float("-inf"), ""))[0]:
            assert window.characters is not None
            start, end = int(window.characters[first, 0]), int(window.characters[last, 1])
            best[question] = score, questions[question].context[start:end].strip()
    texts, odds = {}, {}
    for question, example in enumerate(questions):
        score, texts[example.id] = best.get(question, (null[question] - _NO_SPAN, ""))
        odds[example.id] = null[question] - score
    return Spans(texts, odds)


def best_spans(
    logits_B2T: Tensor, windows: Sequence[EncodedWindow], max_answer_length: int
) -> Iterable[tuple[float, float, int, int]]:
    """Return for each window the score of no answer, the best score of a span, and its first and last token.

    Only tokens of the context can be the ends of a span. The score is -inf if the window has no such token.
    """
    starts_BT, ends_BT = logits_B2T.float().cpu().unbind(1)
    no_answer_B = starts_BT[:, NO_ANSWER] + ends_BT[:, NO_ANSWER]
    assert all(window.characters is not None for window in windows), "the windows are encoded for training"
    # -1 stands at tokens that are not of the context.
    rows = [torch.from_numpy(window.characters[:, 0] >= 0) for window in windows]  # type: ignore[index]
    outside_BT = pad_rows(rows, 0) == 0  # padding too
    starts_BT = starts_BT.masked_fill(outside_BT, float("-inf"))
    ends_BT = ends_BT.masked_fill(outside_BT, float("-inf"))
    length = min(max_answer_length, ends_BT.shape[1])
    # No span ends beyond its window.
    beyond = ends_BT.new_full((len(ends_BT), length - 1), float("-inf"))
    ends_BTL = torch.cat([ends_BT, beyond], dim=1).unfold(1, length, 1)  # [b, t, l]: the end l tokens after t
    best_BT, more_BT = ends_BTL.max(-1)  # the best end of a span from each start, and how far it is
    score_B, first_B = (starts_BT + best_BT).max(-1)
    last_B = first_B + more_BT.gather(1, first_B[:, None])[:, 0]
    return zip(no_answer_B.tolist(), score_B.tolist(), first_B.tolist(), last_B.tolist(), strict=True)


def to_json(questions: Sequence[QuestionExample]) -> dict[str, Any]:
    """Return questions as plain JSON values, each context once."""
    contexts = {
        context: number for number, context in enumerate(dict.fromkeys(question.context for question in questions))
    }
    rows = [
        [asked.id, asked.question, contexts[asked.context], [[answer.text, answer.start] for answer in asked.answers]]
        for asked in questions
    ]
    return {"contexts": list(contexts), "questions": rows}


def from_json(value: Mapping[str, Any]) -> list[QuestionExample]:
    contexts = value["contexts"]
    return [
        QuestionExample(key, question, contexts[context], tuple(Answer(*answer) for answer in answers))
        for key, question, context, answers in value["questions"]
    ]


def read_questions(
    key: str, settings: TaskConfig, *, only_scores: bool = False
) -> TaskFiles[QuestionExample, QuestionSet]:
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
        splits = [("dev", "dev", ENGLISH), *((pair.column, "test", pair) for pair in _pairs(settings))]
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
    questions = _checked(rows, place, key)[: settings.limit]
    train = [question for question in questions if question.is_located]
    if not train:
        raise UserError(f"{place}: no training question has its answer in its context; take the official file")
    return TaskFiles(train, sets, [question.id for question in questions if not question.is_located])


def task_paths(folder: str, key: str) -> list[Path]:
    """Return the files of a task, without MLQA's test sets; raise UserError if one is missing."""
    return [_train_file(folder, key), _dev_file(folder, key)]


def test_files(key: str, settings: TaskConfig) -> list[Path]:
    """Return the files of MLQA's test sets; raise UserError if a language has no data."""
    pairs = _pairs(settings) if SQUAD_TASKS[key].is_multilingual else []
    return [_mlqa_folder(str(settings.dir), "test") / pair.file("test") for pair in pairs]


def _pairs(settings: TaskConfig) -> list[LanguagePair]:
    """Return the pairs of languages that are scored, those of one language first.

    Raises:
        UserError: a language has no data.
    """
    folder = None if settings.dir is None else _mlqa_folder(settings.dir, "test")
    there = [
        language
        for language in LANGUAGES
        if folder is None or (folder / LanguagePair(language, language).file("test")).is_file()
    ]
    languages = there if settings.languages is None else settings.languages
    missing = [language for language in languages if language not in there]
    if missing or not languages:
        where = "MLQA" if folder is None else str(folder)
        lacking = missing[0] if missing else LANGUAGES[0]
        raise UserError(
            f"data.task.languages: {where} has no data for {lacking} ({LanguagePair(lacking, lacking).file('test')}), "
            f"only for {', '.join(there) or 'none'}; add the file, or name languages that are there"
        )
    crossed = [LanguagePair(one, other) for one in languages for other in languages if one != other]
    return [*(LanguagePair(language, language) for language in languages), *(crossed if settings.crossed else [])]


def _split_rows(key: str, folder: str | None, split: str, pair: LanguagePair | None) -> tuple[Rows, str]:
    if folder is None:
        name = "" if pair is None else f" {pair.column}"
        return _hub_rows(key, split, pair), f"{SQUAD_TASKS[key].hub}{name}, {split}"
    path = _dev_file(folder, key) if pair is None else _mlqa_folder(folder, split) / pair.file(split)
    return _file_rows(path), str(path)


def _checked(rows: Rows, place: str, key: str) -> list[QuestionExample]:
    questions = list[QuestionExample]()
    for row, where in rows:
        answers = row.get("answers")
        if isinstance(answers, list) and all(isinstance(answer, Mapping) for answer in answers):
            answers = {key: [answer.get(key) for answer in answers] for key in ("text", "answer_start")}
        texts, starts = (
            (answers.get("text"), answers.get("answer_start")) if isinstance(answers, Mapping) else (None, None)
        )
        if SQUAD_TASKS[key].has_unanswerable and texts == [""]:
            texts, starts = [], []  # how some files say that there is no answer
        number = row.get("id")
        fields = [
            str(number) if isinstance(number, int) else number,
            row.get("question"),
            row.get("context"),
        ]
        is_right = (
            all(isinstance(field, str) and field.strip() for field in fields)
            and isinstance(texts, list)
            and isinstance(starts, list)
            and len(texts) == len(starts)
            and all(isinstance(text, str) for text in texts)
            # Characters are stored in int32.
            and all(isinstance(start, int) and 0 <= start < 2**31 for start in starts)
        )
        if not is_right:
            raise UserError(
                f"{where}: expected id, question and context as text, and answers with text and answer_start, as in "
                f"the official files; it has {', '.join(row) or 'nothing'}"
            )
        listed = tuple(Answer(text, start) for text, start in zip(texts or [], starts or [], strict=True))
        questions.append(QuestionExample(str(fields[0]), str(fields[1]), str(fields[2]), listed))
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


def _file_rows(path: Path) -> Rows:
    """Yield the questions of a file in the official format, or of one with a row for each, as the hub has them.

    Raises:
        UserError: the file does not exist, or has another format.
    """
    if not path.is_file() and not is_saved_set(path):
        raise UserError(f"{path}: no such file; take the official download, whole, or none for the hub's")
    for article, place in READERS[path.suffix.lower()](path) if path.is_file() else open_rows(path):
        if "context" in article:
            answers = article.get("answers")
            if isinstance(answers, str):  # a cell of CSV
                answers = read_cell(answers, "answers", place)
            yield {**article, "answers": answers}, place
            continue
        try:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    listed = [] if question.get("is_impossible") else question["answers"]
                    row = {**question, "context": paragraph["context"], "answers": listed}
                    yield row, f"{place}, question {question.get('id')}"
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{place}: not in the official format ({type(error).__name__}: {error}); take a file that is"
            ) from error


def _train_file(folder: str, key: str) -> Path:
    """Return the training file; MLQA's is that of SQuAD 1.1, in its own folder or in MLQA's."""
    if not SQUAD_TASKS[key].is_multilingual:
        return _only_file(task_folder(folder, key), "train")
    inside = [task_folder(folder, "squad1"), task_folder(folder, key), folder]
    return _only_file(next((inner for inner in inside if any(Path(inner).glob("train*.json"))), folder), "train")


def _dev_file(folder: str, key: str) -> Path:
    if SQUAD_TASKS[key].is_multilingual:
        path = _mlqa_folder(folder, "dev") / ENGLISH.file("dev")
        if not path.is_file():
            raise UserError(f"{path}: no such file, by which settings are chosen; take MLQA's own download, whole")
        return path
    return _only_file(task_folder(folder, key), "dev", "validation")


def _mlqa_folder(folder: str, split: str) -> Path:
    """Return the folder of a split: MLQA's own download has the folders dev and test."""
    own = Path(task_folder(folder, "mlqa"))
    return own / split if (own / split).is_dir() else own


def _only_file(folder: str, *names: str) -> Path:
    """Return the file of a split: the official one, else one of rows, or a set that the datasets library saved."""
    paths = sorted(Path(folder).glob(f"{names[0]}*.json")) or sorted(
        path
        for name in names
        for path in Path(folder).glob(f"{name}*")
        if path.suffix.lower() in READERS or is_saved_set(path)
    )
    if len(paths) != 1:
        there = ", ".join(path.name for path in paths) or "no such file"
        raise UserError(
            f"{folder}: expected one file {names[0]}*.json of the official download, or one of rows of id, question, "
            f"context and answers, found {there}; leave one there"
        )
    return paths[0]


def _hub_rows(key: str, split: str, pair: LanguagePair | None) -> Rows:
    config = None if pair is None else f"mlqa.{pair.context}.{pair.question}"
    name = split.replace("dev", "validation")
    return benchmark_rows(SQUAD_TASKS[key].hub, config, name, files="the folder of the official download")
