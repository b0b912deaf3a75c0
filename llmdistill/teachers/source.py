"""The protocol of what gives the outputs of a run's teacher, and what it knows of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.batch import Batch, Positions
from llmdistill.config import OneTeacher, RunConfig
from llmdistill.config.command_line import with_values
from llmdistill.config.teacher import CacheConfig, TeacherConfig
from llmdistill.errors import UserError
from llmdistill.models.heads import HeadName
from llmdistill.step.method import Method
from llmdistill.step.tap_models import LayerKernels
from llmdistill.step.teacher import Teacher
from llmdistill.teachers.output_rows import Request


@dataclass(frozen=True)
class LoadedTeacher:
    """The model of a teacher, and how to run it."""

    model: PreTrainedModel
    forward: Callable[..., Any]
    """The forward pass to call: the model itself, or the DeepSpeed engine that gathers the model's shards."""

    @property
    def sharded(self) -> bool:
        """Whether a forward pass needs every rank."""
        return self.forward is not self.model


@dataclass(frozen=True, kw_only=True)
class ResolvedTeacher:
    """One of a run's teachers."""

    key: str
    """Where its settings are, see `key_of`."""
    settings: OneTeacher
    path: Path
    dtype: torch.dtype


class TeacherModels(Protocol):
    """What a source reads of the models of a run; see `training.resolved.RunModels`."""

    @property
    def teacher(self) -> PreTrainedConfig: ...
    @property
    def teacher_head(self) -> HeadName: ...
    @property
    def teachers(self) -> Mapping[str, ResolvedTeacher]: ...
    @property
    def vocabulary(self) -> int | None: ...
    @property
    def compared_tokens(self) -> int: ...
    @property
    def translates(self) -> bool: ...


class TeacherData(Protocol):
    """What a source reads of the data of a run; see `tasks.base.TaskData`."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    def teacher_tokenizer(self) -> PreTrainedTokenizerBase: ...

    def teacher_prompts(self) -> Mapping[int, Sequence[int]] | None: ...

    def teacher_examples(self) -> tuple[Sequence[Any], Callable[[list[Any]], Batch]]: ...


class TeacherPlan(Protocol):
    """What a source reads of the plan of a run."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def method(self) -> Method: ...
    @property
    def models(self) -> TeacherModels: ...
    @property
    def folder(self) -> Path: ...
    @property
    def layer_kernels(self) -> LayerKernels: ...
    @property
    def source(self) -> TeacherSource | None: ...
    @property
    def cache_obstacle(self) -> str | None: ...
    @property
    def vllm_obstacle(self) -> str | None: ...

    def data_contents(self) -> dict[str, str]: ...


@dataclass(frozen=True)
class TeacherContext:
    """What a teacher of a run's steps is built from."""

    plan: TeacherPlan
    data: TeacherData
    load: Callable[[str], LoadedTeacher]
    """Loads one of `models.teachers` by its name; every rank must call it."""
    first_batch: Callable[[], Batch] | None = None
    """Makes the first micro batch of this rank, on the CPU and in the teacher's tokens; None if nothing needs one."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a source can give of a teacher; by default the most likely tokens at labels, at temperature 1, alone."""

    layers: bool = False
    """Inner tensors of layers, and the embedding."""
    sequences: bool = False
    """The outputs of heads for sequences: classes, spans, embeddings."""
    positions: tuple[Positions, ...] = ("labels",)
    """The positions at which it gives distributions over tokens."""
    whole: bool = False
    """Whether these are whole distributions (`HeadInputs`), not the most likely tokens (`TopK`)."""
    temperatures: tuple[float, ...] = (1.0,)
    """The temperatures at which a `TopK` has the mass of the rest; whole distributions have any."""

    def find_missing(self, method: Method) -> str | None:
        """Return the first thing that a method needs of its teacher and that is not given; None if all is."""
        request = Request.of(method)
        if request.taps and not self.layers:
            return "inner tensors of layers"
        if request.sequences and not self.sequences:
            return "classes, spans or embeddings"
        for place in request.positions:
            if place not in self.positions:
                return "distributions at all tokens" if place == "tokens" else f"distributions at {place}"
        if self.whole:
            return None
        if any(term.divergence is not None and term.divergence.of_labels for term in method.token_terms):
            return "the probability of each label, which may be none of the most likely tokens"
        for temperature in request.temperatures:
            if temperature not in self.temperatures:
                return f"the mass of the rest at temperature {temperature:g}"
        return None


