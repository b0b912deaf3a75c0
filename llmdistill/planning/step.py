"""Traces one training step of a run on the meta device: the run's own forward and backward passes, without weights."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.batch import IGNORE_INDEX, Batch, HeadInputs, TeacherRows
from llmdistill.losses.vocabulary_shards import VocabularyShards, split_sizes
from llmdistill.methods import Method
from llmdistill.models.adapters import cast_parameters
from llmdistill.models.config_check import install_saved
from llmdistill.models.forms import adapt
from llmdistill.models.heads import HeadName
from llmdistill.models.load import build_meta
from llmdistill.runtime.engine import add_projectors, set_training
from llmdistill.runtime.tracing import Tracer, Work, on_gpu
from llmdistill.step.learning import HeadLosses
from llmdistill.step.tap_models import tap_student, tap_teacher
from llmdistill.step.teacher import Teacher
from llmdistill.students.counting import build_reference
from llmdistill.students.install import install
from llmdistill.students.sizes import plan_student
from llmdistill.tasks.base import Task
from llmdistill.training.plan import Plan


@dataclass(frozen=True, kw_only=True)
class ForecastModels:
    """The models of a run on the meta device."""

    student: PreTrainedModel
    projectors: nn.ModuleDict
    teacher: PreTrainedModel | None
    """None if no term of the method needs one."""
    method: Method
    vocabulary: int | None = None
    """The number of logits that both models share; None if their vocabularies are the same."""


@dataclass(frozen=True)
class Moment:
    """The memory of a step up to one moment of the backward pass, gradients of parameters left out."""

    gradients: int
    """Number of elements of the parameters whose gradients are complete."""
    live: Mapping[str, float]
    """The most bytes since the moment before, by part: activations, taps (what losses on layers keep of both models)
    and head (the LM head and its losses)."""


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """The memory and the work of the forward and backward pass of one micro batch on one rank."""

    micro_batch_size: int
    moments: Sequence[Moment]
    student: Work
    teacher: Work


def build_models(plan: Plan) -> ForecastModels:
    """Build a run's models on the meta device; raise UserError if the student's sizes follow from weights or data."""
    student = _build_on_meta(plan.models.student, plan.models.student_head, plan.task)
    settings = plan.config.student
    planned = plan_student(build_reference(plan.models.student), settings)
    if planned is not None:
        install(student, planned)
    cast_parameters(student, plan.models.dtype)
    adapt(student, settings, plan.config.seed)
    teacher = None
    if plan.method.needs_teacher:
        teacher = _build_on_meta(plan.models.teacher, plan.models.teacher_head, plan.task)
        cast_parameters(teacher, plan.models.teacher_dtype)
    with torch.device("meta"):
        projectors = add_projectors(student, plan.method.projections, plan.config.seed)
    return ForecastModels(
        student=student, projectors=projectors, teacher=teacher, method=plan.method, vocabulary=plan.models.vocabulary
    )


def _build_on_meta(config: PreTrainedConfig, head: HeadName, task: Task) -> PreTrainedModel:
    # The plan's own config stays as it is.
    config = copy.deepcopy(config)
    if task.num_outputs is not None:
        config.num_labels = task.num_outputs
    if config.pad_token_id is None:  # a decoder with a classifier needs one, and any will do
        config.pad_token_id = 0
    model = build_meta(config, head)
    install_saved(model)
    task.configure(model)
    return model


def full_batch(plan: Plan, micro_batch_size: int) -> Batch:
    """Return a micro batch with as many tokens and labels as a batch of the run can have, on the meta device."""
    data, length = plan.config.data, plan.config.data.max_length
    ids = torch.zeros(micro_batch_size, length, dtype=torch.int64)
    labels = ids.clone()
    if not plan.models.causal and data.kind == "text":
        # An encoder learns only the tokens that are masked.
        labels[:, math.ceil(data.text.mask_share * length) :] = IGNORE_INDEX
    targets = plan.models.objective.targets
    packed = data.kind == "instructions" and data.packing
    batch = Batch(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        labels=labels,
        token_type_ids=torch.zeros_like(ids),
        position_ids=torch.arange(length).expand_as(ids) if packed else None,
        targets=None if targets is None else targets.of_zeros(ids),
    ).with_positions(shift=plan.method.shift)  # finds the labels, for which the ids must have values
    # Texts fill their rows; other batches are padded, and then an encoder's attention needs a mask.
    return replace(batch, padding="none" if data.kind == "text" else "right").to("meta")


def trace_step(
    models: ForecastModels,
    batch: Batch,
    *,
    checkpointing: bool,
    cached: Teacher | None = None,
    head_ranks: int = 1,
) -> StepTrace:
    """Trace the forward passes of both models and the backward pass of the student on one micro batch.

    Afterwards the student is in training mode. With `checkpointing` it recomputes its activations. A `cached` teacher
    takes the place of a pass of the teacher. `head_ranks` share the teacher's LM head by `teacher.sharding tensor`.
    """
    student, method, tracer = models.student, models.method, Tracer()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers is renaming these methods
        if not checkpointing:
            student.gradient_checkpointing_disable()
        set_training(student, checkpointing=checkpointing)
    moments: list[Moment] = []

    def complete(parameter: Tensor) -> None:
        parameter.grad = None  # the layout adds gradients itself, because their place depends on the ZeRO stage
        moments.append(Moment((moments[-1].gradients if moments else 0) + parameter.numel(), tracer.take_peak()))

    handles: list[Any] = [
        parameter.register_post_accumulate_grad_hook(complete)
        for parameter in student.parameters()
        if parameter.requires_grad
    ]
    learner = tap_student(method, student, projectors=models.projectors, vocabulary=models.vocabulary)
    handles.append(learner)
    teacher = cached
    # The layout counts weights itself: their share on a rank depends on the ZeRO stage.
    tracer.ignore(_list_tensors(student))
    if models.teacher is not None:
        models.teacher.eval().requires_grad_(False)
        tracer.ignore(_list_tensors(models.teacher))
        if cached is None:
            teacher = live = tap_teacher(method, models.teacher, vocabulary=models.vocabulary)
            handles.append(live)
    teacher_outputs, teacher_work = None, Work()
    # HeadLosses runs inside the model, so that only a wrapper of its call can tell its memory from the activations.
    in_head = patch.object(HeadLosses, "__call__", tracer.part("head")(HeadLosses.__call__))
    with on_gpu(), tracer, in_head:
        if teacher is not None:
            with torch.no_grad(), tracer.part("taps"):
                teacher_outputs = teacher.compute_targets(batch, lm_head=method.teacher_positions)
                if head_ranks > 1:
                    shared = {place: _share_head(head, head_ranks) for place, head in teacher_outputs.lm_head.items()}
                    teacher_outputs = replace(teacher_outputs, lm_head=shared)
            teacher_work = tracer.work
        terms = method.bind_terms(teacher_outputs, batch)
        # The outputs now belong to the terms alone, which drop each tap after its last use, as in a run.
        del teacher_outputs
        traced_terms = [replace(term, loss=tracer.part("taps")(term.loss)) for term in terms.layer_terms]
        learner.compute_losses(batch, replace(terms, layer_terms=traced_terms)).total.backward()
        del terms
    # What is still in use after the last gradient.
    moments.append(Moment(moments[-1].gradients if moments else 0, tracer.take_peak()))
    for handle in handles:
        handle.remove()
    return StepTrace(
        micro_batch_size=len(batch.input_ids),
        moments=moments,
        # The tracer has counted both models.
        student=tracer.work.plus(teacher_work, -1.0),
        teacher=teacher_work,
    )


def _share_head(head: TeacherRows, ranks: int) -> VocabularyShards:
    """Return what a rank has of a head that several share, if each of the others has as many rows."""
    assert isinstance(head, HeadInputs), "a teacher that is cut is no other"
    assert head.weight is not None, "its head is plain"
    sizes = split_sizes(len(head.weight), ranks)
    return VocabularyShards(
        rows=(head.rows, *(head.rows.clone() for _ in sizes[1:])),
        weight=head.weight[: sizes[0]],
        bias=None if head.bias is None else head.bias[: sizes[0]],
        scale=head.scale,
        sizes=sizes,
        rank=0,
        group=None,
    )


def interpolate(low: StepTrace, high: StepTrace, micro_batch_size: int) -> StepTrace:
    """Return the trace of another micro batch: everything that a step keeps or computes grows in proportion to it."""
    if low.micro_batch_size == high.micro_batch_size:
        return low
    share = (micro_batch_size - low.micro_batch_size) / (high.micro_batch_size - low.micro_batch_size)
    assert len(low.moments) == len(high.moments), "two traces of one step complete the same gradients"

    def bytes_between(first: Moment, second: Moment) -> Moment:
        parts = first.live.keys() | second.live.keys()
        live = {name: first.live.get(name, 0) * (1 - share) + second.live.get(name, 0) * share for name in parts}
        return Moment(first.gradients, live)

    return StepTrace(
        micro_batch_size=micro_batch_size,
        moments=[bytes_between(*pair) for pair in zip(low.moments, high.moments, strict=True)],
        student=Work().plus(low.student, 1 - share).plus(high.student, share),
        teacher=Work().plus(low.teacher, 1 - share).plus(high.teacher, share),
    )


def model_bytes(model: nn.Module | None) -> int:
    """Return the bytes of a model's parameters and buffers; 0 without a model."""
    return 0 if model is None else sum(tensor.untyped_storage().nbytes() for tensor in _list_tensors(model))


def _list_tensors(model: nn.Module) -> list[Tensor]:
    """List the parameters and buffers of a model; tensors that share their memory count once."""
    by_storage = {id(tensor.untyped_storage()): tensor for tensor in (*model.parameters(), *model.buffers())}
    return list(by_storage.values())
