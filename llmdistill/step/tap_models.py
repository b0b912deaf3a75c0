"""Connects a method with its models: the hooks that its terms need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from llmdistill.step.compile import compile_layers
from llmdistill.step.forward import TappedModel
from llmdistill.step.liger import fits, use_liger
from llmdistill.step.method import Method
from llmdistill.step.taps import Recorder


def tap_teacher(
    method: Method,
    model: PreTrainedModel,
    *,
    forward: Callable[..., Any] | None = None,
    vocabulary: int | None = None,
    compiled: bool = False,
    fused: bool = False,
) -> TappedModel:
    """Return the forward pass of a teacher with the hooks that a method's terms need.

    `vocabulary` is the number of logits that both models share, None if their vocabularies are the same; `compiled`
    compiles the layers, and `fused` lets them run Liger's kernels if these fit.
    """
    if fused and fits(model.config):
        use_liger(model)
    recorder = Recorder(model, method.teacher_taps)
    if compiled:
        compile_layers(recorder)
    return TappedModel(model if forward is None else forward, recorder, vocabulary=vocabulary, pooling=method.pooling)


def tap_student(
    method: Method,
    model: PreTrainedModel,
    *,
    forward: Callable[..., Any] | None = None,
    projectors: nn.ModuleDict | None = None,
    vocabulary: int | None = None,
    compiled: bool = False,
    fused: bool = False,
) -> TappedModel:
    """Return the forward pass of a student with the hooks that a method's terms need; see `tap_teacher`.

    Under DeepSpeed this comes last, so that the hooks wrap those of the engine, and `forward` is the engine. The
    `projectors` map the student's widths to the teacher's.
    """
    if fused and fits(model.config):
        use_liger(model)
    recorder = Recorder(model, method.student_taps, projectors)
    if compiled:
        compile_layers(recorder)
    return TappedModel(
        model if forward is None else forward,
        recorder,
        vocabulary=vocabulary,
        pooling=method.pooling,
        projector=projectors["sentence"] if projectors is not None and "sentence" in projectors else None,
    )