class TeacherSource:
    """A source of a teacher's outputs. Only `build` must be its own, and `gives` where it gives more than the default.

    Of `teacher.model` a run still reads the configuration and the tokenizer, and its weights where the student is made
    from them.
    """

    settings: ClassVar[type[Any] | None] = None
    """The class of teacher.settings, a dataclass like those of `llmdistill.config`; None if there are none."""
    gives: ClassVar[Capabilities] = Capabilities()
    """What a run may compare with its teacher's outputs."""

    @property
    def runs_here(self) -> bool:
        """Whether `teacher.model` itself runs in the steps."""
        return False

    @property
    def is_scored(self) -> bool:
        """Whether a run scores `teacher.model`, for which it loads its weights."""
        return self.runs_here

    @property
    def needs_whole(self) -> bool:
        """Whether a cache of a teacher must hold its whole distributions."""
        return False

    def settings_of(self, teacher: TeacherConfig) -> Any:
        """Return teacher.settings as an object of `settings`, None without them; a UserError if they do not fit."""
        if self.settings is None:
            if teacher.settings:
                raise UserError(f"teacher.settings.{min(teacher.settings)}: {teacher.source} has no settings")
            return None
        return with_values(self.settings(), teacher.settings, key="teacher.settings")

    def build(self, context: TeacherContext) -> Teacher:
        """Return the teacher of a run's steps; every rank calls it."""
        raise NotImplementedError

    def describe(self, teacher: TeacherConfig) -> str:
        """What the first lines of a run add to the teacher."""
        return f", its outputs come from {teacher.source}; it is not scored"

    def check_plan(self, plan: TeacherPlan) -> None:
        """Raise a UserError if it cannot give what the method of a run compares."""
        missing = self.gives.find_missing(plan.method)
        if missing is not None:
            raise UserError(
                f"teacher.source {plan.config.teacher.source}: method {' + '.join(plan.config.methods())} needs "
                f"{missing}, which it does not give; take another method, such as kd, or train with the teacher itself "
                "(teacher.source null)"
            )

    def check_available(self, plan: TeacherPlan) -> tuple[str, str] | None:
        """Raise a UserError if it does not answer; return the setting that names it, and its state in words."""
        return "teacher.source", f"{plan.config.teacher.source} is there"

    def unforecast(self, teacher: TeacherConfig) -> str | None:
        """Say why `llmdistill plan` cannot forecast it, with a remedy; None if it can."""
        return f"teacher.source is {teacher.source}, and what it costs is not forecast: leave it out"

    def examples(
        self, plan: TeacherPlan, data: TeacherData, name: str
    ) -> tuple[Sequence[Any], Callable[[list[Any]], Batch]]:
        """Return the examples that a cache of one of the teachers has, and what collates them."""
        return data.teacher_examples()

    def cache_settings(self, plan: TeacherPlan, settings: CacheConfig) -> CacheConfig:
        """Return the settings of a cache that it fills, once it has answered; a UserError if it fills none."""
        raise UserError(f"teacher.source {plan.config.teacher.source} fills no cache: train with it itself")

    def scorer(self, plan: TeacherPlan) -> Callable[..., Any] | None:
        """Return what scores the texts of a cache, as `write_by_scorer` calls it; None: the model of the run."""
        return None


class ModelSource(TeacherSource):
    """A source whose outputs come from models that the run can load, or from a cache of these."""

    gives = Capabilities(layers=True, sequences=True, positions=("labels", "tokens"), whole=True)

    def describe(self, teacher: TeacherConfig) -> str:
        return ""

    def check_available(self, plan: TeacherPlan) -> tuple[str, str] | None:
        return None

    def unforecast(self, teacher: TeacherConfig) -> str | None:
        return None

    def cache_settings(self, plan: TeacherPlan, settings: CacheConfig) -> CacheConfig:
        return settings
