"""What a training method is: weighted terms, each with what it needs of the two models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from llmdistill import losses
from llmdistill.batch import Aspect, Batch, LossSum, Outputs, Positions, TapRequest
from llmdistill.losses.terms import LayerTerm, RunningTerms, SequenceTerm, Tap, add_losses

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Method:
    """A training method. What it asks of the models follows from its terms."""

    weights: Mapping[str, float]
    """Factor of each term, in the order of the log; the same names as the terms."""
    layer_terms: Sequence[LayerTerm] = ()
    token_terms: Sequence[losses.TokenTerm] = ()
    sequence_terms: Sequence[SequenceTerm] = ()
    shift: bool = True
    """Whether position i predicts label i+1 (decoders) or label i (masked words)."""
    projections: Mapping[Aspect, tuple[int, int]] = field(default_factory=dict)
    """Aspects whose student taps a learnt matrix maps to the teacher's width before they are compared (they are then in
    `Taps.projected`): the width that goes in, heads side by side, and the one that comes out."""

    def __post_init__(self) -> None:
        """Names and terms must agree."""
        assert {term.name for term in self._terms()} == self.weights.keys(), "terms and weights differ"

    @cached_property
    def positions(self) -> Mapping[str, Positions]:
        """What each term is a sum over, so that its global count is known before the first backward pass."""
        of_tokens, of_sequences = ({term.name for term in terms} for terms in (self.token_terms, self.sequence_terms))
        return {
            name: "labels" if name in of_tokens else "sequences" if name in of_sequences else "tokens"
            for name in self.weights
        }

    @cached_property
    def student_taps(self) -> TapRequest:
        """What the student must hand over."""
        return _request(tap for term in self.layer_terms for tap in term.student)

    @cached_property
    def teacher_taps(self) -> TapRequest:
        """What the teacher must hand over."""
        return _request(tap for term in self.layer_terms for tap in term.teacher)

    @cached_property
    def needs_teacher(self) -> bool:
        """Whether any term looks at the teacher."""
        return (
            bool(self.layer_terms)
            or self.needs_teacher_logits
            or any(term.needs_teacher for term in self.sequence_terms)
        )

    @cached_property
    def needs_teacher_logits(self) -> bool:
        """Whether any term looks at the teacher's output on words."""
        return any(term.divergence is not None for term in self.token_terms)

    def running(
        self, teacher: Outputs | None, batch: Batch, factors: Mapping[str, Tensor | float] | None = None
    ) -> RunningTerms:
        """The terms that a student's forward pass can compute while it runs.

        Args:
            teacher: the teacher's outputs, None only if `needs_teacher` is False.
            batch: the batch both see.
            factors: of each term, what its sum is multiplied by in the final loss; None where nothing is learnt.
        """
        factors = dict(self.weights if factors is None else factors)
        if batch.own_answers:
            factors |= dict.fromkeys(self._label_names(), 0.0)
        return RunningTerms(
            layer_terms=self.layer_terms, token_terms=self.token_terms, teacher=teacher, factors=factors
        )

    def __call__(self, student: Outputs, teacher: Outputs | None, batch: Batch) -> dict[str, LossSum]:
        """The terms of one batch, unweighted, under the names of `weights`.

        What the student computed while it ran is taken as it is; the others come from its taps and logits.

        Args:
            student: outputs, with their graph.
            teacher: outputs; None only if `needs_teacher` is False.
            batch: the batch both have seen.
        """
        assert teacher is not None or not self.needs_teacher, "only the labels' terms need no teacher"
        losses = dict(student.losses)
        for layer in self.layer_terms:
            if layer.name not in student.losses:
                assert teacher is not None
                loss = layer.loss(student.taps, teacher.taps, batch.attention_mask)
                losses[layer.name] = add_losses(losses[layer.name], loss) if layer.name in losses else loss
        for word in self.token_terms:
            if word.name not in student.losses:
                losses[word.name] = self._of_logits(word, student, teacher, batch)
        for sequence in self.sequence_terms:
            losses[sequence.name] = sequence.loss(student, teacher, batch)
        if batch.own_answers:  # the student wrote them itself, so as labels they say nothing
            for name in self._label_names():
                losses[name] = LossSum(0.0 * losses[name].sum, losses[name].count)
        return {name: losses[name] for name in self.weights}

    def _label_names(self) -> list[str]:
        return [term.name for term in self.token_terms if term.divergence is None]

    def _of_logits(self, term: losses.TokenTerm, student: Outputs, teacher: Outputs | None, batch: Batch) -> LossSum:
        """A term on words from the logits of all tokens."""
        assert student.logits is not None, "the student has no language-model head"
        if term.divergence is None:
            return losses.label_cross_entropy(student.logits, batch.labels, shift=self.shift)
        assert teacher is not None
        assert teacher.logits is not None, "the teacher has no language-model head"
        loss = losses.output_divergence(
            student.logits,
            teacher.logits,
            batch.labels,
            divergence=term.divergence.value,
            temperature=term.temperature,
            shift=self.shift,
        )
        return LossSum(loss.sum * (term.scale / term.temperature**2), loss.count)

    def _terms(self) -> list[LayerTerm | losses.TokenTerm | SequenceTerm]:
        return [*self.layer_terms, *self.token_terms, *self.sequence_terms]


def _request(taps: Iterable[Tap]) -> dict[Aspect, frozenset[int]]:
    request: dict[Aspect, frozenset[int]] = {}
    for aspect, layer in taps:
        request[aspect] = request.get(aspect, frozenset()) | {layer}
    return request
