"""Chooses the layers of student and teacher to compare, and checks that the two models can be compared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from typing import Literal, NamedTuple

from llmdistill import losses
from llmdistill.batch import Aspect, LossSum, Taps
from llmdistill.errors import UserError
from llmdistill.losses.terms import LayerTerm
from llmdistill.methods.annotations import PreTrainedConfig, Tensor
from llmdistill.models.families import family_of, shape_of


class LayerPair(NamedTuple):
    """One pair of layers to compare, both counted from 0."""

    student: int
    teacher: int
    window: int | None
    """Sliding attention window of both layers; None if the layers attend to all tokens."""


def uniform_map(student_layers: int, teacher_layers: int) -> list[int]:
    """The teacher's layer (0-based) for each layer of the student, evenly spread, the last layer for the last.

    This is the uniform map of TinyBERT and MiniLM: layer m of M learns from layer m·L/M of L (both counted from 1). If
    M does not divide L, the product is rounded, halves up. If the student is deeper than its teacher, some layers of
    the teacher occur more than once.
    """
    return [
        max(1, (2 * layer * teacher_layers + student_layers) // (2 * student_layers)) - 1
        for layer in range(1, student_layers + 1)
    ]


def named_layer(spec: int | Literal["last"], teacher: PreTrainedConfig, *, key: str) -> int:
    """The teacher's layer (0-based) that a setting gives, counted from 1.

    Raises:
        UserError: the teacher has no such layer.
    """
    num_layers = shape_of(teacher).num_layers
    if spec == "last":
        return num_layers - 1
    if not 1 <= spec <= num_layers:
        raise UserError(f"{key} is {spec}: the teacher has {num_layers} layers; give one from 1 to {num_layers}")
    return spec - 1


def pair_layers(
    layers: Iterable[tuple[int, int]], teacher: PreTrainedConfig, student: PreTrainedConfig, *, method: str
) -> list[LayerPair]:
    """The layer pairs for (student, teacher) layer numbers, each with its attention window.

    Raises:
        UserError: the two layers of a pair have different attention windows.
    """
    of_student, of_teacher = shape_of(student).windows, shape_of(teacher).windows
    pairs: list[LayerPair] = []
    for mine, theirs in layers:
        if of_student[mine] != of_teacher[theirs]:
            raise UserError(
                f"{method} compares what tokens see, but the attention window is {of_student[mine]} in the student's "
                f"layer {mine + 1} and {of_teacher[theirs]} in the teacher's layer {theirs + 1}: "
                "give the student's config.json the teacher's sliding_window, or name another layer"
            )
        pairs.append(LayerPair(mine, theirs, of_student[mine]))
    return pairs


def same_direction(teacher: PreTrainedConfig, student: PreTrainedConfig, *, method: str) -> bool:
    """Whether both models are decoders; False if both are encoders.

    Raises:
        UserError: one is a decoder and the other an encoder.
    """
    causal = family_of(student).causal
    if family_of(teacher).causal != causal:
        kinds = {True: "a decoder", False: "an encoder"}
        raise UserError(
            f"{method} compares models of one kind, but the teacher ({teacher.model_type}) is {kinds[not causal]} and "
            f"the student ({student.model_type}) {kinds[causal]}: take a student of the teacher's kind"
        )
    return causal


def check_heads(teacher: PreTrainedConfig, student: PreTrainedConfig, *, method: str) -> None:
    """Check that both models have the same number of (query) heads, because heads are compared one by one.

    Raises:
        UserError: the numbers of heads differ.
    """
    of_teacher, of_student = shape_of(teacher), shape_of(student)
    if of_teacher.num_heads != of_student.num_heads:
        raise UserError(
            f"{method} compares head with head, but the teacher has {of_teacher.num_heads} attention heads and the "
            f"student {of_student.num_heads}: give the student {of_teacher.num_heads} "
            f"(student.shape DEPTHxWIDTHx{of_teacher.num_heads}), or take method minilmv2, which is free of that"
        )


def check_same_shape(teacher: PreTrainedConfig, student: PreTrainedConfig, *, method: str) -> None:
    """Check that all sizes agree, as layers and heads are compared one by one; the factorization may differ.

    Raises:
        UserError: a size differs.
    """
    if family_of(teacher) != family_of(student):
        raise UserError(
            f"{method} compares like with like, but the teacher is {teacher.model_type} and the student "
            f"{student.model_type}: take a student of the teacher's architecture"
        )
    of_teacher, of_student = asdict(shape_of(teacher)), asdict(shape_of(student))
    for name, size in of_teacher.items():
        if of_student[name] != size:
            raise UserError(
                f"{method} compares layer with layer and head with head, but {name} is {size} in the teacher and "
                f"{of_student[name]} in the student: factorize the teacher instead of reshaping it"
            )


def attention_of(taps: Taps, layer: int) -> losses.AttentionInputs:
    """The inputs of one layer's attention, from its taps."""
    return losses.AttentionInputs(taps.query[layer], taps.key[layer], taps.scaling[layer])


def layer_term(
    name: str, aspects: Collection[Aspect], pair: LayerPair, loss: Callable[[Taps, Taps, Tensor], LossSum]
) -> LayerTerm:
    """A term that needs the same aspects from both layers of a pair."""
    of_student, of_teacher = (
        frozenset((aspect, layer) for aspect in aspects) for layer in (pair.student, pair.teacher)
    )
    return LayerTerm(name, of_student, of_teacher, loss)
