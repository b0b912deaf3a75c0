"""Connects a method with its models: the hooks that its terms need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from llmdistill.step.compile import compile_layers
from llmdistill.step.forward import TappedModel
from llmdistill.step.method import Method
from llmdistill.step.taps import Recorder


def tapped(
    method: Method,
    role: Literal["teacher", "student"],
    model: PreTrainedModel,
    *,
    forward: Callable[..., Any] | None = None,
    projectors: nn.ModuleDict | None = None,
    vocabulary: int | None = None,
    compiled: bool = False,
) -> TappedModel:
    """Return the forward pass of a model with the hooks that a method's terms need.

    Under DeepSpeed this comes last, so that the hooks wrap those of the engine, and `forward` is the engine. The
    `projectors` map the student's widths to the teacher's; `vocabulary` is the number of logits that both models share,
    None if their vocabularies are the same; `compiled` compiles the layers.
    """
    recorder = Recorder(model, method.teacher_taps if role == "teacher" else method.student_taps, projectors)
    if compiled:
        compile_layers(recorder)
    forward = model if forward is None else forward
    projector = projectors["sentence"] if projectors is not None and "sentence" in projectors else None
    return TappedModel(forward, recorder, vocabulary=vocabulary, pooling=method.pooling, projector=projector)
