"""What a study of fine-tuning asks of a task: its title, its metrics on dev, and the models that are fine-tuned on it.

Such a task is a class of `Benchmark`. One class may serve several tasks, which differ in their names.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from llmdistill.batch import Batch
from llmdistill.config import DataConfig, RunConfig, TaskConfig
from llmdistill.data.columns import SplitWriter, StoredSplits
from llmdistill.data.sampler import Share
from llmdistill.errors import UserError
from llmdistill.models.families import max_positions
from llmdistill.models.load import Head
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.runtime.distributed import World, on_every
from llmdistill.runtime.turns import made_once
from llmdistill.tasks import task_class, task_key
from llmdistill.tasks.base import Models, ScoredModel, ScoreTable, Task, TaskData
from llmdistill.tasks.stored import store_task

_NAMED = 3
"""The number of skipped questions that a warning names."""


class TaskExamples(Protocol):
    """The examples of a task with text."""

    def parts(self) -> Iterable[object]:
        """Yield all that identifies them, whose `repr` shows their content."""
        ...


class BenchmarkData(TaskData):
    """The examples of a benchmark."""

    table_title: ClassVar[str] = "Dev sets x 100"
    decimals: ClassVar[int] = 1
    """The decimals of the scores in `table`."""

    @property
    @abstractmethod
    def metrics(self) -> Sequence[str]:
        """The metrics of each column; settings are chosen by the first one."""

    @property
    def shown(self) -> Sequence[str]:
        """The metrics of each column that the table of a study shows."""
        return self.metrics[:1]

    @property
    @abstractmethod
    def main_column(self) -> str:
        """The column that stands for the task in an average over tasks."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """The first metric of the best constant answer to the dev split, from 0 to 100."""

    @property
    @abstractmethod
    def sizes(self) -> Mapping[str, int]:
        """The number of examples of each split, `train` first."""

    @property
    def submissions(self) -> Mapping[str, str]:
        """The name of the file for a benchmark's server by test split; empty without such a split."""
        return {}

    def submit(self, split: str, scored: ScoredModel, path: Path) -> None:
        """Write the file of one of `submissions`; every rank must call this method."""
        raise AssertionError(f"{type(self).__name__} has no test split")

    def validation(self, share: Share) -> list[Batch]:
        """See TaskData: no batches, because dev is scored by the metrics of the task."""
        return []

    def metric_name(self, metric: str) -> str:
        """Return the name of a metric in sentences and tables."""
        return metric

    def sentence(self, model: str, summary: Mapping[str, Any]) -> str:
        """See TaskData: every metric of every column."""
        shown = "  ".join(
            f"{column} {self.metric_name(metric)} {value:.2f}"
            for column, metrics in summary["dev"].items()
            for metric, value in metrics.items()
        )
        return f"Dev scores of the {model}: {shown}"

    @abstractmethod
    def legend(self) -> str:
        """Return what the columns of `table` are."""

    def table(self, results: Mapping[str, Mapping[str, Any]]) -> ScoreTable:
        """See TaskData: every metric of every column."""
        dev = next(iter(results.values()))["dev"] if results else {}
        columns = [(column, metric) for column, metrics in dev.items() for metric in metrics]
        return ScoreTable(
            title=self.table_title,
            columns=[f"{column} {self.metric_name(metric)}" for column, metric in columns],
            rows={
                name: [f"{result['dev'][column][metric]:.{self.decimals}f}" for column, metric in columns]
                for name, result in results.items()
            },
            legend=self.legend(),
        )


