"""All settings of a run, in typed, keyword-only, frozen dataclasses. The docstring under a field is its help text."""

# ruff: noqa: F401  # the sections of a run are imported from here

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from llmdistill.config.data import DataConfig, TaskConfig, TextConfig, WritingConfig
from llmdistill.config.generation import GenerationConfig, ResponseConfig
from llmdistill.config.marks import COMMON, FREE, at_least, replaces
from llmdistill.config.methods import MethodTable, check_names, with_teacher
from llmdistill.config.student import CalibrationConfig, FactorizeConfig, LoraConfig, StudentConfig
from llmdistill.config.tasks import TasksConfig
from llmdistill.config.teacher import OneTeacher, TeacherConfig
from llmdistill.config.training import NEAR_RATE, USUAL_RATE, TrainConfig

DEFAULT_DS_CONFIG = "ds_configs/zero2.json"
"""The DeepSpeed configuration of a run that does not name one."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: teacher, student, data, method, training, scoring."""

    ds_config: str = field(default=DEFAULT_DS_CONFIG, metadata=FREE | COMMON)
    """DeepSpeed configuration: a JSON file, or the name of one that ships with llmdistill, such as zero2. The
    settings of the run replace its "auto" values."""
    output_dir: str | None = field(default=None, metadata=FREE | COMMON)
    """Folder of the run; default: runs/<recipe>-<ds_config>, and runs/own-<ds_config> without a recipe."""
    resume: Literal["auto", "never"] = field(default="auto", metadata=FREE)
    """auto: continue from the last checkpoint in the folder; never: stop if the folder already holds a run."""
    seed: int = field(default=0, metadata=at_least(0))
    """Seed of the data order and of all random numbers in training."""
    method: str = field(
        default="makd",
        metadata=COMMON | replaces("also", by=("sft",)),
    )
    """The training method; its settings are under its name."""
    also: list[str] = field(default_factory=list)
    """Further methods, whose terms the run adds to those of `method`; each has its settings under its name."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """The teacher."""
    student: StudentConfig = field(default_factory=StudentConfig)
    """The student."""
    data: DataConfig = field(default_factory=DataConfig)
    """The data."""
    method_settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of each method that has any, by its name. Users write them under that name, as a section."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Training."""
    scoring: GenerationConfig = field(default_factory=GenerationConfig, metadata=FREE)
    """Scoring."""
    tasks: TasksConfig = field(default_factory=TasksConfig, metadata=FREE)
    """The second stage: fine-tuning on tasks."""

    def __post_init__(self) -> None:
        if len(set(self.methods())) < len(self.methods()):
            raise ValueError(f"also is {self.also}, with method {self.method}: name each method once")
        if self.student.assistant_training and not self.student.assistants:
            raise ValueError("student.assistant_training is for assistants: give student.assistants too")

    def methods(self) -> list[str]:
        """Return the names of all methods whose terms train the student."""
        return [self.method, *self.also]

    def has(self, method: str, **values: Any) -> bool:
        """Return whether a method trains the student with these values of its settings."""
        own = self.method_settings.get(method)
        return method in self.methods() and all(getattr(own, key, None) == value for key, value in values.items())

    def with_settings(self, method: str, **changes: Any) -> RunConfig:
        """Return the same run with some settings of a method changed."""
        changed = replace(self.method_settings[method], **changes)
        return replace(self, method_settings={**self.method_settings, method: changed})

    def with_learning_rate(self) -> RunConfig:
        """Return the same run with its default learning rate, if none was given."""
        if self.train.learning_rate is not None:
            return self
        rate = NEAR_RATE if self.student.starts_near else USUAL_RATE
        return replace(self, train=replace(self.train, learning_rate=rate))

    def check_methods(self, known: MethodTable) -> None:
        """Raise a ValueError if a method is not in the table, or one of its numbers does not fit the run."""
        teachers, tasks = with_teacher(known), self.tasks
        check_names("method", [self.method], known)
        check_names("also", self.also, teachers)
        check_names("tasks.method", [] if tasks.method is None else [tasks.method], teachers)
        check_names("tasks.also", tasks.also or [], teachers)
        for name in self.methods():
            known[name].check(self.method_settings.get(name), self)
