"""Every setting of a run: typed, keyword-only, frozen. The docstring under a field is its help text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from llmdistill.config.data import DataConfig, TextConfig
from llmdistill.config.methods import (
    DistilbertConfig,
    KdConfig,
    KroneckerbertConfig,
    MakdConfig,
    MinilmConfig,
    Minilmv2Config,
    SearchConfig,
    TeacherMethod,
    TinybertConfig,
)
from llmdistill.config.scoring import GenerationConfig
from llmdistill.config.student import FactorizeConfig, LoraConfig, StudentConfig, TeacherConfig
from llmdistill.config.tasks import TasksConfig
from llmdistill.config.training import TrainConfig

__all__ = [
    "DataConfig",
    "DistilbertConfig",
    "FactorizeConfig",
    "GenerationConfig",
    "KdConfig",
    "KroneckerbertConfig",
    "LoraConfig",
    "MakdConfig",
    "MinilmConfig",
    "Minilmv2Config",
    "RunConfig",
    "SearchConfig",
    "StudentConfig",
    "TasksConfig",
    "TeacherConfig",
    "TeacherMethod",
    "TextConfig",
    "TinybertConfig",
    "TrainConfig",
]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: teacher, student, data, method, optimisation, scoring."""

    ds_config: str
    """DeepSpeed configuration: a JSON file, or one that ships by its name, such as zero2. Where it says "auto", this
    configuration decides."""
    output_dir: str | None = None
    """Folder of the run; without it runs/<recipe>-<ds_config>."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue where the folder's last checkpoint stands; never: stop if the folder holds a run already."""
    seed: int = 0
    """Seed of the data order and of everything random in training."""
    method: Literal[
        "makd", "kd", "minilm", "minilmv2", "distilbert", "tinybert", "kroneckerbert", "sft", "seqkd", "none"
    ] = "makd"
    """makd: the depth-partitioned losses set under makd; kd: the output's divergence set under kd; minilm, minilmv2,
    distilbert, tinybert, kroneckerbert: as set under their names; sft: cross-entropy on the labels alone, without
    teacher; seqkd: sft on answers that the teacher wrote (data.train is what `llmdistill generate` made of the training
    set); none: no training, only scores."""
    also: list[TeacherMethod] = field(default_factory=list)
    """Methods whose terms are added to those of `method`, each as set under its name."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """Teacher."""
    student: StudentConfig = field(default_factory=StudentConfig)
    """Student."""
    data: DataConfig = field(default_factory=DataConfig)
    """Data."""
    makd: MakdConfig = field(default_factory=MakdConfig)
    """MaKD, where method is makd."""
    kd: KdConfig = field(default_factory=KdConfig)
    """The output's divergence, where method is kd."""
    minilm: MinilmConfig = field(default_factory=MinilmConfig)
    """MiniLM, where method is minilm."""
    minilmv2: Minilmv2Config = field(default_factory=Minilmv2Config)
    """MiniLMv2, where method is minilmv2."""
    distilbert: DistilbertConfig = field(default_factory=DistilbertConfig)
    """DistilBERT, where method is distilbert."""
    tinybert: TinybertConfig = field(default_factory=TinybertConfig)
    """TinyBERT, where method is tinybert."""
    kroneckerbert: KroneckerbertConfig = field(default_factory=KroneckerbertConfig)
    """KroneckerBERT, where method is kroneckerbert."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Training."""
    scoring: GenerationConfig = field(default_factory=GenerationConfig)
    """Scoring."""
    tasks: TasksConfig = field(default_factory=TasksConfig)
    """The second stage, on tasks."""

    def __post_init__(self) -> None:
        """Refuse what no run can do.

        Raises:
            ValueError: a number is out of its range.
        """
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}: give 0 or more")
        if self.data.on_policy > 0 and self.method not in ("makd", "kd"):
            raise ValueError(
                f"data.on_policy is {self.data.on_policy}, but method {self.method} learns from given answers: "
                "the student's own need a teacher to judge them (makd or kd)"
            )
        if self.method == "kd" and self.data.on_policy == 1 and self.kd.ratio < 1:
            raise ValueError("data.on_policy 1 leaves no labels to learn, but kd.ratio keeps some: set kd.ratio to 1")
        if self.train.epochs is not None and self.data.kind != "text":
            raise ValueError("train.epochs counts passes over a text, but data.kind is instructions: give train.steps")
        self._check_methods()
        self._check_shapes()

    def methods(self) -> list[str]:
        """All methods whose terms the student learns by."""
        return [self.method, *self.also]

    def _check_methods(self) -> None:
        if self.also and self.method in ("sft", "seqkd", "none"):
            raise ValueError(
                f"also is {self.also}, but method {self.method} has no teacher: make one of them the method"
            )
        if len(set(self.methods())) < len(self.methods()):
            raise ValueError(f"also is {self.also}, with method {self.method}: name each method once")
        if self.data.kind == "text":
            if self.method == "seqkd":
                raise ValueError("method seqkd learns answers, but data.kind is text: take kd, or instructions")
            if "minilmv2" in self.methods() and self.minilmv2.teacher_layer == "auto" and self.data.valid is None:
                raise ValueError("minilmv2.teacher_layer auto scores its candidates on data.valid: name a text there")
        elif self.minilmv2.teacher_layer == "auto":
            raise ValueError("minilmv2.teacher_layer auto searches on a text: set data.kind to text, or name a layer")

    def _check_shapes(self) -> None:
        if self.student.model is not None and (self.student.shape is not None or self.student.assistants):
            raise ValueError("student.model is a student made before: leave student.shape and student.assistants out")
        if self.student.assistants and self.student.shape is None:
            raise ValueError("student.assistants come before a student with a shape: give student.shape")
        if self.student.assistants and self.method in ("sft", "seqkd", "none"):
            raise ValueError(f"student.assistants teach, but method {self.method} has no teacher: leave them out")