class Benchmark(Task):
    """A task with labels, a dev split and metrics, on which a model with a new head is fine-tuned."""

    scored = ("teacher", "student")
    head: ClassVar[Head]
    usual_length: ClassVar[int]
    """The usual maximum number of tokens of an example."""
    has_classes: ClassVar[bool] = True
    """Whether the targets are classes or scores of whole examples, which a figure may color."""

    def __init__(self, config: RunConfig, *, trains: bool = True, teacher_writes: bool = False) -> None:
        """Find the task and its files; raise UserError if there is none."""
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
    def check_folder(cls, folder: str | None, key: str, *, setting: str) -> None:
        """Check that a folder has the files of a task; None is the data set on the hub.

        Raises:
            UserError: the folder or a file does not exist; the message names the setting.
        """

    @classmethod
    def check_further(cls, asked: Mapping[str, Mapping[str, Any]], key: str) -> None:
        """Check the sets of other data on which models are scored too (data.task.out_of_domain), and that they exist.

        Only a task with classes has such sets.

        Raises:
            UserError: a setting is missing or does not fit, or a file does not exist.
        """

    @classmethod
    @abstractmethod
    def check_fine_tuned(cls, config: PreTrainedConfig, key: str, *, named: str) -> None:
        """Check by its config that a model is fine-tuned on a task.

        Raises:
            UserError: it has another head; the message contains `named`.
        """

    @classmethod
    @abstractmethod
    def fine_tuned(cls, config: PreTrainedConfig, key: str) -> PreTrainedConfig:
        """Return the config that a model will have once it is fine-tuned on a task."""

    def read(self, models: Models) -> BenchmarkData:
        """See Task. The examples are kept on disk, where the next run finds them."""
        return self.opened(StoredSplits(self._stored(models)), models)

    def read_on_all(self, models: Models, world: World) -> BenchmarkData:
        """See Task. Rank 0 reads and tokenizes the examples, and all ranks map their tokens."""
        folder = made_once(lambda: self._stored(models), world)
        return on_every(lambda: self.opened(StoredSplits(folder), models), world)

    def _stored(self, models: Models) -> Path:
        return store_task(self, load_tokenizer(models.tokenizer_path))

    @abstractmethod
    def read_files(self) -> TaskExamples:
        """Read every file of the task, or its data set on the hub, without a model.

        Raises:
            UserError: a file is missing or malformed.
        """

    @abstractmethod
    def paths(self) -> Sequence[Path] | None:
        """Return the files that `read_files` reads; None if it reads a data set of the hub.

        Raises:
            UserError: a file is missing.
        """

    @abstractmethod
    def decides(self) -> Mapping[str, Any]:
        """Return the settings on which the examples and their tokens depend, beside the task and its files."""

    @abstractmethod
    def write(self, files: Any, tokenizer: PreTrainedTokenizerBase, writer: SplitWriter) -> dict[str, Any]:
        """Tokenize what `read_files` has read, and write it; return what `opened` needs beside it as plain JSON values.

        Raises:
            UserError: the examples cannot be tokenized.
        """

    @abstractmethod
    def opened(self, stored: StoredSplits, models: Models) -> BenchmarkData:
        """Return the examples that `write` has written, for a run.

        Raises:
            UserError: an example has more tokens than a model has positions.
        """

    @abstractmethod
    def dev_data(self, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, batch_size: int) -> BenchmarkData:
        """Read the dev split for scoring a model in memory.

        Raises:
            UserError: a file is missing or malformed, or an example does not fit the model.
        """


def benchmark_class(key: str) -> type[Benchmark]:
    """Return the class of a task in `tasks.TASKS`, without the tasks that are kinds of data (instructions, text)."""
    found = task_class(key)
    assert issubclass(found, Benchmark), f"{key} is no benchmark"
    return found


def find_benchmarks(names: Iterable[str], *, setting: str) -> list[str]:
    """Return the titles of the tasks that the user typed (rte, sst2, squad2) as a setting.

    Raises:
        UserError: a task does not exist, or is named twice.
    """
    keys = [task_key(name, key=setting) for name in names]
    found = [benchmark_class(key).title(key) for key in keys]
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{setting}: {twice} is named twice; name each task once")
    return found


def named_benchmark(title: str) -> tuple[type[Benchmark], str]:
    """Return the class of a task and its key in `tasks.TASKS` by its title."""
    key = task_key(title)
    return benchmark_class(key), key


def check_data(config: RunConfig, settings: TaskConfig, key: str) -> None:
    """Read the files of a task, which hours of distillation may come before.

    Raises:
        UserError: a file is missing or malformed.
    """
    data = DataConfig(kind="task", task=replace(settings, name=key))
    cast(Benchmark, benchmark_class(key)(replace(config, data=data), trains=False)).read_files()


def check_positions(config: PreTrainedConfig, task: str, lengths: Iterable[int], max_length: int) -> None:
    """Check that a model has a position for each token of the examples; the lengths are read only if it may lack one.

    Raises:
        UserError: an example has more tokens than the model has positions.
    """
    positions = max_positions(config, max_length)
    if positions == max_length:
        return
    longest = max(lengths)
    if longest > positions:
        raise UserError(
            f"data.max_length is {max_length}: an example of {task} has {longest} tokens, but a model has "
            f"positions for {positions}; give {positions} or less"
        )


def skipped_questions(places: Sequence[str], because: str) -> list[str]:
    """Return the warning about training questions that are left out, with the places of the first; none without any."""
    if not places:
        return []
    more = f" and {len(places) - _NAMED:,} more" if len(places) > _NAMED else ""
    return [f"{len(places):,} training questions are skipped, because {because}: {', '.join(places[:_NAMED])}{more}"]
