"""Fine-tuning on tasks: what is tried, and the second stage of a run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

ProtocolName = Literal["makd", "minilmv2", "kroneckerbert", "custom"]

RowName = Literal["two_stages", "no_pretraining", "no_kd"]
"""Rows of KroneckerBERT Table 6."""


@dataclass(frozen=True, kw_only=True)
class GridConfig:
    """How a model is fine-tuned on a task, and which settings are tried."""

    data_dir: str | None = None
    """GLUE's own download, with a folder a task (RTE/train.tsv ...); without it the hub's."""
    protocol: ProtocolName = "makd"
    """What is tried. makd: MaKD's four learning rates x 5 seeds (the paper does not say its epochs: 3 here); minilmv2:
    MiniLMv2's five learning rates x 3, 5 and 10 epochs (CoLA 25) x 4 seeds; kroneckerbert: KroneckerBERT's three
    learning rates x 5, 10 and 15 epochs (CoLA 15, 20, 30; the paper only gives the range), 1 seed; custom: 2e-5, 3
    epochs, 1 seed. All of them: batches of 32, 128 tokens, a tenth of the steps warm-up, weight decay 0.01. The
    settings below win over it."""
    learning_rates: list[float] | None = None
    """Peak learning rates to try, separated by commas; the best on dev is taken."""
    epochs: list[int] | None = None
    """Numbers of epochs to try, separated by commas."""
    seeds: list[int] | None = None
    """Seeds of each setting, separated by commas: of the classifier's first weights, the data order and dropout."""
    batch_size: int | None = None
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: int | None = None
    """Sequences per rank and forward pass; without it the whole share of a rank at once."""
    max_length: int | None = None
    """Tokens of an example; the longer sentence is cut first."""
    warmup_ratio: float | None = None
    """Share of the steps in which the learning rate rises; it falls linearly to 0 in the rest."""
    weight_decay: float | None = None
    """AdamW's weight decay; biases and norms have none."""
    limit: int | None = None
    """Learn only the first so many training examples of each task, for a quick look."""
    copy_classifier: bool | None = None
    """Start the classifier as the fine-tuned teacher's (KroneckerBERT §3.7) in place of random numbers. Default: with
    method kroneckerbert, where both have the same shape."""
    tsne_layer: int | None = None
    """Layer, from 1, whose output t-SNE draws; default: the middle one of each model."""
    run_settings: dict[str, Any] = field(default_factory=dict)
    """Further settings of every run by their keys in a run's configuration (llmdistill train --help), such as
    {train.compile: true, student.lora.rank: 8, teacher.sharding: zero3, train.save_every: 200}."""

    prefix: ClassVar[str] = "--"
    """What stands before a setting's name where a user types it."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: a number is out of its range.
        """
        for key in ("batch_size", "micro_batch_size", "max_length", "limit", "tsne_layer"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{self.prefix}{key} {value}: give 1 or more")
        if self.warmup_ratio is not None and not 0 <= self.warmup_ratio <= 1:
            raise ValueError(f"{self.prefix}warmup_ratio {self.warmup_ratio}: give a share between 0 and 1")
        if self.weight_decay is not None and self.weight_decay < 0:
            raise ValueError(f"{self.prefix}weight_decay {self.weight_decay}: give 0 or more")
        self._check_list("learning_rates", self.learning_rates, wanted="all over 0", over=0)
        self._check_list("epochs", self.epochs, wanted="all 1 or more", least=1)
        self._check_list("seeds", self.seeds, wanted="none below 0", least=0)

    def _check_list(
        self,
        key: str,
        values: Collection[Any] | None,
        *,
        wanted: str,
        least: float | None = None,
        over: float | None = None,
    ) -> None:
        if values is None:
            return
        fits = all((least is None or value >= least) and (over is None or value > over) for value in values)
        if not values or len(set(values)) < len(values) or not fits:
            raise ValueError(f"{self.prefix}{key} {list(values)}: give one or more, each once, {wanted}")


@dataclass(frozen=True, kw_only=True)
class TasksConfig(GridConfig):
    """The second stage of a run (KroneckerBERT §3.7): when the student has learnt from the text, it is fine-tuned on
    tasks with fine-tuned teachers, in the folder `tasks` of the run's."""

    names: list[str] = field(default_factory=list)
    """Tasks of GLUE such as rte, cola, sst2; without any there is no second stage."""
    rows: list[RowName] = field(default_factory=lambda: ["two_stages"])
    """Which rows of KroneckerBERT Table 6 are run. two_stages: the trained student learns from the fine-tuned teacher;
    no_pretraining: the untrained student does; no_kd: the trained student learns the labels alone."""
    teacher: str | None = None
    """Fine-tuned teachers: the folder of an earlier run of eval/glue.py, a path with {task} in it, or, for one task, a
    model's folder. Without it the run's own teacher is fine-tuned on each task first, by the same settings."""
    method: str | None = None
    """What the student learns by from the fine-tuned teacher; default: the run's method, and its `also`."""
    also: list[str] | None = None
    """Methods whose terms are added."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of a method that differ from the run's own, such as {kroneckerbert: {label: 1.0}}: a teacher without
    language-model head has no output to learn from before it is fine-tuned."""
    tsne: bool = False
    """Draw what a layer makes of each task's dev set, for the teacher and each row (KroneckerBERT Figure 4)."""

    prefix: ClassVar[str] = "tasks."

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: a number is out of its range, no row, or one twice.
        """
        super().__post_init__()
        if not self.rows or len(set(self.rows)) < len(self.rows):
            raise ValueError(f"tasks.rows is {self.rows}: give two_stages, no_pretraining, no_kd, or some, each once")
