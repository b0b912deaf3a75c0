"""Settings of fine-tuning on tasks: the trials, the second stage of a run, and the command for benchmarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from llmdistill.config.marks import SHARE, at_least, distinct
from llmdistill.config.methods import MethodTable, check_names, with_teacher
from llmdistill.config.training import LEARNING_RATES
from llmdistill.errors import check_name

ProtocolName = Literal["makd", "minilm", "minilm_v1", "minilmv2", "kroneckerbert", "custom"]


@dataclass(frozen=True, kw_only=True)
class GridConfig:
    """How a model is fine-tuned on a task, and which settings are tried."""

    data_dir: str | None = None
    """Folder with a folder for each task: GLUE's own download (RTE/train.tsv ...), the files of SQuAD
    (squad2/train-v2.0.json ...), of MLQA (MLQA/test/test-context-de-question-de.json ...), and for MiniLM Table 10 of
    CoNLL-2000 (conll2000/train.txt); default: the hub, except for CoNLL-2000."""
    protocol: ProtocolName = "makd"
    """The settings to try. makd: MaKD's four learning rates x 5 seeds (the paper does not give its epochs: 3 here);
    minilm: MiniLM's four learning rates x 3, 4 and 5 epochs (CoLA, RTE and MRPC 10 too) x 4 seeds; minilm_v1: the same
    for its 12-layer student of an unpublished teacher (1.5e-5 for CoLA, RTE and MRPC);
    minilmv2: MiniLMv2's five learning rates x 3, 5 and 10 epochs (CoLA 25) x 4 seeds; kroneckerbert: KroneckerBERT's
    three learning rates x 5, 10 and 15 epochs (CoLA 15, 20, 30; the paper only gives the range), 1 seed; custom:
    2e-5, 3 epochs, 1 seed. All of them use batches of 32, 128 tokens, a warm-up of a tenth of the steps, and weight
    decay 0.01. SQuAD and MLQA have 384 tokens, and other settings where a paper gives them: minilm 6e-5 x 3 epochs for
    SQuAD 2.0 (minilm_v1 4e-5 in batches of 48), and four learning rates for MLQA (512 tokens) and XNLI (batches of
    128); minilmv2 four learning rates x 3 epochs (MLQA two, 512 tokens), kroneckerbert 1e-4 x 1, 7 and 14 epochs,
    batches of 64. Question generation, CNN/DailyMail and XSum have the settings of the recipes minilm/finetune-* and 1
    seed; minilm has the rates of the paper's students of 6 layers, all others those of 12 layers. The metric of the
    choice is that of the paper's table. The settings below override the protocol."""
    learning_rates: list[float] | None = field(default=None, metadata=LEARNING_RATES)
    """Peak learning rates to try, separated by commas; the one with the best dev score is used."""
    epochs: list[int] | None = field(default=None, metadata=distinct(1, ", all 1 or more"))
    """Numbers of epochs to try, separated by commas."""
    seeds: list[int] | None = field(default=None, metadata=distinct(0, ", none below 0"))
    """Seeds of each setting, separated by commas, for the classifier's initial weights, data order and dropout."""
    batch_size: int | None = field(default=None, metadata=at_least(1))
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: int | None = field(default=None, metadata=at_least(1))
    """Sequences per rank and forward pass; default: the whole share of a rank at once."""
    max_length: int | None = field(default=None, metadata=at_least(1))
    """Largest number of tokens of an example; the longer sentence is cut first. For questions, the tokens of a window
    of the context, with the question."""
    warmup_ratio: float | None = field(default=None, metadata=SHARE)
    """Share of the steps in which the learning rate rises; in the other steps it falls linearly to 0."""
    weight_decay: float | None = field(default=None, metadata=at_least(0))
    """AdamW's weight decay; biases and norms have no weight decay."""
    limit: int | None = field(default=None, metadata=at_least(1))
    """Train only on the first so many training examples of each task, for a quick test."""
    out_of_domain: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Sets of other data on which the fine-tuned models are scored too, as in data.task.out_of_domain of a run: {PAWS:
    {}, IMDb: {}, HANS: {}}."""
    copy_classifier: bool | None = None
    """Initialize the classifier from the fine-tuned teacher's classifier (KroneckerBERT §3.7) instead of random
    numbers. Default: with method kroneckerbert, if both classifiers have the same shape."""
    tsne_layer: int | None = field(default=None, metadata=at_least(1))
    """Layer, counted from 1, whose output t-SNE draws, read as kroneckerbert.ffn_output says; default: the middle
    layer of each model."""
    run_settings: dict[str, Any] = field(default_factory=dict)
    """Further settings of every run, by their keys in the configuration of a run (llmdistill train --help all), such as
    {train.compile: true, student.lora.rank: 8, teacher.sharding: zero3, train.save_every: 200}."""

    prefix: ClassVar[str] = "--"
    """The text before the name of a setting as a user types it."""

    def __post_init__(self) -> None:
        for name in self.out_of_domain:
            check_name(name, f"{self.prefix}out_of_domain")


@dataclass(frozen=True, kw_only=True)
class TasksConfig(GridConfig):
    """The second stage of a run (KroneckerBERT §3.7): after the training on text the student is fine-tuned on tasks
    with fine-tuned teachers, in the folder `tasks` inside the run's folder."""

    names: list[str] = field(default_factory=list)
    """Tasks such as rte, cola, sst2 and squad2; without tasks there is no second stage."""
    rows: list[Literal["two_stages", "no_pretraining", "no_kd"]] = field(
        default_factory=lambda: ["two_stages"],
        metadata=distinct(wanted=", of two_stages, no_pretraining and no_kd"),
    )
    """The rows of KroneckerBERT Table 6 to run. two_stages: the trained student learns from the fine-tuned teacher;
    no_pretraining: the untrained student learns from it; no_kd: the trained student learns from the labels alone."""
    teacher: str | None = None
    """Fine-tuned teachers: the folder of an earlier `llmdistill evaluate --suite glue`, a path with {task} in it, or,
    for one task, the folder of a model. Default: the run's own teacher is first fine-tuned on each task, with the same
    settings."""
    method: str | None = None
    """Method by which the student learns from the fine-tuned teacher; default: the run's method, and its `also`."""
    also: list[str] | None = None
    """Further methods, whose terms the run adds to those of `method`."""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings of a method that differ from the run's own, such as {kroneckerbert: {label: 1.0}}: a teacher without
    lm_head, for example, has no logits to learn from before it is fine-tuned."""
    tsne: bool = False
    """Draw the outputs of a layer for each task's dev set, for the teacher and each row (KroneckerBERT Figure 4)."""

    prefix: ClassVar[str] = "tasks."


