"""What the models of a run look like, from their configurations alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.config import RunConfig, StudentConfig
from llmdistill.config.teacher import key_of
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.methods import METHODS, Method
from llmdistill.models.classifier import copies_classifier
from llmdistill.models.configs import load_config, local_folder
from llmdistill.models.families import shape_of
from llmdistill.models.forms import saved_size
from llmdistill.models.heads import HEADS, HeadName
from llmdistill.models.tokenizer import brings_tokenizer
from llmdistill.runtime.devices import TORCH_DTYPES
from llmdistill.students.counting import build_reference, count_parameters, forward_flops
from llmdistill.students.install import install
from llmdistill.students.kinds import KINDS
from llmdistill.students.shapes import check_sizes, parse_shape, shape_config, teacher_layers
from llmdistill.students.sizes import plan_embedding, summarize
from llmdistill.tasks.base import Models, Task
from llmdistill.teachers.source import ResolvedTeacher

Pending = Mapping[str, PreTrainedConfig]
"""The configurations of models that may not exist yet, by path."""


LARGEST_STUDENT = 1.5
"""Parameters of the largest student by its shape, as a share of its teacher's: other proportions may have a little
more. A larger student that exists already is a note."""


@dataclass(frozen=True, kw_only=True)
class RunModels(Models):
    """Teacher and student of a run. Without a teacher its config and folder are those of the student."""

    sizes: dict[str, Any]
    """`teacher_params`, `student_params`, `ranks` and other values of the factorization, and `saved_params` and
    `saved_bytes` of the student with its forms."""
    dtype: torch.dtype
    """The dtype of the student."""
    student_head: HeadName
    """The heads that the student needs: those whose outputs the loss uses; for a decoder always the lm_head."""
    teacher_head: HeadName
    """The heads that the teacher needs: those whose outputs the student is compared with."""
    copies_classifier: bool
    """Whether the student's classifier is initialized from the teacher's."""
    vocabulary: int | None
    """The number of logits that teacher and student share; None if the logits are not compared."""
    translates: bool
    """Whether teacher and student have different tokenizers, and the method compares the text that both read."""
    teacher_origin: str | None
    """How the weights of the teacher were made, if they are those of a GGUF file."""
    teachers: Mapping[str, ResolvedTeacher]
    """`teacher.model` under the name "", and the others if the method needs them."""

    @property
    def teacher_dtype(self) -> torch.dtype:
        """The dtype of `teacher.model`."""
        return self.teachers[""].dtype

    @property
    def compared_tokens(self) -> int:
        """The number of tokens whose probabilities teacher and student compare."""
        return int(self.teacher.vocab_size) if self.vocabulary is None else self.vocabulary


def model_config(task: Task, key: str, reference: str, pending: Pending) -> PreTrainedConfig:
    """Return the config of a model that a setting names; a UserError if the task cannot have it."""
    if reference not in pending and reference[:1] in (".", "~", "/") and not os.path.exists(reference):
        local_folder(reference)  # says that there is none, where locate makes a name on the hub of ./model
    loaded = pending[reference] if reference in pending else load_config(locate(reference))
    task.check_model(key, reference, loaded)
    return loaded


def student_of(
    settings: StudentConfig, task: Task, teacher: PreTrainedConfig, pending: Pending
) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Return the student's config and the sizes of the models."""
    if settings.is_factorized:
        # A factorized student has the shape of its teacher.
        return teacher, summarize(teacher, settings.factorize, settings.method)
    if settings.model is not None:
        student, how = model_config(task, "student.model", settings.model, pending), "given"
    else:
        assert settings.shape is not None
        shape = parse_shape(settings.shape)
        student, how = shape_config(teacher, shape), f"{settings.shape} ({settings.init})"
        if settings.init != "random":
            unknown = torch.zeros(shape_of(teacher).num_layers)  # the influence of the layers is measured later
            teacher_layers(settings.teacher_layers, shape.depth, len(unknown), key="student.layers", influence=unknown)
            check_sizes(settings.init, shape_of(student), shape_of(teacher))
    reference = build_reference(student)
    if settings.model is None:
        planned = plan_embedding(reference, settings.factorize, settings.method)
        install(reference, planned)
        if planned.embedding is not None:
            how += f", {KINDS[settings.method].embedding_key} {planned.embedding}"
    params = [count_parameters(build_reference(teacher)), count_parameters(reference)]
    if settings.shape is not None and params[1] > LARGEST_STUDENT * params[0]:
        raise UserError(
            f"student.shape {settings.shape} has {params[1]:,} parameters, {params[1] / params[0]:,.0%} of the "
            f"teacher's {params[0]:,}: a student is smaller; its numbers are depth, width and heads"
        )
    sizes = {"method": how, "teacher_params": params[0], "student_params": params[1], "ratio": params[1] / params[0]}
    return student, {**sizes, "forward_flops": forward_flops(reference)}


