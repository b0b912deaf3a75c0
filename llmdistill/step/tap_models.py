"""Connects a method with its models: the hooks that its terms need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from llmdistill.batch import TapRequest
from llmdistill.step.compile import compile_layers
from llmdistill.step.forward import TappedModel
from llmdistill.step.liger import apply_liger, fits
from llmdistill.step.method import Method
from llmdistill.step.taps import Recorder

LayerKernels = Literal["transformers", "compiled", "liger"]
"""What the layers of a model run: transformers' own operations, their compiled graphs, or Liger's kernels."""


def tap_teacher(
    method: Method,
    model: PreTrainedModel,
    *,
    forward: Callable[..., Any] | None = None,
    vocabulary: int | None = None,
    layer_kernels: LayerKernels = "transformers",
) -> TappedModel:
    """Return the forward pass of a teacher with the hooks that a method's terms need.

    `vocabulary` is the number of logits that both models share, None if their vocabularies are the same. Liger's
    kernels run only if they fit the model.
    """
    recorder = _record(model, method.teacher_taps, None, layer_kernels)
    return TappedModel(model if forward is None else forward, recorder, vocabulary=vocabulary, pooling=method.pooling)


def tap_student(
    method: Method,
    model: PreTrainedModel,
    *,
    forward: Callable[..., Any] | None = None,
    projectors: nn.ModuleDict | None = None,
    vocabulary: int | None = None,
    layer_kernels: LayerKernels = "transformers",
) -> TappedModel:
    """Return the forward pass of a student with the hooks that a method's terms need; see `tap_teacher`.

    Under DeepSpeed this comes last, so that the hooks wrap those of the engine, and `forward` is the engine. The
    `projectors` map the student's widths to the teacher's.
    """
    recorder = _record(model, method.student_taps, projectors, layer_kernels)
    return TappedModel(
        model if forward is None else forward,
        recorder,
        vocabulary=vocabulary,
        pooling=method.pooling,
        projector=projectors["sentence"] if projectors is not None and "sentence" in projectors else None,
    )


def _record(
    model: PreTrainedModel, taps: TapRequest, projectors: nn.ModuleDict | None, layer_kernels: LayerKernels
) -> Recorder:
    """Return the recorder of a model whose layers run these kernels."""
    if layer_kernels == "liger" and fits(model.config):
        apply_liger(model)  # before the recorder sets its hooks
    recorder = Recorder(model, taps, projectors)
    if layer_kernels == "compiled":
        compile_layers(recorder)
    return recorder
