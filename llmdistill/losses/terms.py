"""Losses as data: the tensors that each term needs and its function, so that the forward pass can compute them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from llmdistill.batch import Aspect, Batch, Labels, LossSum, Outputs, Positions, Taps
from llmdistill.losses.divergence import REVERSE_KL, Divergence

if TYPE_CHECKING:
    from torch import Tensor

Tap = tuple[Aspect, int]
"""An aspect and a layer (0-based)."""


@dataclass(frozen=True)
class LayerTerm:
    """A loss term on inner tensors of one pair of layers; terms with the same name are added.

    It is computed in the middle of the student's forward pass, as soon as its last tap is there, and its gradient
    enters the graph at these taps.
    """

    name: str
    student: frozenset[Tap]
    """The taps that the term needs from the student."""
    teacher: frozenset[Tap]
    """The taps that the term needs from the teacher."""
    loss: Callable[[Taps, Taps, Tensor], LossSum]
    """Function of the student's taps, the teacher's taps, and the attention mask (B, T)."""

    @property
    def positions(self) -> Positions:
        """See `step.method.Term`: all real tokens."""
        return "tokens"

    @property
    def needs_teacher(self) -> bool:
        """See `step.method.Term`."""
        return True


@dataclass(frozen=True)
class TokenTerm:
    """A loss term on the output: the models' distributions over the next or the masked token.

    It is computed in place of the LM head's product, where the logits of a few rows at a time are in memory. All of a
    method's token terms share these logits and give one gradient, so a term says what to compute and is no function.
    """

    name: str
    divergence: Divergence | None
    """Divergence from the teacher's distribution; None for the cross-entropy of the labels."""
    temperature: float = 1.0
    """Temperature of both distributions, greater than 0; not used by the cross-entropy of the labels."""
    scale: float = 1.0
    """Factor: t² for distillation divergences (Hinton et al. 2015, §2), 1 for MaKD's soft cross-entropy (eq. 18)."""
    smoothing: float = 0.0
    """Share of each label that is spread evenly over the vocabulary, the label included (label smoothing, Szegedy et
    al. 2016, §7); only for the cross-entropy of the labels."""
    positions: Positions = "labels"
    """The positions whose predictions are compared: those that predict a label or, for a divergence, all tokens."""
    spans: Literal["alm", "uld"] = "alm"
    """How a divergence compares a span that teacher and student cut into other tokens; see `losses.other_tokens`."""

    @property
    def needs_teacher(self) -> bool:
        """See `step.method.Term`."""
        return self.divergence is not None

    def for_labels(self, kind: Labels) -> TokenTerm | None:
        """Return the term as a batch with labels of this kind learns by it; None if it cannot."""
        if self.divergence is None:
            return self if kind == "answers" else None
        if self.divergence.of_labels and kind == "answers":
            # Given answers are no samples of the student, so the reverse KL must sum over the vocabulary.
            return replace(self, divergence=REVERSE_KL)
        return self


class BoundTokenTerms(NamedTuple):
    """Token terms as the chunks of the LM head compute them: each with the factor of its sum in the total."""

    terms: Sequence[TokenTerm]
    factors: Tensor
    """(C,), at least fp32: all computations on tokens use this dtype."""

    def select(self, places: list[int]) -> BoundTokenTerms:
        """Return some of the terms, by their places."""
        return BoundTokenTerms([self.terms[place] for place in places], self.factors[places])


@dataclass(frozen=True)
class SequenceTerm:
    """A loss term on the output of a task's head: classes, scores, spans or embeddings.

    It is computed after the student's forward pass, from small tensors, by autograd.
    """

    name: str
    needs_teacher: bool
    loss: Callable[[Outputs, Outputs | None, Batch], LossSum]
    """Function of the student's outputs, the teacher's outputs (None if the term needs no teacher), and the batch."""
    positions: Positions = "sequences"
    """What the loss is summed over."""


@dataclass(frozen=True, kw_only=True)
class BoundTerms:
    """The loss terms that the student's forward pass computes while it runs."""

    layer_terms: Sequence[LayerTerm]
    token_terms: Sequence[TokenTerm]
    sequence_terms: Sequence[SequenceTerm]
    teacher: Outputs | None
    """The teacher's outputs for the same batch. Each tap is removed as soon as no term needs it any more."""
    factors: Mapping[str, Tensor | float]
    """Term name -> the factor of its sum in the total."""


@dataclass(frozen=True)
class Losses:
    """The losses that the student's forward pass computed for a batch."""

    total: Tensor
    """Scalar: Σ factor · sum over all terms. Only this tensor has an autograd graph."""
    terms: Mapping[str, LossSum]
    """Term name -> its loss, unweighted and without an autograd graph."""


def add_losses(*losses: LossSum) -> LossSum:
    """Add the losses of the layers of one term; the count is that of one layer."""
    import torch  # settings are checked against terms before torch is imported

    # All layers have the same tokens, so dividing by the count of one layer gives the sum of the layers' means.
    return LossSum(torch.stack([loss.sum for loss in losses]).sum(), losses[0].count)
