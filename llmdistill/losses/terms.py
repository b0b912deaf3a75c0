"""Losses as data: what each needs and how it is computed, so that a forward pass can compute them while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmdistill.batch import Aspect, Batch, LossSum, Outputs, Taps

if TYPE_CHECKING:
    from torch import Tensor

    from llmdistill.losses.head import TokenTerm

Tap = tuple[Aspect, int]
"""An aspect and a layer (0-based)."""


@dataclass(frozen=True)
class LayerTerm:
    """A term in one pair of layers. Several of one name add up."""

    name: str
    student: frozenset[Tap]
    """What it needs of the student."""
    teacher: frozenset[Tap]
    """What it needs of the teacher."""
    loss: Callable[[Taps, Taps, Tensor], LossSum]
    """Of the student's taps, the teacher's, and the attention mask (B, T)."""


@dataclass(frozen=True)
class SequenceTerm:
    """A term on what is said of each sequence."""

    name: str
    needs_teacher: bool
    loss: Callable[[Outputs, Outputs | None, Batch], LossSum]
    """Of the student's outputs, the teacher's (None where it needs none), and the batch."""


@dataclass(frozen=True, kw_only=True)
class RunningTerms:
    """What a student's forward pass is to compute while it runs."""

    layer_terms: Sequence[LayerTerm]
    token_terms: Sequence[TokenTerm]
    sequence_terms: Sequence[SequenceTerm]
    teacher: Outputs | None
    """The teacher's outputs of the same batch. Its taps are taken out one by one, as soon as no term needs them."""
    factors: Mapping[str, Tensor | float]
    """What each term's sum is multiplied by in the total."""


@dataclass(frozen=True)
class Losses:
    """What a student's forward pass computed of a batch's terms."""

    total: Tensor
    """Scalar: the terms' sums times their factors, added up. It alone has a graph."""
    terms: Mapping[str, LossSum]
    """Each term, unweighted and without a graph."""


def add_losses(one: LossSum, other: LossSum) -> LossSum:
    """A term of several layers: the sum of their losses, over the positions that each of them counts."""
    # Every layer counts the same tokens: one layer's count makes the term a sum over layers of means.
    return LossSum(one.sum + other.sum, one.count)
