"""GLUE tasks: a model with a classifier is fine-tuned on one task and scored on its dev split by GLUE's metrics."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.batch import Batch
from llmdistill.config import RunConfig
from llmdistill.data.columns import SplitWriter, StoredSplits, in_pieces
from llmdistill.data.pairs import PAIRS, EncodedPair, PairExample, collate_pairs, encode_pairs
from llmdistill.data.sampler import Share, TrainLoader
from llmdistill.errors import UserError
from llmdistill.models.forward import TappedModel
from llmdistill.models.taps import Recorder
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.objective import Objective
from llmdistill.tasks.base import Models, ScoredModel
from llmdistill.tasks.benchmark import Benchmark, BenchmarkData, check_positions
from llmdistill.tasks.classification import (
    chance_score,
    predict,
    targets_of,
    task_metrics,
    write_answers,
    write_submission,
)
from llmdistill.tasks.glue_files import (
    DEV,
    GLUE_TASKS,
    HUB_NAME,
    TEST,
    GlueTask,
    Metric,
    Split,
    TaskFiles,
    check_data_dir,
    column_of,
    glue_name,
    read_task,
    task_paths,
    with_further,
)
from llmdistill.tasks.out_of_domain import check_further, read_further, sets_of


class Glue(Benchmark):
    """One task of GLUE."""

    head = "sequence"
    usual_length = 128

    @property
    def hub(self) -> str:
        """See Task."""
        return HUB_NAME

    @property
    def data_class(self) -> type[GlueData]:
        """The class of the examples; a task with further columns has its own."""
        return GlueData

    def __init__(self, config: RunConfig, *, trains: bool = True, teacher_writes: bool = False) -> None:
        """Find the task and its folder; raise UserError if there is none."""
        super().__init__(config, trains=trains, teacher_writes=teacher_writes)
        self.name = glue_name(self.key)
        self.metric = _metric_of(self.name, config.data.task.metric)

    @classmethod
    def title(cls, key: str) -> str:
        """See Benchmark: GLUE's name, which is that of its folder."""
        return glue_name(key)

    @classmethod
    def check_folder(cls, folder: str | None, key: str, *, setting: str) -> None:
        """See Benchmark."""
        check_data_dir(folder, [glue_name(key)], key=setting)

    @classmethod
    def check_further(cls, asked: Mapping[str, Mapping[str, Any]], key: str) -> None:
        """See Benchmark."""
        task = GLUE_TASKS[glue_name(key)]
        if task.classes:
            check_further(asked, glue_name(key), task.classes, len(task.sentences))

    @classmethod
    def check_fine_tuned(cls, config: PreTrainedConfig, key: str, *, named: str) -> None:
        """See Benchmark: the model has as many classes as the task."""
        name = glue_name(key)
        found, wanted = config.num_labels, GLUE_TASKS[name].num_outputs
        if found != wanted:
            raise UserError(
                f"{named}: it tells {found} classes apart, but {name} has {wanted}"
                f"{'' if GLUE_TASKS[name].classes else ' (a score)'}; give one that is fine-tuned on {name}"
            )

    @classmethod
    def fine_tuned(cls, config: PreTrainedConfig, key: str) -> PreTrainedConfig:
        """See Benchmark."""
        config = copy.deepcopy(config)
        config.num_labels = GLUE_TASKS[glue_name(key)].num_outputs
        return config

    def read_files(self) -> TaskFiles:
        """Read the examples of all splits; raise UserError for a file that is missing or malformed."""
        settings = self.config.data.task
        files = read_task(self.name, settings.dir, settings.limit)
        task = self.task
        if not task.classes:
            return files
        return with_further(files, read_further(settings.out_of_domain, self.name, task.classes, len(task.sentences)))

    @property
    def task(self) -> GlueTask:
        """The properties of the task in GLUE."""
        return GLUE_TASKS[self.name]

    @property
    def num_outputs(self) -> int:
        """The number of classes, or 1 for a score."""
        return self.task.num_outputs

    def check_model(self, key: str, reference: str, config: PreTrainedConfig) -> None:
        """See Task. The teacher must be fine-tuned on a task with the same number of classes."""
        if key == "teacher.model":
            self.check_fine_tuned(config, self.key, named=f"{key} {reference}")

    def objective(self, teacher: PreTrainedConfig, *, uses_output: bool) -> Objective:
        """See Task: a class or a score for each sequence."""
        return Objective(tokens=False, sequences="classes" if self.task.classes else "scores")

    def configure(self, model: PreTrainedModel) -> None:
        """See Task: the names of the classes."""
        classes = self.task.classes
        if classes:
            model.config.id2label = dict(enumerate(classes))
            model.config.label2id = {label: index for index, label in enumerate(classes)}
        model.config.problem_type = "single_label_classification" if classes else "regression"

    def paths(self) -> list[Path] | None:
        """See Benchmark."""
        folder = self.config.data.task.dir
        further = [Path(str(given["data"])) for given in self._further().values()]
        if folder is None or not all(path.is_file() for path in further):
            return None
        return [*self._own_paths(folder), *further]

    def _own_paths(self, folder: str) -> list[Path]:
        """Return the files of the task itself."""
        return task_paths(self.name, folder)

    def _further(self) -> dict[str, dict[str, Any]]:
        """Return the settings of the further sets of the task."""
        return sets_of(self.config.data.task.out_of_domain, self.name) if self.task.classes else {}

    def decides(self) -> dict[str, Any]:
        """See Benchmark."""
        settings = self.config.data
        return {"limit": settings.task.limit, "max_length": settings.max_length, "further": self._further()}

    def write(self, files: TaskFiles, tokenizer: PreTrainedTokenizerBase, writer: SplitWriter) -> dict[str, Any]:
        """See Benchmark."""
        splits: dict[Any, Sequence[PairExample]] = {"train": files.train, **_scored(files), **files.test}
        for split, examples in splits.items():
            pieces = (encode_pairs(piece, tokenizer, self.config.data.max_length) for piece in in_pieces(examples))
            writer.add(split, pieces, PAIRS)
        return {"digest": files.digest, "labels": _labels(files)}

    def opened(self, stored: StoredSplits, models: Models) -> GlueData:
        """See Benchmark."""
        encoded = {split: stored.items(split, PAIRS) for split in stored.meta["splits"]}
        for config in (models.student, models.teacher):
            lengths = (items.longest for items in encoded.values())
            check_positions(config, self.name, lengths, self.config.data.max_length)
        train = self.config.train
        return self._data(
            load_tokenizer(models.tokenizer_path),
            encoded,
            digest=stored.meta["digest"],
            labels=stored.meta["labels"],
            batch_size=train.micro_batch_size or train.global_batch_size,
            teacher_name=str(self.config.teacher.model),
            report=f"{len(encoded['train']):,} examples",
        )

    def _data(
        self, tokenizer: PreTrainedTokenizerBase, encoded: Mapping[str, Sequence[EncodedPair]], **values: Any
    ) -> GlueData:
        return self.data_class(
            name=self.name,
            tokenizer=tokenizer,
            metric=self.metric,
            max_length=self.config.data.max_length,
            encoded=encoded,
            **values,
        )

    def dev_data(self, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, batch_size: int) -> GlueData:
        """See Benchmark."""
        max_length, files = self.config.data.max_length, self.read_files()
        encoded: dict[str, Sequence[EncodedPair]] = {
            split: encode_pairs(examples, tokenizer, max_length) for split, examples in _scored(files).items()
        }
        check_positions(config, files.name, map(len, chain.from_iterable(encoded.values())), max_length)
        about = {"digest": files.digest, "labels": _labels(files)}
        return self._data(tokenizer, encoded, **about, batch_size=batch_size, teacher_name="", report="")


