"""SQuAD 1.1, SQuAD 2.0 and MLQA: a model with a head for spans is fine-tuned, and its answers are scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES

from llmdistill.batch import Batch
from llmdistill.data.columns import SplitWriter, StoredSplits
from llmdistill.data.sampler import Share, TrainLoader
from llmdistill.data.windows import (
    WINDOWS,
    EncodedWindow,
    QuestionExample,
    WindowLimits,
    collate_windows,
    encode_in_pieces,
    encode_windows,
)
from llmdistill.errors import UserError
from llmdistill.files import write_json
from llmdistill.models.families import is_causal
from llmdistill.models.forward import TappedModel
from llmdistill.models.taps import Recorder
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.objective import Objective
from llmdistill.tasks.base import Models, ScoredModel
from llmdistill.tasks.benchmark import Benchmark, BenchmarkData, check_positions, skipped_questions
from llmdistill.tasks.spans import Spans, predict_spans
from llmdistill.tasks.squad_files import (
    SQUAD_TASKS,
    QuestionSet,
    SquadFiles,
    check_files,
    from_json,
    read_files,
    read_sets,
    task_paths,
    to_json,
)
from llmdistill.tasks.squad_metrics import squad1_scores, squad2_scores


class Squad(Benchmark):
    """One task of question answering, whose answers are spans of the context."""

    head = "span"
    usual_length = 384
    has_classes = False

    @classmethod
    def title(cls, key: str) -> str:
        """See Benchmark: SQuAD1, SQuAD2 or MLQA."""
        return SQUAD_TASKS[key].title

    @classmethod
    def check_folder(cls, folder: str | None, key: str, *, setting: str) -> None:
        """See Benchmark."""
        check_files(folder, key, setting=setting)

    @classmethod
    def check_fine_tuned(cls, config: PreTrainedConfig, key: str, *, named: str) -> None:
        """See Benchmark: the model has a head for spans."""
        name = (config.architectures or [""])[0]
        if not name.endswith("ForQuestionAnswering"):
            raise UserError(
                f"{named}: it is a {name or config.model_type} without head for spans; give a model that is fine-tuned "
                f"on {SQUAD_TASKS[key].title}"
            )

    @classmethod
    def fine_tuned(cls, config: PreTrainedConfig, key: str) -> PreTrainedConfig:
        """See Benchmark."""
        config = type(config).from_dict(config.to_dict())
        config.num_labels = 2
        config.architectures = [MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES[config.model_type]]
        return config

    @property
    def hub(self) -> str:
        """See Task."""
        return SQUAD_TASKS[self.key].hub

    @property
    def num_outputs(self) -> int:
        """The outputs of the head at each token: its chances to be the start, and to be the end."""
        return 2

    def check_model(self, key: str, reference: str, config: PreTrainedConfig) -> None:
        """See Task. Both models are encoders; the teacher is fine-tuned."""
        if is_causal(config):
            raise UserError(
                f"{key} {reference}: {SQUAD_TASKS[self.key].title} needs an encoder, because the tokens of a "
                f"{config.model_type} do not see those after them; give a model such as BERT or RoBERTa"
            )
        if key == "teacher.model":
            self.check_fine_tuned(config, self.key, named=f"{key} {reference}")

    def objective(self, teacher: PreTrainedConfig, *, uses_output: bool) -> Objective:
        """See Task: the start and the end of a span."""
        return Objective(tokens=False, sequences="spans")

    def configure(self, model: PreTrainedModel) -> None:
        """See Task: the outputs are no classes, whatever the model was fine-tuned on before."""
        model.config.problem_type = None

    def read_files(self) -> SquadFiles:
        """See Benchmark."""
        return read_files(self.key, self.config.data.task)

    def paths(self) -> list[Path] | None:
        """See Benchmark."""
        return task_paths(self.key, self.config.data.task)

    def decides(self) -> dict[str, Any]:
        """See Benchmark."""
        task = self.config.data.task
        asked = {"limit": task.limit, "languages": task.languages, "crossed": task.crossed}
        return {**asked, **asdict(self._limits())}

    def write(self, files: SquadFiles, tokenizer: PreTrainedTokenizerBase, writer: SplitWriter) -> dict[str, Any]:
        """See Benchmark. The questions of the sets that models are scored on are kept too."""
        limits = self._limits()
        writer.add("train", encode_in_pieces(files.train, tokenizer, limits, learned=True), WINDOWS)
        for name, each in files.sets.items():
            writer.add(name, encode_in_pieces(each.questions, tokenizer, limits, learned=False), WINDOWS)
            writer.add_text(name, to_json(each.questions))
        return {
            "questions": len(files.train),
            "skipped": files.skipped,
            "digest": files.digest,
            "sets": {name: _about(each) for name, each in files.sets.items()},
        }

    def opened(self, stored: StoredSplits, models: Models) -> SquadData:
        """See Benchmark."""
        meta, train = stored.meta, stored.items("train", WINDOWS)
        windows = {name: stored.items(name, WINDOWS) for name in meta["sets"]}
        for config in (models.student, models.teacher):
            lengths = (each.longest for each in (train, *windows.values()))
            check_positions(config, SQUAD_TASKS[self.key].title, lengths, self.config.data.max_length)
        sets = {
            name: _Encoded(**about, windows=windows[name], read=partial(_questions, stored, name))
            for name, about in meta["sets"].items()
        }
        batch_size = self.config.train.micro_batch_size or self.config.train.global_batch_size
        return replace(
            self._data(load_tokenizer(models.tokenizer_path), sets, batch_size),
            train=train,
            num_questions=meta["questions"],
            skipped=meta["skipped"],
            digest=meta["digest"],
            teacher_name=str(self.config.teacher.model),
            report=f"{meta['questions']:,} questions in {len(train):,} windows",
        )

    def dev_data(self, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, batch_size: int) -> SquadData:
        """See Benchmark."""
        limits = self._limits()
        found = read_sets(self.key, self.config.data.task)
        sets = {
            name: _Encoded(
                **_about(each),
                windows=encode_windows(each.questions, tokenizer, limits, learned=False),
                read=partial(list, each.questions),
            )
            for name, each in found.items()
        }
        lengths = (len(window) for each in sets.values() for window in each.windows)
        check_positions(config, SQUAD_TASKS[self.key].title, lengths, limits.max_length)
        return self._data(tokenizer, sets, batch_size)

    def _limits(self) -> WindowLimits:
        settings = self.config.data.task
        return WindowLimits(self.config.data.max_length, settings.stride, settings.max_question_length)

    def _data(self, tokenizer: PreTrainedTokenizerBase, sets: Mapping[str, _Encoded], batch_size: int) -> SquadData:
        return SquadData(
            key=self.key,
            tokenizer=tokenizer,
            limits=self._limits(),
            max_answer_length=self.config.data.task.max_answer_length,
            encoded=sets,
            batch_size=batch_size,
            report="",
        )


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    """A set that models are scored on, with its windows."""

    column: str
    """See QuestionSet."""
    language: str | None
    """See QuestionSet."""
    is_averaged: bool
    """See QuestionSet."""
    size: int
    """The number of questions."""
    unanswerable: int
    """The number of questions without an answer."""
    windows: Sequence[EncodedWindow]
    read: Callable[[], list[QuestionExample]]
    """Returns the questions, which are read only to score a model."""


def _about(found: QuestionSet) -> dict[str, Any]:
    """Return what _Encoded has of a set beside its questions and windows."""
    about = {key: getattr(found, key) for key in ("column", "language", "is_averaged")}
    return {**about, "size": len(found.questions), "unanswerable": sum(not each.answers for each in found.questions)}


def _questions(stored: StoredSplits, name: str) -> list[QuestionExample]:
    return from_json(stored.text(name))


@dataclass(frozen=True, kw_only=True)
class SquadData(BenchmarkData):
    """The questions of one task."""

    key: str
    tokenizer: PreTrainedTokenizerBase
    limits: WindowLimits
    max_answer_length: int
    encoded: Mapping[str, _Encoded]
    """The sets that models are scored on."""
    batch_size: int
    """The number of windows per rank in a forward pass of scoring."""
    train: Sequence[EncodedWindow] = ()
    """The windows of the training set; none if the data only score."""
    num_questions: int = 0
    """The number of training questions, without the skipped ones."""
    skipped: Sequence[str] = ()
    """See SquadFiles."""
    digest: str | None = None
    """See SquadFiles; None if the data only score."""
    teacher_name: str = ""
    report: str

    @property
    def metrics(self) -> tuple[str, ...]:
        """See BenchmarkData: the scores at the best threshold, if some questions have no answer, come first."""
        return ("best_f1", "best_em", "f1", "em") if SQUAD_TASKS[self.key].has_unanswerable else ("f1", "em")

    @property
    def shown(self) -> tuple[str, ...]:
        """See BenchmarkData: F1 and exact match."""
        return self.metrics[:2]

    @property
    def main_column(self) -> str:
        """See BenchmarkData: for MLQA the mean over the languages."""
        return SQUAD_TASKS[self.key].title

    @property
    def chance(self) -> float:
        """See BenchmarkData: the share of questions without an answer, which never answering gets right."""
        dev = self.encoded["dev"]
        return 100 * (dev.unanswerable / dev.size)

    @property
    def sizes(self) -> dict[str, int]:
        """See BenchmarkData: questions."""
        return {"train": self.num_questions, **{name: each.size for name, each in self.encoded.items()}}

    @property
    def sets(self) -> dict[str, dict[str, Any]]:
        """See TaskData: dev, and for MLQA the test set of each language or pair of languages."""
        asked = {
            "examples": self.digest,
            "max_length": self.limits.max_length,
            "stride": self.limits.stride,
            "max_question_length": self.limits.max_question_length,
            "max_answer_length": self.max_answer_length,
        }
        return dict.fromkeys(self.encoded, asked)

    def num_steps(self, epochs: int, global_batch_size: int) -> int:
        """See TaskData: passes over the windows. The steps of each epoch are rounded up, as in GLUE."""
        return epochs * -(-len(self.train) // global_batch_size)

    def loader(self, share: Share) -> TrainLoader[EncodedWindow]:
        return TrainLoader(self.train, share, self._collate)

    def _collate(self, items: Sequence[EncodedWindow]) -> Batch:
        padding: Any = self.tokenizer.pad_token_id
        return collate_windows(items, padding)

    def score_set(self, name: str, scored: ScoredModel) -> dict[str, Any]:
        """See TaskData: the metrics, and the predictions in the formats of the official scripts.

        predictions.json has the answers by the id of the question. For SQuAD 2.0 an answer is "" where the null odds
        are above 0; null_odds.json has the null odds, and spans.json the answers as if every question had one.
        """
        encoded = self.encoded[name]
        questions = encoded.read()
        tapped = TappedModel(scored.model, Recorder(scored.model, {}))
        try:
            spans = predict_spans(
                tapped,
                encoded.windows,
                self._collate,
                questions,
                max_answer_length=self.max_answer_length,
                batch_size=self.batch_size,
                world=scored.world,
            )
        finally:
            tapped.remove()
        if scored.world.is_main:
            self._write(scored, name, spans)
        references = {question.id: [answer.text for answer in question.answers] for question in questions}
        scores: dict[str, Any]
        if SQUAD_TASKS[self.key].has_unanswerable:
            scores = squad2_scores(spans.texts, spans.null_odds, references).to_dict()
        else:
            scores = squad1_scores(spans.texts, references, language=encoded.language)
        return {"metrics": scores, "examples": len(questions)}

    def _write(self, scored: ScoredModel, name: str, spans: Spans) -> None:
        folder = scored.predictions / name
        answers = spans.texts
        if SQUAD_TASKS[self.key].has_unanswerable:
            answers = {key: "" if spans.null_odds[key] > 0 else text for key, text in answers.items()}
            write_json(folder / "null_odds.json", spans.null_odds)
            write_json(folder / "spans.json", spans.texts)
        write_json(folder / "predictions.json", answers)

    def summary(self, scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """See TaskData.

        Returns:
            ``{"dev": {COLUMN: {METRIC: value}}, "score": the metric that chooses settings, "chance": that of never
            answering}``, for SQuAD 2.0 also ``"threshold"``, the null odds above which an answer is left out for the
            best F1, and ``"official"``, all scores of the official script. MLQA's columns are its dev set, each test
            set, and ``MLQA``, the mean over the languages.
        """
        columns = {each.column: self._metrics(scores[name]["metrics"]) for name, each in self.encoded.items()}
        if SQUAD_TASKS[self.key].is_multilingual:
            same = [columns[each.column] for each in self.encoded.values() if each.is_averaged]
            columns[self.main_column] = {metric: fmean(each[metric] for each in same) for metric in self.metrics}
        dev = self.encoded["dev"].column
        summary = {"dev": columns, "score": columns[dev][self.metrics[0]], "chance": self.chance}
        if SQUAD_TASKS[self.key].has_unanswerable:
            official = dict(scores["dev"]["metrics"])
            summary |= {"threshold": official["best_f1_threshold"], "official": official}
        return summary

    def _metrics(self, scores: Mapping[str, float]) -> dict[str, float]:
        return {name: scores[name] for name in self.metrics}

    def sentence(self, model: str, summary: Mapping[str, Any]) -> str:
        threshold = f"  threshold {summary['threshold']:.3f}" if "threshold" in summary else ""
        return super().sentence(model, summary) + threshold

    def warnings(self, teacher: Mapping[str, Any] | None) -> list[str]:
        """See TaskData: skipped questions, and a teacher that is not better than never answering."""
        found = skipped_questions(self.skipped, "their answer is not in the context where answer_start says")
        if teacher is not None and teacher["score"] <= teacher["chance"]:
            found.append(
                f"the teacher {self.teacher_name} is not better than never answering on {SQUAD_TASKS[self.key].title}: "
                f"{self.metrics[0]} {teacher['score']:.1f} on dev, where that gets {teacher['chance']:.1f}. Nothing "
                "can be learned from it: fine-tune it first"
            )
        return found

    def legend(self) -> str:
        """See BenchmarkData."""
        text = f"{SQUAD_TASKS[self.key].title}: F1 and exact match as in the official script, x 100; "
        text += f"{self.sizes['train']:,} questions."
        if SQUAD_TASKS[self.key].has_unanswerable:
            text += " best_f1 and best_em are those at the best threshold of the null odds, f1 and em at 0."
        return text
