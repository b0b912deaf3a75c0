"""Conditions that are equal in a comparison: the parameters of untrained students, and the tokens of training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from llmdistill.config import RunConfig, StudentConfig
from llmdistill.data.instruct import Limits, encode
from llmdistill.data.references import is_weighted
from llmdistill.data.sampler import global_batch_indices
from llmdistill.data.sources import read_examples
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.students.sizes import summarize
from llmdistill.training.resolved import teacher_path, tokenizer_path


def _is_rank(size: str) -> bool:
    """Return whether the size of a student is a rank; any other is a number of parameters, as in target_params."""
    # No rank has ten digits, and int() refuses thousands of them.
    return size.isdecimal() and len(size) < 10


def size_label(size: str) -> str:
    return f"rank {size}" if _is_rank(size) else size


def other_size(size: str) -> dict[str, Any]:
    """Return the settings of a further size for the recipe's own start, by dotted key."""
    # A rank for all matrices leaves no ranks to choose.
    settings = {**_sizes(size), **({"allocation": "uniform"} if _is_rank(size) else {})}
    return {f"student.factorize.{key}": value for key, value in settings.items()}


def _sizes(size: str) -> dict[str, Any]:
    rank, target_params = (int(size), None) if _is_rank(size) else (None, size)
    return {"rank": rank, "ranks": None, "target_params": target_params}


def check_starts(student: StudentConfig) -> None:
    """Raises UserError if a student is not made by svd with one size, as every start makes it."""
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

    `size` is a rank, or a number of parameters as in target_params; by default the recipe's own. The settings are by
    dotted key. Raises UserError if the plain SVD cannot have this size.
    """
    factorize = replace(recipe.student.factorize, weighting="none", allocation="uniform")
    if size is not None:
        factorize = replace(factorize, **_sizes(size))
    target_params = summarize(locate(str(recipe.teacher.model)), factorize)["student_params"]
    sizes = {"rank": None, "ranks": None, "target_params": target_params}
    return {f"student.factorize.{key}": value for key, value in sizes.items()}


def steps_for_equal_tokens(config: RunConfig, other: Path, seed: int) -> int:
    """Return the number of steps after which a run on `other` has seen as many tokens as the run on its own data.

    The loader is a pure function of seed and step, so the token counts of both runs are known before the training.
    They are unknown for a set that is streamed or weighted, and if `other` does not exist; then the number of steps is
    unchanged.
    """
    if config.data.streaming or is_weighted(config.data.train) or not other.is_file():
        return config.train.steps
    budget = sum(islice(_step_tokens(config, config.data.train, seed), config.train.steps))
    seen = 0
    for step, tokens in enumerate(_step_tokens(config, str(other), seed)):
        if seen + tokens >= budget:
            # The step that crosses the budget counts if the run ends nearer to it.
            is_nearer = seen + tokens - budget <= budget - seen
            return max(1, step + is_nearer)
        seen += tokens
    raise AssertionError("the loader has no end")


def _step_tokens(config: RunConfig, reference: str, seed: int) -> Iterator[int]:
    """Yield the number of tokens without padding in the global batch of each step, endlessly."""
    size, tokenizers = config.train.global_batch_size, (teacher_path(config), tokenizer_path(config))
    limits = Limits.of(config.data, [load_tokenizer(path) for path in tokenizers])
    lengths = _lengths(tokenizers[-1], reference, limits)
    for step in count():
        batch = global_batch_indices(seed=seed, step=step, dataset_size=len(lengths), global_batch_size=size)
        yield int(lengths[batch].sum())


@cache
def _lengths(tokenizer: Path, reference: str, limits: Limits) -> np.ndarray:
    """Return the number of tokens of each example of a training set, (examples,)."""
    data = encode(read_examples(reference), load_tokenizer(tokenizer), limits)
    return np.array([len(item) for item in data.items])
