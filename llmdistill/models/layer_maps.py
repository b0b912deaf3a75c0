"""Maps from the layers of a student to those of its teacher, for its first weights (student.layers) and for losses that
compare layers (teacher_layers of a method)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from llmdistill.errors import UserError


def uniform_map(student_depth: int, teacher_depth: int) -> list[int]:
    """Return the teacher's layer, counted from 1, for each layer of the student: evenly spread, the last for the last.

    This is the uniform map of TinyBERT and MiniLM: layer m of M learns from layer m·L/M of L. If M does not divide L,
    the product is rounded, halves up. If the student is deeper than its teacher, some layers of the teacher occur more
    than once.
    """
    return [
        max(1, (2 * layer * teacher_depth + student_depth) // (2 * student_depth))
        for layer in range(1, student_depth + 1)
    ]


_MAPS: Mapping[str, Callable[[int, int], list[int]]] = {
    "uniform": uniform_map,
    "spread": lambda student, teacher: [layer * teacher // student + 1 for layer in range(student)],
    "first": lambda student, teacher: list(range(1, student + 1)),
    "last": lambda student, teacher: list(range(teacher - student + 1, teacher + 1)),
}
"""The maps of layers that have a name: the teacher's layer, counted from 1, for each layer of the student."""


def parse_layer_map(
    spec: str, student_depth: int, teacher_depth: int, *, key: str, may_skip: bool = False, more: Sequence[str] = ()
) -> list[int]:
    """Return the teacher's layer for each layer of the student, counted from 1, as a setting names them.

    Args:
        spec: uniform (m · L/M for layer m of M: 2, 4, 6 for 3 of 6 layers), spread (1, 3, 5), first, last, or one
            number for each layer of the student such as 2,4,6, in any order; a layer may occur more than once.
        student_depth, teacher_depth: M and L.
        key: the name of the setting, for the error message.
        may_skip: whether the number may be 0, for a layer of the student that has none.
        more: further words that the setting knows, for the error message.

    Raises:
        UserError: the text has none of these forms, or the numbers do not fit the models.
    """
    text = spec.strip()
    if text in _MAPS:
        if text in ("first", "last") and student_depth > teacher_depth:
            raise UserError(
                f"{key} {text}: the student has {student_depth} layers and the teacher {teacher_depth}; give a number "
                "for each layer of the student"
            )
        return _MAPS[text](student_depth, teacher_depth)
    if re.fullmatch(r"\d{1,9}\s*(,\s*\d{1,9}\s*)*", text, re.ASCII) is None:
        raise UserError(
            f"{key} {spec!r} names no layers: give {', '.join([*_MAPS, *more])}, or numbers from 1 such as 1,3,5"
        )
    layers, least = [int(number) for number in text.split(",")], 0 if may_skip else 1
    if len(layers) != student_depth or not all(least <= layer <= teacher_depth for layer in layers):
        none = " (0: none)" if may_skip else ""
        raise UserError(
            f"{key} {spec} does not fit: give {student_depth} numbers, one for each layer of the student, from {least}"
            f"{none} to the teacher's {teacher_depth}"
        )
    if not any(layers):
        raise UserError(f"{key} {spec}: no layer of the student has a layer of the teacher; give at least one")
    return layers
