"""GLUE tasks: a model with a classifier is fine-tuned on one task and scored on its dev split by GLUE's metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.batch import Batch
from llmdistill.config import RunConfig
from llmdistill.data.pairs import EncodedPair, PairExample, collate_pairs, encode_pairs
from llmdistill.data.sampler import Share, TrainLoader
from llmdistill.errors import UserError
from llmdistill.models.families import max_positions
from llmdistill.models.forward import TappedModel
from llmdistill.models.taps import Recorder
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.objective import Objective
from llmdistill.runtime.distributed import World
from llmdistill.tasks import task_key
from llmdistill.tasks.base import Models, ScoredModel, ScoreTable, Task, TaskData
from llmdistill.tasks.classification import (
    chance_score,
    main_score,
    predict,
    targets_of,
    task_metrics,
    write_answers,
)
from llmdistill.tasks.glue_files import (
    TASKS,
    GlueTask,
    Metric,
    TaskFiles,
    check_data_dir,
    column_of,
    glue_name,
    read_task,
)


class Glue(Task):
    """One task of GLUE."""

    head = "sequence"
    scored = ("teacher", "student")

    def __init__(self, config: RunConfig, *, trains: bool = True, teacher_writes: bool = False) -> None:
        """Find the task and its folder; raise UserError if there is none."""
        super().__init__(config, trains=trains, teacher_writes=teacher_writes)
        self.name = glue_name(task_key(str(config.data.task.name)))
        check_data_dir(config.data.task.dir, [self.name], key="data.task.dir")
        self.metric = _metric_of(self.name, config.data.task.metric)

    def read_files(self) -> TaskFiles:
        """Read the examples of all splits; raise UserError for a file that is missing or malformed."""
        settings = self.config.data.task
        return read_task(self.name, settings.dir, settings.limit)

    @property
    def task(self) -> GlueTask:
        """The properties of the task in GLUE."""
        return TASKS[self.name]

    @property
    def num_outputs(self) -> int:
        """The number of classes, or 1 for a score."""
        return self.task.num_outputs

    def check_model(self, key: str, reference: str, config: PreTrainedConfig) -> None:
        """See Task. The teacher must be fine-tuned on a task with the same number of classes."""
        if key == "teacher.model":
            check_classes(config, self.name, named=f"{key} {reference}")

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

    def read(self, models: Models) -> GlueData:
        """See Task.

        Raises:
            UserError: a file is missing or malformed, or an example has more tokens than a model has positions.
        """
        max_length, files = self.config.data.max_length, self.read_files()
        tokenizer = load_tokenizer(models.tokenizer_path)
        encoded = _encoded(files, str(models.tokenizer_path), max_length)
        for config in (models.student, models.teacher):
            tests = (encode_pairs(examples, tokenizer, max_length) for examples in files.test.values())
            _check_positions(config, files.name, chain(encoded.values(), tests), max_length)
        return GlueData(
            files=files,
            tokenizer=tokenizer,
            metric=self.metric,
            max_length=max_length,
            encoded=encoded,
            batch_size=self.config.train.micro_batch_size or self.config.train.global_batch_size,
            teacher_name=str(self.config.teacher.model),
            report=f"{len(files.train):,} examples",
        )


@dataclass(frozen=True, kw_only=True)
class GlueData(TaskData):
    """The examples of one task of GLUE."""

    files: TaskFiles
    tokenizer: PreTrainedTokenizerBase
    metric: Metric
    """The metric by which settings are chosen."""
    max_length: int
    encoded: Mapping[str, Sequence[EncodedPair]]
    """The train and dev splits, encoded by the student's tokenizer."""
    batch_size: int
    """The number of sequences per rank in a forward pass of scoring."""
    teacher_name: str
    report: str

    @property
    def sets(self) -> dict[str, dict[str, Any]]:
        """See TaskData: the dev splits."""
        asked = {"examples": self.files.digest, "max_length": self.max_length}
        return {split: asked for split in self.files.dev}

    def num_steps(self, epochs: int, global_batch_size: int) -> int:
        """See TaskData. The steps of each epoch are rounded up, as in the papers."""
        return epochs * -(-len(self.files.train) // global_batch_size)

    def loader(self, share: Share) -> TrainLoader[EncodedPair]:
        return TrainLoader(self.encoded["train"], share, self._collate)

    def _collate(self, items: Sequence[EncodedPair]) -> Batch:
        padding: Any = self.tokenizer.pad_token_id
        return collate_pairs(items, padding)

    def validation(self, share: Share) -> list[Batch]:
        """See TaskData: no batches, because the dev splits are scored by the metrics of the task."""
        return []

    def score_set(self, name: str, scored: ScoredModel) -> dict[str, Any]:
        """See TaskData: the task's metrics on a dev split."""
        examples = self.files.dev[name]  # type: ignore[index]
        tapped = TappedModel(scored.model, Recorder(scored.model, {}))
        try:
            answers = predict(
                tapped,
                self.encoded[name],
                self._collate,
                self.files.task,
                batch_size=self.batch_size,
                world=scored.world,
            )
        finally:
            tapped.remove()
        if scored.world.is_main:
            write_answers(scored.predictions / f"{name}.tsv", examples, answers)
        return {"metrics": task_metrics(self.files.name, answers, targets_of(examples)), "examples": len(examples)}

    def summary(self, scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """See TaskData.

        Returns:
            ``{"dev": {COLUMN: {METRIC: value}}, "score": the metric that chooses settings, "chance": that of the best
            constant answer}``.
        """
        name = self.files.name
        dev = {column_of(name, split): scores[split]["metrics"] for split in self.files.dev}
        chance = chance_score(name, self.files.dev["dev"], self.metric)
        return {"dev": dev, "score": main_score(name, dev, self.metric), "chance": chance}

    def sentence(self, model: str, summary: Mapping[str, Any]) -> str:
        shown = "  ".join(
            f"{column} {metric} {value:.2f}"
            for column, metrics in summary["dev"].items()
            for metric, value in metrics.items()
        )
        return f"Dev scores of the {model}: {shown}"

    def warnings(self, teacher: Mapping[str, Any] | None) -> list[str]:
        """See TaskData: a warning if the teacher is not better than chance."""
        if teacher is None or teacher["score"] > teacher["chance"]:
            return []
        return [
            f"the teacher {self.teacher_name} scores at chance on {self.files.name}: {self.metric} "
            f"{teacher['score']:.1f} on dev, where one answer to everything gets {teacher['chance']:.1f}. Nothing can "
            "be learnt from it: fine-tune it first, or check that its classes are in GLUE's order"
        ]

    def table(self, results: Mapping[str, Mapping[str, Any]]) -> ScoreTable:
        columns = [column_of(self.files.name, split) for split in self.files.dev]
        metrics = self.files.task.metrics
        return ScoreTable(
            title="Dev sets x 100",
            columns=[f"{column} {metric}" for column in columns for metric in metrics],
            rows={
                name: [f"{result['dev'][column][metric]:.1f}" for column in columns for metric in metrics]
                for name, result in results.items()
            },
            legend=f"GLUE's metrics on dev, x 100; {len(self.files.train):,} training examples.",
        )


def score_task(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    *,
    data_dir: str | None,
    max_length: int,
    batch_size: int,
    predictions: Path | None = None,
) -> dict[str, Any]:
    """Score a fine-tuned classifier in evaluation mode on the dev splits of a task, in this process alone.

    `task` is as the user wrote it, such as rte or SST-2; data_dir None takes the data set on the hub, and predictions
    None keeps none. The result is that of `GlueData.summary`.

    Raises:
        UserError: the task does not exist, the model has no classifier for it, or a file is missing or malformed.
    """
    name = glue_name(task_key(task, key="data"), key="data")
    check_data_dir(data_dir, [name], key="data_dir")
    if not type(model).__name__.endswith("ForSequenceClassification"):
        raise UserError(f"model is a {type(model).__name__} without classifier: give one that is fine-tuned on {name}")
    check_classes(model.config, name, named="model")
    files = read_task(name, data_dir, None)
    encoded: dict[str, Sequence[EncodedPair]] = {
        split: encode_pairs(examples, tokenizer, max_length) for split, examples in files.dev.items()
    }
    _check_positions(model.config, name, encoded.values(), max_length)
    data = GlueData(
        files=files,
        tokenizer=tokenizer,
        metric=_metric_of(name, None),
        max_length=max_length,
        encoded=encoded,
        batch_size=batch_size,
        teacher_name="",
        report="",
    )
    world = World(rank=0, size=1, device=model.device)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) if predictions is None else predictions
        scored = ScoredModel(model=model, tokenizer=tokenizer, predictions=folder, world=world, sharded=False)
        return data.summary({split: data.score_set(split, scored) for split in data.sets})


def _metric_of(task: str, name: str | None) -> Metric:
    """The metric by which settings are chosen; raise UserError if the task has no metric of this name."""
    metrics = {metric: metric for metric in TASKS[task].metrics}
    if name is not None and name not in metrics:
        raise UserError(f"data.task.metric is {name}: {task} has {', '.join(metrics)}; name one of them")
    return TASKS[task].metrics[0] if name is None else metrics[name]  # type: ignore[index]


def check_classes(config: PreTrainedConfig, task: str, *, named: str) -> None:
    """Check that a fine-tuned model has as many classes as the task; raise UserError with `named` in it otherwise."""
    found, wanted = config.num_labels, TASKS[task].num_outputs
    if found != wanted:
        raise UserError(
            f"{named}: it tells {found} classes apart, but {task} has {wanted}"
            f"{'' if TASKS[task].classes else ' (a score)'}; give one that is fine-tuned on {task}"
        )


def _check_positions(
    config: PreTrainedConfig, task: str, sets: Iterable[Sequence[EncodedPair]], max_length: int
) -> None:
    """Check that a model has a position for each token of the examples; the sets are read only if it may lack one."""
    positions = max_positions(config, max_length)
    if positions == max_length:
        return
    longest = max(len(item) for items in sets for item in items)
    if longest > positions:
        raise UserError(
            f"data.max_length is {max_length}: an example of {task} has {longest} tokens, but a model has "
            f"positions for {positions}; give {positions} or less"
        )


@lru_cache(maxsize=2)  # the trials of a study in one process use the same examples
def _encoded(files: TaskFiles, tokenizer: str, max_length: int) -> Mapping[str, Sequence[EncodedPair]]:
    loaded = load_tokenizer(tokenizer)
    splits: list[tuple[str, Sequence[PairExample]]] = [("train", files.train), *files.dev.items()]
    return {split: encode_pairs(examples, loaded, max_length) for split, examples in splits}
