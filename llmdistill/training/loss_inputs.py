"""What a training loop of one's own gives to `DistillationLoss`, models and batches, read and checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.batch import IGNORE_INDEX, Batch
from llmdistill.config.methods import check_names
from llmdistill.errors import UserError
from llmdistill.internals.torch_names import uncompiled
from llmdistill.methods import Method
from llmdistill.models.heads import CLASSES
from llmdistill.models.pooling import has_dense, read_sentence_settings
from llmdistill.objective import Objective, Pooling, PoolingMode

Inputs = Mapping[str, Any]
"""A batch from a data collator of transformers: see `DistillationLoss.__call__`."""
_READ = (
    *("input_ids", "attention_mask", "labels", "token_type_ids", "position_ids"),
    *("next_sentence_label", "start_positions", "end_positions"),
)
"""The keys of a batch that may be read."""


def unwrap(role: str, model: Any) -> PreTrainedModel:
    """Return the model of transformers in a compiled model, or in one with adapters of peft.

    Raises:
        UserError: there is none, or the adapters add tokens to the input, which no tap sees.
    """
    model = uncompiled(model)
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        if any(config.is_prompt_learning for config in model.peft_config.values()):
            raise UserError(
                f"the {role}'s adapter adds tokens to the input: take one that changes weights, such as LoRA"
            )
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"the {role} is a {type(model).__name__}: give a transformers PreTrainedModel, as from_pretrained loads it "
            "(of a parallel model its .module, and the parallel model in each call: loss(batch, model=parallel))"
        )
    return model


def find_pooling(teacher: PreTrainedModel, mode: PoolingMode | None) -> Pooling:
    """Return how embeddings are made; see `DistillationLoss`."""
    if mode is not None:
        check_names("pooling", [mode], get_args(PoolingMode))
        return Pooling((mode,))
    folder = Path(teacher.name_or_path or "")
    settings = read_sentence_settings(folder) if teacher.name_or_path and folder.is_dir() else None
    if settings is not None and has_dense(folder):
        raise UserError(f"{folder}: ends in a Dense, which is no part of the teacher in memory; give pooling yourself")
    return Pooling() if settings is None else settings.pooling


def check_heads(method: Method, objective: Objective, teacher: PreTrainedModel, student: PreTrainedModel) -> None:
    """Raise a UserError if a model lacks the head that the method reads, or the classes of the heads differ."""
    models = {"student": student, **({"teacher": teacher} if method.needs_teacher else {})}
    if objective.tokens:
        reads = {"student": bool(method.token_terms), "teacher": bool(method.teacher_positions)}
        for role, model in models.items():
            if reads[role] and model.get_output_embeddings() is None:
                raise UserError(
                    f"the {role} is a {type(model).__name__}, which has no language-model head: load it by "
                    "AutoModelForCausalLM, or an encoder by AutoModelForMaskedLM"
                )
    elif objective.targets is CLASSES:
        counts = {role: model.config.num_labels for role, model in models.items()}
        if len(set(counts.values())) > 1:
            raise UserError(
                f"teacher and student tell different numbers of classes apart ({counts}): give both as many"
            )
        if student.config.problem_type == "multi_label_classification":
            raise UserError(
                "the student's problem_type is multi_label_classification, but a sequence has one class here: set "
                "it to single_label_classification"
            )


def read_batch(inputs: Inputs, method: Method, objective: Objective) -> Batch:
    """Convert a batch from a data collator of transformers to a `Batch`.

    Raises:
        UserError: a shape or type is wrong, or the method needs labels that the batch lacks.
    """
    inputs = dict(inputs)
    for key in [key for key in _READ if inputs.get(key) is not None]:
        value = inputs[key]
        try:
            value = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{key} of the batch is a {type(value).__name__} that is no tensor: give a tensor (B, T), as the data "
                "collators of transformers make it"
            ) from error
        is_narrow = value.dtype in (torch.int32, torch.int16, torch.int8, torch.uint8)
        inputs[key] = value.long() if is_narrow else value
    input_ids: Tensor = inputs["input_ids"]
    if input_ids.dim() != 2 or not input_ids.numel():
        raise UserError(f"input_ids have the shape {tuple(input_ids.shape)}: give rows of tokens (B, T)")
    mask, position_ids = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is None:  # several sequences in a row, each starting at position 0; or rows without padding
        mask = torch.ones_like(input_ids) if position_ids is None else (position_ids == 0).cumsum(-1)
    labels, targets = inputs.get("labels"), inputs.get("next_sentence_label")
    if objective.targets is not None and not objective.tokens:
        labels, targets = objective.targets.from_inputs(inputs)
    if labels is None:
        if "labels" in method.positions.values():
            raise UserError("the batch has no labels, which the method's terms on the output need: add labels (B, T)")
        labels = torch.full_like(input_ids, IGNORE_INDEX)
    for key, value in (("attention_mask", mask), ("labels", labels)):
        if value.shape != input_ids.shape:
            raise UserError(
                f"{key} has the shape {tuple(value.shape)}, and input_ids {tuple(input_ids.shape)}: give both as (B, T)"
            )
    if targets is not None and objective.targets is CLASSES:
        targets = targets.flatten() if targets.shape == (len(input_ids), 1) else targets
        if targets.shape != (len(input_ids),) or targets.is_floating_point():
            raise UserError(
                f"the classes have the shape {tuple(targets.shape)} and are {targets.dtype}: give one class a "
                "sequence, as integers (B,); several classes of one sequence are not learned"
            )
    return Batch(
        input_ids=input_ids,
        attention_mask=mask,
        labels=labels,
        token_type_ids=inputs.get("token_type_ids"),
        position_ids=position_ids,
        targets=targets,
    )


def check_values(batch: Batch, objective: Objective, student: PreTrainedConfig) -> None:
    """Raise a UserError for tokens, labels or classes that the student does not have."""
    values: dict[str, tuple[Tensor, int]] = {"input_ids": (batch.input_ids, student.vocab_size)}
    if objective.tokens:
        values["labels"] = batch.labels, student.vocab_size
    if batch.targets is not None and objective.targets is CLASSES:
        values["classes"] = batch.targets, max(2, student.num_labels or 0)
    for key, (tensor, count) in values.items():
        used = tensor[tensor != IGNORE_INDEX] if key != "input_ids" else tensor
        if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < count:
            wrong = int(used.min()) if int(used.min()) < 0 else int(used.max())
            nothing = "" if key == "input_ids" else f", or {IGNORE_INDEX} where nothing is learned"
            raise UserError(f"{key} hold {wrong}: the student has 0 to {count - 1}{nothing}")
