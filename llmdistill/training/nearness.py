"""Measures how far the students of a run are from their teacher, before the training and after it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from llmdistill.artifacts import find_record
from llmdistill.batch import Batch
from llmdistill.files import write_json, write_text
from llmdistill.generation.decode import Decoding, generate_passes
from llmdistill.messages import fold, print_result
from llmdistill.models.families import max_positions
from llmdistill.report.nearness import nearness_scores
from llmdistill.report.samples import read_samples
from llmdistill.report.table import MODELS
from llmdistill.report.tables import print_table
from llmdistill.runtime.distributed import World, broadcast_object, on_main
from llmdistill.runtime.terminal import print_main
from llmdistill.tasks.base import TaskData
from llmdistill.tasks.distance import Distance, ModelRows, compare_rows, cut_to_tokens, read_rows
from llmdistill.tasks.rouge import rouge_l
from llmdistill.teachers.live import TeacherOnDemand
from llmdistill.training.plan import Plan

FILE = "scores/nearness.json"
ANSWERS = "answers"
"""Folder in a run with the answers of each model to rows that were held out, as files of `report.samples`."""
ANSWER_SET = "held_out"
_NEW_TOKENS = 96
"""Of an answer, which a CPU writes in seconds; longer answers are cut."""
_WORSE = 1.02
"""A larger divergence than this many times the untrained student's is no noise of few rows."""
_SHOWN, _WIDTH = 2, 200
"""Questions in the terminal, and characters of each answer; the page of the run has all."""


@dataclass
class Nearness:
    """Compares the models of a run on the same rows, each of them once."""

    plan: Plan
    data: TaskData
    teacher: TeacherOnDemand
    scored: AbstractSet[str]
    """The models that the run scores, which answer questions too."""
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What was measured, by the model's key in metrics.json."""

    def __post_init__(self) -> None:
        # A damaged file is measured again.
        self.measured = on_main(lambda: find_record(self.plan.folder / FILE)[0] or {})

    @property
    def is_measured(self) -> bool:
        """Whether students of this run are compared: decoders whose teacher runs here and has their tokens.

        A start that the run makes itself is always measured, a student that is given where it is scored.
        """
        plan = self.plan
        if plan.config.teacher.model is None or not plan.models.causal or plan.task.head is not None:
            return False
        runs_here = plan.source is None or plan.source.runs_here
        is_made = plan.config.student.is_factorized
        return runs_here and not plan.models.translates and (is_made or {"teacher", "untrained"} <= self.scored)

    @cached_property
    def _rows(self) -> tuple[list[Batch], str]:
        batches, name = self.data.comparison_batches()
        return cut_to_tokens(batches), name

    @cached_property
    def _teacher_rows(self) -> list[ModelRows]:
        # Every rank takes part, as the teacher may be sharded.
        teacher = self.teacher()
        if "teacher" in self.scored and "teacher" not in self.measured:
            self._record("teacher", self._answer("teacher", teacher.model, sharded=teacher.sharded))
        return read_rows(teacher.model, self._rows[0], "teacher")

    def measure(self, key: str, name: str, load: Callable[[], PreTrainedModel]) -> str | None:
        """Measure and print a student, or read what was measured before; return a warning in words.

        An untrained student that keeps nothing sensible is warned of instead of printed, and a trained one if it is
        further from its teacher than the untrained one.

        Every rank must call this method.
        """
        if not self.is_measured:
            return None
        if key not in self.measured:
            batches, of = self._rows
            if not batches:
                return None
            teacher_rows, student = self._teacher_rows, load()
            answers = self._answer(key, student) if key in self.scored else {}
            compared: dict[str, Any] = {}
            if World.current().is_main:
                compared = asdict(compare_rows(teacher_rows, read_rows(student, batches, f"{name} student")))
            self._record(key, {**broadcast_object(compared), "of": of, **answers})
        values = self.measured[key]
        distance = Distance(**{name: values[name] for name in Distance.__dataclass_fields__})
        sentence = distance.sentence(values["of"])
        if key != "untrained" or not distance.is_hopeless:
            print_main(f"{name.capitalize():12}{sentence}")
        if key != "untrained":
            # A rate that is too high for a good start leads away from the teacher.
            before = self.measured.get("untrained", {}).get("divergence", math.inf)
            if not self.plan.method.needs_teacher or distance.divergence <= _WORSE * before:
                return None
            return (
                "the trained student is further from its teacher than the untrained one "
                f"({distance.divergence:.3g} nats per token, {before:.3g} before): lower train.learning_rate "
                f"({self.plan.config.train.peak_learning_rate:g}), or train for more steps"
            )
        if not distance.is_hopeless:
            return None
        settings = self.plan.config.student
        if not settings.is_factorized:
            remedy = "begin with another student"
        elif settings.factorize.is_weighted or settings.method != "svd":
            remedy = "give it more parameters (student.factorize.target_params)"
        else:
            remedy = "leave student.factorize.weighting out, so that data weight its start"
        return f"the untrained student {sentence}; {remedy}, or expect to train it almost from nothing"

    def _record(self, key: str, values: Mapping[str, Any]) -> None:
        self.measured[key] = dict(values)

        def write() -> None:
            path = self.plan.folder / FILE
            path.parent.mkdir(exist_ok=True)
            write_json(path, self.measured)

        on_main(write)

    def _answer(self, key: str, model: PreTrainedModel, *, sharded: bool = False) -> dict[str, Any]:
        """Let a model answer the questions, keep its answers in a file, and return their ROUGE-L."""
        questions = self.data.held_out_questions()
        if not questions:
            return {}
        longest = max(len(question.prompt_ids) for question in questions)
        limit = min(longest + _NEW_TOKENS, max_positions(model.config, longest + _NEW_TOKENS))
        if limit <= longest:
            return {}
        decoding = Decoding(sample=False, max_prompt_length=longest, max_length=limit, batch_size=len(questions))
        ids = [question.prompt_ids for question in questions]
        (result,) = generate_passes(model, self.data.tokenizer, ids, decoding, seeds=[0], synced=sharded)
        rows = [
            {"prompt": question.prompt, "references": [question.reference], "predictions": {"greedy": text}}
            for question, text in zip(questions, result.texts, strict=True)
        ]

        def write() -> None:
            path = self.plan.folder / ANSWERS / key / f"{ANSWER_SET}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

        on_main(write)
        return {"rougeL": rouge_l(result.texts, [[question.reference] for question in questions])}


def print_nearness(folder: Path, measured: Mapping[str, Mapping[str, Any]], *, with_table: bool) -> None:
    """Print a few answers of what `Nearness` measured side by side, before them the table if no other has it."""
    scores = nearness_scores(measured)
    if scores is None:
        return
    if with_table:
        rows = [[MODELS[key], *cells] for key, cells in scores.rows.items()]
        print_table(scores.title, ["model", *scores.columns], rows)
    for sample in read_samples({key: folder / ANSWERS / key for key in MODELS}, [ANSWER_SET])[:_SHOWN]:
        print_result(fold(f"\n{_shorten(sample.prompt)}", indent=0))
        for key, answer in sample.answers.items():
            print_result(fold(f"  {MODELS[key]:10}{_shorten(answer)}", indent=12))
    if "ROUGE-L" in scores.columns:
        print_result("")


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else f"{line[:_WIDTH].rstrip()} …"
