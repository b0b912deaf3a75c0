"""The classifier of a student, which may be copied from the teacher's."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.errors import UserError
from llmdistill.models.heads import HeadName
from llmdistill.models.load import build_meta, load_model
from llmdistill.models.sharded import gathered


def classifier_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the parameters of a task's head (classifier or spans) by name; the pooler is part of the base model."""
    base = f"{model.base_model_prefix}."
    return {name: parameter for name, parameter in model.named_parameters() if not name.startswith(base)}


def copies_classifier(
    wanted: bool | None,
    student: PreTrainedConfig,
    teacher: PreTrainedConfig | None,
    num_classes: int,
    *,
    head: HeadName,
    by_default: bool,
) -> bool:
    """Return whether a run starts from the teacher's classifier (KroneckerBERT §3.7); never without a teacher.

    If the user's setting `wanted` is None, `by_default` decides, and shapes that differ mean no. The student's
    classifier has `num_classes` outputs; `head` is the kind of both classifiers. Raises UserError if `wanted` is True,
    but the shapes differ.
    """
    if teacher is None or wanted is False or (wanted is None and not by_default):
        return False
    shapes = _classifier_shapes(student, head, num_classes), _classifier_shapes(teacher, head)
    if wanted and shapes[0] != shapes[1]:
        student_shapes, teacher_shapes = (
            ", ".join(f"{name} {' x '.join(map(str, size))}" for name, size in by_name.items()) for by_name in shapes
        )
        raise UserError(
            f"data.task.copy_classifier is true: the teacher's classifier ({teacher_shapes}) is not of the shape of "
            f"the student's ({student_shapes}); take a student of the teacher's architecture and width, or leave it out"
        )
    return shapes[0] == shapes[1]


def _classifier_shapes(
    config: PreTrainedConfig, head: HeadName, num_classes: int | None = None
) -> dict[str, tuple[int, ...]]:
    if num_classes is not None:
        config = copy.deepcopy(config)
        config.num_labels = num_classes
    parameters = classifier_parameters(build_meta(config, head))
    return {name: tuple(parameter.shape) for name, parameter in parameters.items()}


def read_classifier(path: str, head: HeadName) -> dict[str, Tensor]:
    """Read the classifier of a fine-tuned model by parameter name, in fp32 on the CPU; raise UserError without one."""
    model = load_model(path, dtype=torch.float32, head=head)
    return {name: parameter.detach().clone() for name, parameter in classifier_parameters(model).items()}


@torch.no_grad()
def set_classifier(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Copy the weights from `read_classifier` into a model. Call it on every rank before the engine is built."""
    own = classifier_parameters(model)
    assert own.keys() == weights.keys(), f"{sorted(own)} is not {sorted(weights)}"
    for name, parameter in own.items():
        # All ranks have read the same weights.
        with gathered(parameter, write=True):
            parameter.copy_(weights[name])
