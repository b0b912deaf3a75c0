"""What a task is: what is learnt, how its examples become batches, and how a model is scored on it.

A task is a class in a file of its own and an entry in `tasks.TASKS`. Everything above it (plan, trainer, reports) asks
it and names none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.batch import Batch, Loader
from llmdistill.config import RunConfig
from llmdistill.models.load import Head
from llmdistill.objective import Objective
from llmdistill.runtime.distributed import World


@dataclass(frozen=True, kw_only=True)
class Models:
    """The two models of a run, as far as their configurations tell."""

    teacher: PreTrainedConfig
    student: PreTrainedConfig
    teacher_path: Path
    """Where the teacher and its tokenizer are."""
    tokenizer_path: Path
    """Where the student's tokenizer is."""
    causal: bool
    """Whether they are decoders."""
    objective: Objective


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of the batches is this rank's."""

    seed: int
    global_batch_size: int
    micro_batch_size: int
    rank: int
    world_size: int


@dataclass(frozen=True, kw_only=True)
class ScoreTable:
    """The scores of a run's models as a reader sees them."""

    title: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[str]]
    """The columns' values of each model, by its key in metrics.json (teacher, untrained, student)."""
    legend: str
    """What the columns are, for report.md."""


class TaskData(ABC):
    """The examples of a task, read and checked."""

    tokenizer: PreTrainedTokenizerBase
    """The student's."""
    report: str
    """One sentence on the training set; "" while it is not known."""

    @property
    @abstractmethod
    def sets(self) -> Mapping[str, Mapping[str, Any]]:
        """The sets that models are scored on: by name, what else than the model the score depends on."""

    @abstractmethod
    def num_steps(self, epochs: int, global_batch_size: int) -> int:
        """Steps of so many passes over the training set, rounded up."""

    @abstractmethod
    def loader(self, share: Share) -> Loader:
        """The training batches of a rank."""

    @abstractmethod
    def validation(self, share: Share) -> list[Batch]:
        """A rank's share of the validation batches: as many as every other rank has, none without a validation set."""

    def of(self, models: Models) -> TaskData:
        """The same examples for another run of the command, such as that of an assistant."""
        return self

    def prepared(self, world: World) -> TaskData:
        """The same data ready for batches; every rank must call it, and one of them does what takes long."""
        return self

    def teacher_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that the teacher is scored with."""
        return self.tokenizer

    def score_set(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        predictions: Path,
        world: World,
        *,
        sharded: bool,
    ) -> dict[str, Any]:
        """Score a model on one of `sets`; every rank must call it.

        Args:
            name: of the set.
            model: in evaluation mode.
            tokenizer: of the model.
            predictions: folder that keeps the model's predictions (rank 0 writes them).
            world: this process.
            sharded: whether the model's forward pass needs every rank (ZeRO-3).

        Returns:
            the score as plain JSON values.
        """
        raise AssertionError(f"{type(self).__name__} has no sets")

    def summary(self, scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """What metrics.json says of a model, from its score on each of `sets`."""
        return {}

    def sentence(self, model: str, summary: Mapping[str, Any]) -> str:
        """A model's summary for the terminal, such as `ROUGE-L of the teacher: seen 97.8`."""
        raise AssertionError(f"{type(self).__name__} has no sets")

    def warnings(self, teacher: Mapping[str, Any] | None) -> list[str]:
        """What a user should know of the data, or of a teacher with this summary (None where it is not scored)."""
        return []

    def results(
        self, summaries: Mapping[str, dict[str, Any]], log: Sequence[Mapping[str, float]], sizes: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """The entries of metrics.json by model: the summaries, or what stands in their place.

        Args:
            summaries: of the models that were scored.
            log: the rows of metrics.jsonl.
            sizes: with `teacher_params` and `student_params`.
        """
        return dict(summaries)

    @abstractmethod
    def table(self, results: Mapping[str, Mapping[str, Any]]) -> ScoreTable:
        """The results as a table."""

    def after_training(self, loader: Loader) -> str | None:
        """A sentence on the training set that is known only after training."""
        return None


class Task(ABC):
    """What is learnt. It is made of the configuration alone; `read` reads the examples."""

    head: ClassVar[Head | None] = None
    """The head that models need for the task; None where the terms of the loss say it."""
    validates_labels: ClassVar[bool] = False
    """Whether the validation loss is the cross-entropy on the labels, whatever the method; else it is the method's."""
    scored: ClassVar[tuple[str, ...]] = ("teacher", "untrained", "student")
    """The models that can be scored on it."""

    def __init__(self, config: RunConfig, *, trains: bool = True, teacher_writes: bool = False) -> None:
        """Take the settings; a task may check its own.

        Args:
            config: the run.
            trains: whether the run learns, and does not only score.
            teacher_writes: whether the training set is to be the teacher's own answers.

        Raises:
            UserError: the task's settings are wrong.
        """
        self.config = config
        self.trains = trains
        self.teacher_writes = teacher_writes

    @property
    def num_outputs(self) -> int | None:
        """Outputs of a classifier; None where there is none."""
        return None

    def check_model(self, key: str, reference: str, config: PreTrainedConfig) -> None:
        """Check a model's configuration.

        Args:
            key: the setting that names the model.
            reference: its value.
            config: the model's configuration.

        Raises:
            UserError: such a model cannot learn or teach the task.
        """
        return

    @abstractmethod
    def objective(self, teacher: PreTrainedConfig, *, uses_output: bool) -> Objective:
        """What the batches have to be learnt.

        Args:
            teacher: the teacher's configuration.
            uses_output: whether a term of the method looks at the models' outputs.

        Raises:
            UserError: the settings ask for what the architecture does not have.
        """

    def configure(self, model: PreTrainedModel) -> None:
        """Write into a model's configuration what its outputs mean."""
        return

    @abstractmethod
    def read(self, models: Models) -> TaskData:
        """Read and check every file, and the tokenizers.

        Raises:
            UserError: a file is missing or malformed, or examples do not fit the models.
        """
