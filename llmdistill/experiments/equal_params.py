"""Gives the untrained students of all starts of a comparison the same number of parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmdistill.config import RunConfig
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.factorize.sizes import summarize


def is_rank(size: str) -> bool:
    """Return whether the size of a student is a rank; any other is a number of parameters, as in target_params."""
    return size.isdecimal() and len(size) < 10


def check_starts(recipe: RunConfig) -> None:
    """Check that the recipe's student can be made from every start.

    Raises:
        UserError: the student is not made by svd with one size; the message names the setting and the remedy.
    """
    student = recipe.student
    for key in ("model", "shape"):
        if getattr(student, key) is not None:
            raise UserError(
                f"--starts compares ways to factorize the teacher, but student.{key} is {getattr(student, key)}: "
                "leave one of them out"
            )
    if student.method != "svd":
        raise UserError(f"--starts compares ways of svd, but student.method is {student.method}: leave one of them out")
    if student.factorize.rank is None and student.factorize.target_params is None:
        raise UserError(
            "--starts gives the student of every start the same number of parameters: give "
            "student.factorize.target_params (or rank) instead of ranks"
        )


def equal_size(recipe: RunConfig, size: str | None = None) -> dict[str, Any]:
    """Return the settings that give the students of all starts the number of parameters of the plain SVD.

    Ranks that differ from matrix to matrix can meet any number of parameters, one rank for all cannot. So the plain
    student of a size is counted, and its number of parameters is the target of all starts.

    Args:
        recipe: the recipe, whose own size is taken by default.
        size: a rank, or a number of parameters as in target_params.

    Returns:
        settings by dotted key.

    Raises:
        UserError: the plain SVD cannot have this size.
    """
    factorize = replace(recipe.student.factorize, weighting="none", allocation="uniform")
    if size is not None:
        rank, target = (int(size), None) if is_rank(size) else (None, size)
        factorize = replace(factorize, rank=rank, ranks=None, target_params=target)
    target_params = summarize(locate(str(recipe.teacher.model)), factorize)["student_params"]
    sizes = {"rank": None, "ranks": None, "target_params": target_params}
    return {f"student.factorize.{key}": value for key, value in sizes.items()}
