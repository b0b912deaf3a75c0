"""Settings of fine-tuning on tasks: the trials, and the second stage of a run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

ProtocolName = Literal["makd", "minilmv2", "kroneckerbert", "custom"]

RowName = Literal["two_stages", "no_pretraining", "no_kd"]
"""The rows of KroneckerBERT Table 6."""


@dataclass(frozen=True, kw_only=True)
class GridConfig:
    """How a model is fine-tuned on a task, and which settings are tried."""

    data_dir: str | None = None
    """Folder with GLUE's own download, one folder for each task (RTE/train.tsv ...); default: the set on the hub."""
    protocol: ProtocolName = "makd"
    """The settings to try. makd: MaKD's four learning rates x 5 seeds (the paper does not give its epochs: 3 here);
    minilmv2: MiniLMv2's five learning rates x 3, 5 and 10 epochs (CoLA 25) x 4 seeds; kroneckerbert: KroneckerBERT's
    three learning rates x 5, 10 and 15 epochs (CoLA 15, 20, 30; the paper only gives the range), 1 seed; custom:
    2e-5, 3 epochs, 1 seed. All of them use batches of 32, 128 tokens, a warm-up of a tenth of the steps, and weight
    decay 0.01. The settings below override the protocol."""
    learning_rates: list[float] | None = None
    """Peak learning rates to try, separated by commas; the one with the best dev score is used."""
    epochs: list[int] | None = None
    """Numbers of epochs to try, separated by commas."""
    seeds: list[int] | None = None
    """Seeds of each setting, separated by commas, for the classifier's initial weights, data order and dropout."""
    batch_size: int | None = None
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: int | None = None
    """Sequences per rank and forward pass; default: the whole share of a rank at once."""
    max_length: int | None = None
    """Largest number of tokens of an example; the longer sentence is cut first."""
    warmup_ratio: float | None = None
    """Share of the steps in which the learning rate rises; in the other steps it falls linearly to 0."""
    weight_decay: float | None = None
    """AdamW's weight decay; biases and norms have no weight decay."""
    limit: int | None = None
    """Train only on the first so many training examples of each task, for a quick test."""
    copy_classifier: bool | None = None
    """Initialise the classifier from the fine-tuned teacher's classifier (KroneckerBERT §3.7) instead of random
    numbers. Default: with method kroneckerbert, if both classifiers have the same shape."""
    tsne_layer: int | None = None
    """Layer, counted from 1, whose output t-SNE draws; default: the middle layer of each model."""
    run_settings: dict[str, Any] = field(default_factory=dict)
    """Further settings of every run, by their keys in the configuration of a run (llmdistill train --help), such as
    {train.compile: true, student.lora.rank: 8, teacher.sharding: zero3, train.save_every: 200}."""

    prefix: ClassVar[str] = "--"
    """The text before the name of a setting as a user types it."""

    def __post_init__(self) -> None:
        """Raise a ValueError if a number is out of its range."""
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
    """The second stage of a run (KroneckerBERT §3.7): after the training on text the student is fine-tuned on tasks
    with fine-tuned teachers, in the folder `tasks` inside the run's folder."""

    names: list[str] = field(default_factory=list)
    """Tasks of GLUE such as rte, cola, sst2; without tasks there is no second stage."""
    rows: list[RowName] = field(default_factory=lambda: ["two_stages"])
    """The rows of KroneckerBERT Table 6 to run. two_stages: the trained student learns from the fine-tuned teacher;
    no_pretraining: the untrained student learns from it; no_kd: the trained student learns from the labels alone."""
    teacher: str | None = None
    """Fine-tuned teachers: the folder of an earlier run of eval/glue.py, a path with {task} in it, or, for one task,
    the folder of a model. Default: the run's own teacher is first fine-tuned on each task, with the same settings."""
    method: str | None = None
    """Method by which the student learns from the fine-tuned teacher; default: the run's method, and its `also`."""
    also: list[str] | None = None
    """Methods whose terms are added to those of `method`."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of a method that differ from the run's own, such as {kroneckerbert: {label: 1.0}}: a teacher without
    lm_head, for example, has no logits to learn from before it is fine-tuned."""
    tsne: bool = False
    """Draw the outputs of a layer for each task's dev set, for the teacher and each row (KroneckerBERT Figure 4)."""

    prefix: ClassVar[str] = "tasks."

    def __post_init__(self) -> None:
        """Raise a ValueError if a number is out of its range, there is no row, or a row occurs twice."""
        super().__post_init__()
        if not self.rows or len(set(self.rows)) < len(self.rows):
            raise ValueError(f"tasks.rows is {self.rows}: give two_stages, no_pretraining, no_kd, or some, each once")
