"""The interface of a task: its learning objective, its batches, and the scoring of a model.

Plan, trainer and reports call this interface and do not name any task.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.batch import Batch, Loader
from llmdistill.config import RunConfig
from llmdistill.data.sampler import Share, StepLoader, TrainLoader
from llmdistill.errors import UserError
from llmdistill.models.families import max_positions
from llmdistill.models.heads import HeadName
from llmdistill.objective import Objective
from llmdistill.runtime.distributed import on_every

VALID = "valid"
"""The name of the validation set in the scores and predictions of a run."""


@dataclass(frozen=True, kw_only=True)
class Models:
    """The two models of a run, described by their configurations."""

    teacher: PreTrainedConfig
    student: PreTrainedConfig
    teacher_path: Path
    """The folder of the teacher and its tokenizer."""
    tokenizer_path: Path
    """The folder of the student's tokenizer."""
    causal: bool
    """Whether the models are decoders."""
    objective: Objective


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in evaluation mode, as one rank sees it, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sharded: bool = False
    """Whether the model's forward pass needs every rank (ZeRO-3)."""


@dataclass(frozen=True, kw_only=True)
class ScoredModel(LoadedModel):
    """A model that is scored, and where its predictions go."""

    predictions: Path
    """The folder for the model's predictions (rank 0 writes them)."""


@dataclass(frozen=True, kw_only=True)
class ScoreTable:
    """The scores of a run's models as a table for reports."""

    title: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[str]]
    """The values of the columns for each model, by its key in metrics.json (teacher, untrained, student)."""
    legend: str
    """The explanation of the columns in report.md."""


@dataclass(frozen=True, kw_only=True)
class HeldOutQuestion:
    """A question with its answer in the data."""

    prompt_ids: list[int]
    prompt: str
    reference: str


