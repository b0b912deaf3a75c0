"""A teacher that runs during training: in evaluation mode, in its own dtype, replicated on every rank or sharded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from llmdistill.models.adapters import is_adapter
from llmdistill.models.heads import HeadName
from llmdistill.models.load import load_model, merge_adapter
from llmdistill.models.sharded import keep_gathered
from llmdistill.models.sharded_load import Sharding, load_sharded
from llmdistill.runtime.distributed import World, exists_on_main, node_group, node_ranks, on_main, wait_until_visible
from llmdistill.runtime.ds_config import NO_TIMERS
from llmdistill.step.forward import TappedModel
from llmdistill.step.lm_head import lm_head_parameters
from llmdistill.step.tap_models import tap_teacher
from llmdistill.teachers.source import LoadedTeacher, ModelSource, ResolvedTeacher, TeacherContext, TeacherPlan


def load_teacher(
    path: str,
    *,
    dtype: torch.dtype,
    sharding: Literal["replicated", "node", "zero3", "tensor"],
    zero: Mapping[str, Any] | None = None,
    head: HeadName = "lm_head",
) -> LoadedTeacher:
    """Load a teacher with a head; every rank must call this function.

    With sharding zero3 no rank ever holds the whole teacher, independent of the student's ZeRO stage. With node this is
    so if a node has several ranks, and each node has a whole one in shards; so it is with tensor, because this function
    loads what scores and measures (for the steps see `tensor_parallel`). The LM head stays gathered: the losses need
    it whole after each forward pass. `zero` has more settings of DeepSpeed's zero_optimization.
    """
    world = World.current()
    of_node = sharding in ("node", "tensor")
    ranks = node_ranks() if of_node else range(world.size)
    if sharding == "replicated" or (of_node and len(ranks) == 1):
        model = load_model(path, dtype=dtype, device=world.device, head=head)
        model.eval().requires_grad_(False)
        return LoadedTeacher(model, model)
    import deepspeed

    ds_config = {
        # DeepSpeed wants the sizes of batches, though a teacher has no steps.
        "train_batch_size": world.size,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == torch.bfloat16},
        # The stage comes last: the settings must not take the shards away.
        "zero_optimization": {**(zero or {}), "stage": 3},
        **NO_TIMERS,
    }
    # None is the group of all ranks.
    group = node_group() if len(ranks) < world.size else None
    model = load_sharded(path, sharding=Sharding(ds_config, group), dtype=dtype, head=head)
    model.eval().requires_grad_(False)
    engine, *_ = deepspeed.initialize(model=model, config=ds_config)
    engine.eval()
    keep_gathered(lm_head_parameters(engine.module))
    return LoadedTeacher(engine.module, engine)


def make_teacher(plan: TeacherPlan, *, head: HeadName | None = None, name: str = "") -> LoadedTeacher:
    """Load a teacher of a run, by default with the head that the run needs; `name` is one of others."""
    head = plan.models.teacher_head if head is None else head
    teacher = plan.models.teachers[name]
    path, settings = teacher_folder(plan, teacher, name), teacher.settings
    return load_teacher(str(path), dtype=teacher.dtype, sharding=settings.sharding, zero=settings.zero, head=head)


def teacher_folder(plan: TeacherPlan, teacher: ResolvedTeacher, name: str = "") -> Path:
    """Return the folder to load a teacher from; every rank must call this function.

    A rank has only a shard of the base model, so rank 0 merges an adapter first, into the run's folder.
    """
    if not (teacher.settings.is_sharded and is_adapter(teacher.path)):
        return teacher.path
    merged = plan.folder / (f"teacher-{name}" if name else "teacher")
    if not exists_on_main(merged / "config.json"):
        on_main(lambda: merge_adapter(teacher.path, merged))
        wait_until_visible(merged / "config.json")
    return merged


class TeacherOnDemand:
    """The teachers of a run: `teacher.model` is loaded when it is first called and stays until `release`.

    A run that is already trained and scored never loads it.
    """

    def __init__(self, plan: TeacherPlan, head: HeadName | None = None) -> None:
        """Load nothing yet; `head` is by default the one that the run needs."""
        self._plan, self._head = plan, head
        self._loaded: LoadedTeacher | None = None

    def __call__(self, name: str = "") -> LoadedTeacher:
        """Return a loaded teacher; every rank must call it."""
        if name:  # only the steps run it, and they keep it
            return make_teacher(self._plan, name=name)
        self._loaded = self._loaded or make_teacher(self._plan, head=self._head)
        return self._loaded

    def release(self) -> None:
        """Give its memory back; a later call would load it again."""
        self._loaded = None


@dataclass(frozen=True)
class LiveSource(ModelSource):
    """Runs a model in the steps."""

    name: str = ""
    """One of the run's teachers."""

    @property
    def runs_here(self) -> bool:
        return True

    def load(self, context: TeacherContext) -> LoadedTeacher:
        """Return the model that runs in the steps; every rank calls it."""
        return context.load(self.name)

    def build(self, context: TeacherContext) -> TappedModel:
        teacher, plan = self.load(context), context.plan
        return tap_teacher(
            plan.method,
            teacher.model,
            forward=teacher.forward,
            vocabulary=plan.models.vocabulary,
            layer_kernels=plan.layer_kernels,
        )
