"""Initialises the classifier of a student with the classifier of its fine-tuned teacher (KroneckerBERT §3.7)."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.errors import UserError
from llmdistill.models.load import auto_class, load_model


def classifier_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters of a sequence classifier outside its base model, by name; the pooler is part of the base model."""
    base = f"{model.base_model_prefix}."
    return {name: parameter for name, parameter in model.named_parameters() if not name.startswith(base)}


def copies_classifier(
    wanted: bool | None,
    student: PreTrainedConfig,
    teacher: PreTrainedConfig | None,
    num_classes: int,
    *,
    by_default: bool,
) -> bool:
    """Whether a run starts from the teacher's classifier, decided from the models' configs; never without a teacher.

    Args:
        wanted: the user's setting; None takes the default.
        student: config of the student.
        teacher: config of the teacher, if there is one.
        num_classes: outputs of the student's classifier.
        by_default: whether the classifier is copied if `wanted` is None and the shapes agree.

    Raises UserError if `wanted` is True, but the classifiers have different shapes.
    """
    if teacher is None or wanted is False or (wanted is None and not by_default):
        return False
    shapes = _shapes(student, num_classes), _shapes(teacher)
    if wanted and shapes[0] != shapes[1]:
        student_shapes, teacher_shapes = (
            ", ".join(f"{name} {' x '.join(map(str, size))}" for name, size in each.items()) for each in shapes
        )
        raise UserError(
            f"data.task.copy_classifier is true: the teacher's classifier ({teacher_shapes}) is not of the shape of "
            f"the student's ({student_shapes}); take a student of the teacher's architecture and width, or leave it out"
        )
    return shapes[0] == shapes[1]


def _shapes(config: PreTrainedConfig, num_classes: int | None = None) -> dict[str, tuple[int, ...]]:
    if num_classes is not None:
        config = copy.deepcopy(config)
        config.num_labels = num_classes
    with torch.device("meta"):
        model = auto_class(config, "sequence").from_config(config, trust_remote_code=False)
    return {name: tuple(parameter.shape) for name, parameter in classifier_parameters(model).items()}


def read_classifier(path: str) -> dict[str, Tensor]:
    """The classifier of a fine-tuned model by parameter name, in fp32 on the CPU. Raises UserError if it has none."""
    model = load_model(path, dtype=torch.float32, head="sequence")
    return {name: parameter.detach().clone() for name, parameter in classifier_parameters(model).items()}


@torch.no_grad()
def set_classifier(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Copy the weights from `read_classifier` into a model. Call it on every rank before the engine is built."""
    own = classifier_parameters(model)
    assert own.keys() == weights.keys(), f"{sorted(own)} is not {sorted(weights)}"
    for name, parameter in own.items():
        parameter.copy_(weights[name])