@dataclass(frozen=True, kw_only=True)
class GlueData(BenchmarkData):
    """The examples of one task of GLUE."""

    name: str
    """The name of the task in glue_files.GLUE_TASKS."""
    digest: str
    """A digest of the examples; see TaskFiles."""
    labels: Mapping[str, Sequence[int]]
    """For each further set the label that each class of the task stands for."""
    tokenizer: PreTrainedTokenizerBase
    metric: Metric
    """The metric by which settings are chosen."""
    max_length: int
    encoded: Mapping[str, Sequence[EncodedPair]]
    """All splits and further sets, encoded by the student's tokenizer; without train and test if they only score."""
    batch_size: int
    """The number of sequences per rank in a forward pass of scoring."""
    teacher_name: str
    report: str

    @property
    def task(self) -> GlueTask:
        """The properties of the task in GLUE."""
        return GLUE_TASKS[self.name]

    @property
    def metrics(self) -> tuple[str, ...]:
        """See BenchmarkData: all metrics of GLUE."""
        return (self.metric, *(each for each in self.task.metrics if each != self.metric))

    @property
    def main_column(self) -> str:
        """See BenchmarkData: the column of the matched split."""
        return self.column("dev")

    def column(self, name: str) -> str:
        """Return the column of one of `sets` in tables."""
        return name if name in self.labels else column_of(self.name, cast(Split, name))

    @property
    def chance(self) -> float:
        """See BenchmarkData."""
        return chance_score(self.name, self.encoded["dev"], self.metric)

    @property
    def sizes(self) -> dict[str, int]:
        """See BenchmarkData."""
        return {name: len(self.encoded[name]) for name in ("train", *self._scored())}

    def _scored(self) -> list[str]:
        """Return the names of the dev splits and of the further sets."""
        return [name for name in self.encoded if name in DEV or name in self.labels]

    @property
    def submissions(self) -> dict[str, str]:
        """See BenchmarkData: the files for the GLUE server."""
        return {split: f"{column_of(self.name, split)}.tsv" for split in TEST if split in self.encoded}

    def submit(self, split: str, scored: ScoredModel, path: Path) -> None:
        """See BenchmarkData."""
        items = self.encoded[split]
        answers = self._answers(scored, items)
        if scored.world.is_main:
            write_submission(path, self.task, items, answers)

    @property
    def sets(self) -> dict[str, dict[str, Any]]:
        """See TaskData: the dev splits, and the further sets."""
        asked = {"examples": self.digest, "max_length": self.max_length}
        return dict.fromkeys(self._scored(), asked)

    def num_steps(self, epochs: int, global_batch_size: int) -> int:
        """See TaskData. The steps of each epoch are rounded up, as in the papers."""
        return epochs * -(-len(self.encoded["train"]) // global_batch_size)

    def loader(self, share: Share) -> TrainLoader[EncodedPair]:
        train = self.encoded["train"]
        return TrainLoader(train, share, self._collate)

    def _collate(self, items: Sequence[EncodedPair]) -> Batch:
        padding: Any = self.tokenizer.pad_token_id
        return collate_pairs(items, padding)

    def score_set(self, name: str, scored: ScoredModel) -> dict[str, Any]:
        """See TaskData: the task's metrics on a dev split, the accuracy of the labels on a further set."""
        items, labels = self.encoded[name], self.labels.get(name)
        answers = self._answers(scored, items)
        if labels is not None:
            answers = np.array(labels)[answers]
        if scored.world.is_main:
            write_answers(scored.predictions / f"{name}.tsv", items, answers)
        targets = targets_of(items)
        if labels is not None:
            return {"metrics": {"accuracy": 100 * float(np.mean(answers == targets))}, "examples": len(items)}
        return {"metrics": task_metrics(self.name, answers, targets), "examples": len(items)}

    def _answers(self, scored: ScoredModel, items: Sequence[EncodedPair]) -> np.ndarray:
        """Return the model's class or score of each item; every rank must call this method."""
        tapped = TappedModel(scored.model, Recorder(scored.model, {}))
        try:
            return predict(tapped, items, self._collate, self.task, batch_size=self.batch_size, world=scored.world)
        finally:
            tapped.remove()

    def summary(self, scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """See TaskData.

        Returns:
            ``{"dev": {COLUMN: {METRIC: value}}, "score": the metric that chooses settings, "chance": that of the best
            constant answer}``.
        """
        dev = {self.column(split): scores[split]["metrics"] for split in self._scored()}
        return {"dev": dev, "score": dev[self.column("dev")][self.metrics[0]], "chance": self.chance}

    def warnings(self, teacher: Mapping[str, Any] | None) -> list[str]:
        """See TaskData: a warning if the teacher is not better than chance."""
        if teacher is None or teacher["score"] > teacher["chance"]:
            return []
        return [
            f"the teacher {self.teacher_name} scores at chance on {self.name}: {self.metric} "
            f"{teacher['score']:.1f} on dev, where one answer to everything gets {teacher['chance']:.1f}. Nothing can "
            "be learned from it: fine-tune it first, or check that its classes are in GLUE's order"
        ]

    def legend(self) -> str:
        """See BenchmarkData."""
        text = f"GLUE's metrics on dev, x 100; {self.sizes['train']:,} training examples."
        if self.labels:
            text += f" Accuracy on {', '.join(self.labels)}, for which nothing was fine-tuned or chosen."
        return text


def _metric_of(task: str, name: str | None) -> Metric:
    """The metric by which settings are chosen; raise UserError if the task has no metric of this name."""
    metrics = {metric: metric for metric in GLUE_TASKS[task].metrics}
    if name is not None and name not in metrics:
        raise UserError(f"data.task.metric is {name}: {task} has {', '.join(metrics)}; name one of them")
    return GLUE_TASKS[task].metrics[0] if name is None else metrics[name]


def _scored(files: TaskFiles) -> dict[str, list[PairExample]]:
    """Return the examples of the dev splits and of the further sets."""
    found: dict[str, list[PairExample]] = {split: rows for split, rows in files.dev.items()}
    return found | {name: each.examples for name, each in files.further.items()}


def _labels(files: TaskFiles) -> dict[str, Sequence[int]]:
    return {name: each.labels for name, each in files.further.items()}