def saved_sizes(
    params: int, settings: StudentConfig, dtype: torch.dtype, build: Callable[[], PreTrainedModel]
) -> dict[str, int]:
    """Return the sizes of a student as it is saved, with its forms; see `models.forms.saved_size`."""
    size = saved_size(params, dtype, settings, build)
    return {"saved_params": size.params, "saved_bytes": size.bytes}


def heads_of(
    config: RunConfig, task: Task, method: Method, teacher: PreTrainedConfig, student: PreTrainedConfig, *, causal: bool
) -> tuple[HeadName, HeadName]:
    """Return the heads that the teacher and the student need; see `RunModels`."""
    if task.head is not None:
        return task.head, task.head

    def needed(*, tokens: bool, sequences: bool) -> HeadName:
        if causal:
            return "lm_head"
        return "pretraining" if sequences else "lm_head" if tokens else "none"

    compares = any(term.needs_teacher for term in method.sequence_terms)
    of_teacher = needed(tokens=bool(method.teacher_positions), sequences=compares)
    if METHODS[config.method].trains or causal:
        return of_teacher, needed(tokens=bool(method.token_terms), sequences=bool(method.sequence_terms))
    # An encoder that is only scored has the head of its folder, by the name of the class in its config.
    name = ((teacher if config.student.model is None else student).architectures or [""])[0]
    return of_teacher, next((head for head in ("pretraining", "lm_head") if name.endswith(HEADS[head].endings)), "none")


def has_copied_classifier(config: RunConfig, task: Task, teacher: PreTrainedConfig, student: PreTrainedConfig) -> bool:
    """Whether the student's classifier is initialized from the teacher's."""
    if task.head is None or task.num_outputs is None:
        return False
    return copies_classifier(
        config.data.task.copy_classifier,
        student,
        None if config.teacher.model is None else teacher,
        task.num_outputs,
        head=task.head,
        by_default=any(METHODS[name].copies_classifier for name in config.methods()),
    )


def teachers_of(config: RunConfig, dtype: str) -> dict[str, ResolvedTeacher]:
    """Return `teacher.model` under the name "" and all others; `dtype` is that of the run, fp32 or bf16."""
    return {
        name: ResolvedTeacher(
            key=key_of(name),
            settings=own,
            path=locate(str(own.model)) if name else teacher_path(config),
            dtype=TORCH_DTYPES[dtype if own.dtype == "auto" else own.dtype],
        )
        for name, own in config.teacher.everyone.items()
    }


def tokenizer_path(config: RunConfig) -> Path:
    """Return the folder of the student's tokenizer: the student's own folder, else the teacher's."""
    if config.student.model is not None and brings_tokenizer(locate(config.student.model)):
        return locate(config.student.model)
    return teacher_path(config)


def teacher_path(config: RunConfig) -> Path:
    """Return the folder of the teacher; without a teacher that of the student."""
    return locate(str(config.teacher.model or config.student.model))
