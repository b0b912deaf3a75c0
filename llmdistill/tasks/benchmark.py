"""What a study of fine-tuning needs from a task: its title, its metrics on dev, and its fine-tuned models.

One class of `Benchmark` may serve several tasks, which differ in their names.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.batch import Batch
from llmdistill.config import DataConfig, GenerationConfig, RunConfig, TrainConfig
from llmdistill.data.sampler import Share, StepLoader, TrainLoader
from llmdistill.errors import UserError
from llmdistill.models.heads import HEADS, HeadName
from llmdistill.runtime.distributed import World
from llmdistill.tasks import task_class, task_key
from llmdistill.tasks.base import ScoredModel, ScoreTable
from llmdistill.tasks.stored import StoredData, StoredTask
from llmdistill.tasks.text_metrics import NAMES


@dataclass(frozen=True, kw_only=True, eq=False)
class BenchmarkData(StoredData):
    """The examples of a benchmark, the scores of models on them, and their table."""

    task: Benchmark
    table_title: ClassVar[str] = "Dev sets x 100"
    decimals: ClassVar[int] = 1
    """The decimals of the scores in `table`."""

    @property
    def main_column(self) -> str:
        """The column that stands for the task in an average over tasks."""
        return self.column("dev")

    @abstractmethod
    def column(self, name: str) -> str:
        """Return the column of one of `sets` in tables."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """The first metric of the best constant answer to the dev split, from 0 to 100."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of examples of each split, `train` first."""
        return {"train": len(self.train), **{name: len(self.encoded[name]) for name in self.sets}}

    @property
    def submissions(self) -> Mapping[str, str]:
        """The name of the file for a benchmark's server by test split; empty without such a split."""
        return {}

    def submit(self, split: str, scored: ScoredModel, path: Path) -> None:
        """Write the file of one of `submissions`; every rank must call this method."""
        raise AssertionError(f"{type(self).__name__} has no test split")

    def validation(self, share: Share) -> list[Batch]:
        """See Task: no batches, because dev is scored by the metrics of the task."""
        return []

    def num_steps(self, epochs: int, global_batch_size: int) -> int:
        """See Task. The steps of each epoch are rounded up, as in the papers."""
        return epochs * -(-len(self.train) // global_batch_size)

    def loader(self, share: Share) -> StepLoader[Any]:
        return TrainLoader(self.train, share, self.collate)

    def metrics_of(self, score: Mapping[str, Any]) -> dict[str, float]:
        """Return the metrics that `summary` shows of the score of a set."""
        return dict(score["metrics"])

    def summary(self, scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """See Task.

        Returns:
            ``{"dev": {COLUMN: {METRIC: value}}, "score": the metric on dev that chooses settings, "chance": that of the
            best constant answer}``.
        """
        columns = {self.column(name): self.metrics_of(scores[name]) for name in self.sets}
        return {"dev": columns, "score": columns[self.column("dev")][self.task.metrics[0]], "chance": self.chance}

    def sentence(self, model: str, summary: Mapping[str, Any]) -> str:
        shown = "  ".join(
            f"{column} {NAMES.get(metric, metric)} {value:.2f}"
            for column, metrics in summary["dev"].items()
            for metric, value in metrics.items()
        )
        return f"Dev scores of the {model}: {shown}"

    @abstractmethod
    def legend(self) -> str:
        """Return what the columns of `table` are."""

    def table(self, results: Mapping[str, Mapping[str, Any]]) -> ScoreTable:
        dev = next(iter(results.values()))["dev"] if results else {}
        columns = [(column, metric) for column, metrics in dev.items() for metric in metrics]
        return ScoreTable(
            title=self.table_title,
            columns=[f"{column} {NAMES.get(metric, metric)}" for column, metric in columns],
            rows={
                name: [f"{result['dev'][column][metric]:.{self.decimals}f}" for column, metric in columns]
                for name, result in results.items()
            },
            legend=self.legend(),
        )


class Benchmark(StoredTask[BenchmarkData]):
    """A task with labels, a dev split and metrics, on which a model with a new head is fine-tuned."""

    scored = ("teacher", "student")
    head: ClassVar[HeadName]
    usual_length: ClassVar[int]
    """The usual maximum number of tokens of an example."""
    has_classes: ClassVar[bool] = True
    """Whether the targets are classes or scores of whole examples, which a figure may color."""

    def __init__(self, config: RunConfig, *, trains: bool = True, teacher_writes: bool = False) -> None:
        """Find the task and its files; raise UserError if they do not exist."""
        super().__init__(config, trains=trains, teacher_writes=teacher_writes)
        self.key = task_key(str(config.data.task.name))
        self.check_folder(config.data.task.dir, self.key, setting="data.task.dir")
        self.check_further(config.data.task.out_of_domain, self.key)

    @classmethod
    @abstractmethod
    def title(cls, key: str) -> str:
        """Return the name of a task in tables, in folders and on the command line, by its key in `tasks.TASKS`."""

    @classmethod
    @abstractmethod
    def files_in(cls, folder: str, key: str, *, setting: str) -> list[Path]:
        """Return the files of a task in a folder.

        Raises:
            UserError: a file does not exist.
        """

    @classmethod
    def check_folder(cls, folder: str | None, key: str, *, setting: str) -> None:
        """Check that a folder has the files of a task; None is the data set on the hub.

        Raises:
            UserError: the folder or a file does not exist; the message names the setting.
        """
        if folder is None:
            return
        if not Path(folder).is_dir():
            raise UserError(
                f"{setting} {folder}: no such folder; give the one with {cls.title(key)}'s files, or none for the hub"
            )
        cls.files_in(folder, key, setting=setting)

    def paths(self) -> list[Path] | None:
        folder = self.config.data.task.dir
        return None if folder is None else self.files_in(folder, self.key, setting="data.task.dir")

    @classmethod
    def check_further(cls, settings_by_name: Mapping[str, Mapping[str, Any]], key: str) -> None:
        """Check the settings of the out-of-domain sets (data.task.out_of_domain), and that their data exist.

        Only a task with classes has such sets.

        Raises:
            UserError: a setting is missing or does not fit, or a file does not exist.
        """

    @classmethod
    def check_fine_tuned(cls, config: PreTrainedConfig, key: str, *, named: str) -> None:
        """Check by its config that a model is fine-tuned on a task.

        Raises:
            UserError: it has another head; the message contains `named`.
        """
        head, name = HEADS[cls.head], (config.architectures or [""])[0]
        if not name.endswith(head.endings):
            raise UserError(
                f"{named}: it is a {name or config.model_type} without {head.title}; give a model that is fine-tuned "
                f"on {cls.title(key)}"
            )

    @classmethod
    @abstractmethod
    def fine_tuned(cls, config: PreTrainedConfig, key: str) -> PreTrainedConfig:
        """Return the config that a model will have once it is fine-tuned on a task."""

    def check_model(self, key: str, reference: str, config: PreTrainedConfig) -> None:
        """See Task. The teacher is fine-tuned on the task."""
        if key == "teacher.model":
            self.check_fine_tuned(config, self.key, named=f"{key} {reference}")

    @property
    @abstractmethod
    def metrics(self) -> Sequence[str]:
        """The metrics of each column; settings are chosen by the first one."""

    @property
    def shown(self) -> Sequence[str]:
        """The metrics of each column that the table of a study shows."""
        return self.metrics[:1]


def find_benchmarks(names: Iterable[str], *, setting: str) -> list[str]:
    """Return the titles of the tasks that the user typed (rte, sst2, squad2) as a setting.

    Raises:
        UserError: a task does not exist, or is named twice.
    """
    titles = [task.title(key) for task, key in (find_benchmark(name, setting=setting) for name in names)]
    repeated = next((name for name in titles if titles.count(name) > 1), None)
    if repeated is not None:
        raise UserError(f"{setting}: {repeated} is named twice; name each task once")
    return titles


def find_benchmark(name: str, *, setting: str = "data.task.name") -> tuple[type[Benchmark], str]:
    """Return the class and the key in `tasks.TASKS` of a task by its title, or as the user typed it as a setting.

    Raises:
        UserError: the task does not exist.
    """
    key = task_key(name, key=setting)
    task = task_class(key)
    assert issubclass(task, Benchmark), f"{key} is no benchmark"
    return task, key


def find_shared_benchmark(names: Iterable[str]) -> type[Benchmark]:
    """Return the class of the tasks that one model is scored on.

    Raises:
        UserError: a task does not exist, or the tasks need different heads.
    """
    classes = {find_benchmark(name, setting="data")[0] for name in names}
    if len({benchmark.head for benchmark in classes}) > 1:
        raise UserError("data holds tasks that need different heads: evaluate them one by one")
    return classes.pop()


def score_task(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    *,
    batch_size: int,
    predictions: Path | None = None,
) -> dict[str, Any]:
    """Score a fine-tuned model in evaluation mode on the dev splits of a task, in this process alone.

    `data` names the task as the user wrote it, such as rte or SST-2, and its folder. Predictions are kept if there is a
    folder for them. The result is that of the task's `TaskData.summary`.

    Raises:
        UserError: the task does not exist, the model has no head for it, or a file is missing or malformed.
    """
    task_type, key = find_benchmark(str(data.task.name), setting="data")
    task_type.check_folder(data.task.dir, key, setting="data_dir")
    head = HEADS[task_type.head]
    # The class tells what a model in memory is; its config still has that of the folder it was loaded from.
    if not type(model).__name__.endswith(head.endings[0]):
        raise UserError(
            f"model is a {type(model).__name__} without {head.title}: give one that is fine-tuned on "
            f"{task_type.title(key)}"
        )
    task_type.check_fine_tuned(model.config, key, named="model")
    with TemporaryDirectory() as scratch:
        settings = replace(data, task=replace(data.task, name=key), cache_dir=scratch)
        train, scoring = TrainConfig(micro_batch_size=batch_size), GenerationConfig(batch_size=batch_size)
        benchmark = task_type(RunConfig(ds_config="", data=settings, train=train, scoring=scoring), trains=False)
        benchmark.only_scores = True
        if task_type.head == "lm_head":  # the name of a class does not tell whether a model can write
            benchmark.check_model("model", "in memory", model.config)
        examples = benchmark.open_data(benchmark.store_tokens(tokenizer), tokenizer, model.config)
        scored = ScoredModel(
            model=model,
            tokenizer=tokenizer,
            predictions=Path(scratch) / "predictions" if predictions is None else predictions,
            sharded=False,
        )
        # In a distributed program of the user, every rank scores its own model: no rank waits for another.
        with World(rank=0, size=1, device=model.device).entered():
            return dict(examples.summary({name: examples.score_set(name, scored) for name in examples.sets}))


def describe_skipped_questions(places: Sequence[str], because: str) -> list[str]:
    """Return the warning about training questions that are left out, with the places of the first; none without any."""
    if not places:
        return []
    more = f" and {len(places) - 3:,} more" if len(places) > 3 else ""
    return [f"{len(places):,} training questions are skipped, because {because}: {', '.join(places[:3])}{more}"]