class TaskData(ABC):
    """The examples of a task, read and checked: what `Task.read` returns. It makes batches, and scores models."""

    tokenizer: PreTrainedTokenizerBase
    """The tokenizer of the student."""
    report: str
    """One sentence about the training set; "" while the set is not known."""

    @property
    @abstractmethod
    def sets(self) -> Mapping[str, Mapping[str, Any]]:
        """The sets that models are scored on; each name maps to the settings on which the score depends."""

    def num_steps(self, epochs: int, global_batch_size: int) -> int:
        """Return the number of steps for `epochs` passes over the training set, rounded up."""
        raise AssertionError(f"the configuration allows no epochs for {type(self).__name__}")

    @abstractmethod
    def loader(self, share: Share) -> StepLoader[Any]:
        """Return the loader of a rank's training batches."""

    def teacher_examples(self) -> tuple[Sequence[Any], Callable[[list[Any]], Batch]]:
        """Return all examples for which a run needs the outputs of its teacher, and the function that collates them.

        Each has a `sample_id` and a length in tokens. Called only if the task has no `changing_examples`.
        """
        # Any share will do: only the examples and their collation are taken.
        loader = self.loader(Share(seed=0, global_batch_size=1, micro_batch_size=1))
        assert isinstance(loader, TrainLoader), f"{type(loader).__name__} makes its examples anew"
        return loader.items, loader.collate

    @abstractmethod
    def validation(self, share: Share) -> list[Batch]:
        """Return a rank's validation batches: the same number on every rank, none without a validation set."""

    def comparison_batches(self) -> tuple[list[Batch], str]:
        """Return unpacked batches on which students are compared with their teacher, and which set they come from.

        They are the same on every rank; none without a set to learn or to validate on.
        """
        share = Share(seed=0, global_batch_size=8, micro_batch_size=8)
        batches = self.validation(share)
        if batches:
            return batches, "data.valid"
        loader = self.loader(share)
        return [loader.collate(items) for items in loader.once(32)], "the training set"

    def held_out_questions(self) -> list[HeldOutQuestion]:
        """Return a few questions of those rows, whose answers show what a model can do; by default none."""
        return []

    def validation_score(self, scored: ScoredModel) -> float:
        """Return the `validation_metric` of a model during its training; every rank must call this method."""
        raise AssertionError(f"{type(self).__name__} has no validation score")

    def for_models(self, models: Models) -> TaskData:
        """Return the same examples for another run of the same command, for example the run of an assistant."""
        return self

    def prepare(self) -> TaskData:
        """Return the data ready for batches; every rank must call this method, and one rank does the slow work."""
        return self

    def teacher_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer with which the teacher is scored."""
        return self.tokenizer

    def teacher_prompts(self) -> dict[int, list[int]] | None:
        """Map the student's tokens of each prompt, and those between answers, to the teacher's, if tokenizers differ.

        The keys are those of `parts_before`. None if the sequences are plain text. Called only if the task
        `translates`.
        """
        raise AssertionError(f"{type(self).__name__} has one tokenizer for both models")

    def score_set(self, name: str, scored: ScoredModel) -> dict[str, Any]:
        """Return the score of a model on one of `sets` as plain JSON values; every rank must call this method."""
        raise AssertionError(f"{type(self).__name__} has no sets")

    def summary(self, scores: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the entry of a model in metrics.json, from its score on each of `sets`."""
        return {}

    def sentence(self, model: str, summary: Mapping[str, Any]) -> str:
        """Return a model's summary for the terminal, such as `ROUGE-L of the teacher: seen 97.8`."""
        raise AssertionError(f"{type(self).__name__} has no sets")

    def warnings(self, teacher: Mapping[str, Any] | None) -> list[str]:
        """Return warnings about the data, or the teacher with this summary (None if the teacher is not scored)."""
        return []

    def end_warnings(self, summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return warnings about a trained student, from the summaries of the scored models."""
        return []

    def results(
        self, summaries: Mapping[str, dict[str, Any]], log: Sequence[Mapping[str, float]], sizes: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Return the entries of metrics.json by model; by default these are the summaries of the scored models.

        `log` holds the rows of metrics.jsonl, and `sizes` has `teacher_params` and `student_params`.
        """
        return dict(summaries)

    @abstractmethod
    def table(self, results: Mapping[str, Mapping[str, Any]]) -> ScoreTable:
        """Return the results as a table."""

    def after_training(self, loader: Loader) -> str | None:
        """Return a sentence about the training set that is only known after training; None if there is none."""
        return None


class Task(ABC):
    """The task of a run, from the configuration alone: what it learns, which models it needs; `read` reads its data."""

    head: ClassVar[HeadName | None] = None
    """The head that the models need for the task; None if the terms of the loss determine the head."""
    validates_labels: ClassVar[bool] = False
    """Whether the validation loss is the cross-entropy on the labels for every method; else it is the method's loss."""
    validation_metric: ClassVar[str | None] = None
    """The name of the score of the validation set, which is better the larger it is; None if only a loss is measured on
    it."""
    translates: ClassVar[bool] = False
    """Whether the teacher of decoders may have another tokenizer than the student."""
    scored: tuple[str, ...] = ("teacher", "untrained", "student")
    """The models that can be scored on the task."""

    def __init__(self, config: RunConfig, *, trains: bool = True, teacher_writes: bool = False) -> None:
        """Save the settings, see `make_task`; a task may check its own settings.

        Raises:
            UserError: the settings of the task are invalid.
        """
        if self.validation_metric is not None and VALID in config.data.tests:
            raise UserError(
                f"data.tests.{VALID}: that name is the validation set's (data.{VALID}); call the test set other"
            )
        self.config = config
        self.trains = trains
        self.teacher_writes = teacher_writes

    @property
    def hub(self) -> str | None:
        """The name of the data set that a task of that name reads from the hub; None for a task of the user's data."""
        return None

    @property
    def num_outputs(self) -> int | None:
        """The number of outputs of the classifier; None if the task has no classifier."""
        return None

    @property
    def rows_per_example(self) -> int:
        """The number of a batch's sequences that an example of training has."""
        return 1

    def changing_examples(self, *, causal: bool) -> str | None:
        """Return why the examples of decoders (`causal`) or encoders change during training, as a clause.

        None if there is a list of examples that are the same in every epoch.
        """
        return None

    def check_model(self, key: str, reference: str, config: PreTrainedConfig) -> None:
        """Check the configuration of the model `reference`, the value of the setting `key`.

        Raises:
            UserError: a model of this kind cannot learn or teach the task.
        """
        return

    def check_positions(self, key: str, reference: str, config: PreTrainedConfig) -> None:
        """Check that the model `reference`, the value of the setting `key`, has a position for each token.

        Raises:
            UserError: data.max_length is beyond the model's positions.
        """
        length = self.config.data.max_length
        positions = max_positions(config, length)
        if positions < length:
            raise UserError(
                f"data.max_length is {length}, but {key} {reference} has positions for {positions}; give that or less"
            )

    @abstractmethod
    def objective(self, teacher: PreTrainedConfig, *, uses_output: bool) -> Objective:
        """Return the learning objective; `uses_output` tells whether the method uses the outputs of the models.

        Raises:
            UserError: the settings need a part that the architecture does not have.
        """

    def configure(self, model: PreTrainedModel) -> None:
        """Set the meaning of a model's outputs in its configuration."""
        return

    def check_files(self, *, thorough: bool = True) -> None:
        """Check that the files of the data exist and that their rows are well-formed.

        Only the first row of a file is checked; if `thorough`, as many rows as a second or two allow.

        Raises:
            UserError: a file does not exist, or a row is malformed.
        """
        return

    @abstractmethod
    def read(self, models: Models) -> TaskData:
        """Read and check every file, and the tokenizers.

        Raises:
            UserError: a file is missing or malformed, or examples do not fit the models.
        """

    def read_on_all(self, models: Models) -> TaskData:
        """Read the examples for every rank, as `read` does for one process; every rank must call this method.

        Raises:
            UserError: on every rank, if `read` raises it on one.
        """
        return on_every(lambda: self.read(models))