@dataclass(frozen=True, kw_only=True)
class FineTuningConfig(GridConfig):
    """The model to fine-tune, the tasks, and the settings of the training."""

    model: str
    """Folder or hub name of the model: an encoder (dense, factorized or of a smaller shape) or a decoder."""
    teacher: str | None = None
    """Fine-tuned teachers to learn from: the folder of an earlier run of this command, a path with {task} in it, or,
    for one task, the folder of a model. Default: no teacher, only the labels."""
    baseline: str | None = None
    """Folder or hub name of a model to compare size and speed with; default: the first task's teacher."""
    tasks: list[str] | None = field(default=None, metadata=distinct(wanted=", such as rte,cola"))
    """Tasks, separated by commas, such as rte,cola,sst2 of GLUE, squad1, squad2 and mlqa; default: all nine of
    GLUE."""
    output_dir: str | None = None
    """Folder for all output; default: runs/glue/MODEL, with the name of the method added if there is a teacher."""
    ds_config: str = "zero1"
    """DeepSpeed configuration: a JSON file, or the name of one that ships with llmdistill."""
    method: str | None = None
    """sft: the labels alone; the other methods learn from the teacher, and their settings are under their names.
    Default: kd with a teacher, sft without. If a method does not use the logits, such as minilm and minilmv2, the
    loss on the labels is added."""
    also: list[str] = field(default_factory=list)
    """Further methods, whose terms the run adds to those of `method`; each has its settings under its name."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of forward and backward pass; auto is bf16 on a GPU that supports it, else fp32."""
    keep_models: bool = False
    """Keep the model of every run; by default only the best model of each task is kept."""
    trials_at_once: int = field(default=1, metadata=at_least(1))
    """Number of runs at the same time, each in its own process. The runs share the GPUs of the machine evenly (8 at
    once on 8 GPUs: one each), or its CPU cores if it has no GPU. With 1, the runs share this process."""
    speed: bool = True
    """Measure latency and throughput."""
    tsne: list[str] | None = field(default=None, metadata=distinct(wanted=", such as runs/glue/TEACHER"))
    """Draw the outputs of a layer for the dev set of each task (t-SNE, KroneckerBERT Figure 4): for the best model
    of this run and for those of earlier runs, such as the teacher's. Give the folders of the earlier runs, separated
    by commas."""
    method_settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of each method that has settings, by its name. Users write them under that name."""

    def methods(self) -> list[str]:
        """All methods of the run, the main method first."""
        default = "sft" if self.teacher is None else "kd"
        return [default if self.method is None else self.method, *self.also]

    def __post_init__(self) -> None:
        super().__post_init__()
        methods = self.methods()
        if "sft" in methods and self.also:
            raise ValueError(f"--also {self.also}: method sft has no teacher; make one of them the method")
        if methods != ["sft"] and self.teacher is None:
            raise ValueError(
                f"method {', '.join(methods)} needs a teacher: name fine-tuned ones with --teacher, or take method sft"
            )
        if self.copy_classifier and self.teacher is None:
            raise ValueError("--copy_classifier true: there is no teacher to copy it from; name one with --teacher")
        if len(set(methods)) < len(methods):
            raise ValueError(f"--also {self.also}, with method {methods[0]}: name each method once")

    def check_methods(self, known: MethodTable) -> None:
        """Raise a ValueError if a method is not in the table, or its settings do not work with fine-tuning."""
        teachers = with_teacher(known)
        check_names("method", self.methods()[:1], ["sft", *teachers])
        check_names("also", self.also, teachers)
        for name in self.methods():
            if known[name].searches_layer and self.method_settings[name].teacher_layer == "auto":
                raise ValueError(
                    f"--{name}.teacher_layer auto searches on a text, and there is none here: name a layer"
                )
