"""Defines a training method: weighted terms, each with the taps and outputs that it needs from the two models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from llmdistill import losses
from llmdistill.batch import Aspect, Batch, Mapped, Outputs, Positions, TapRequest
from llmdistill.losses.terms import BoundTerms, LayerTerm, SequenceTerm, Tap
from llmdistill.objective import Pooling

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Terms:
    """Weighted terms; a method is made of one or more of these."""

    weights: Mapping[str, float]
    """Weight of each term, in the order of the log. The names are the same as those of the terms."""
    layer_terms: Sequence[LayerTerm] = ()
    token_terms: Sequence[losses.TokenTerm] = ()
    sequence_terms: Sequence[SequenceTerm] = ()

    def __or__(self, other: Terms) -> Terms:
        """Combine the terms of both."""
        return Terms(
            {**self.weights, **other.weights},
            (*self.layer_terms, *other.layer_terms),
            (*self.token_terms, *other.token_terms),
            (*self.sequence_terms, *other.sequence_terms),
        )


@dataclass(frozen=True, kw_only=True)
class Method(Terms):
    """A training method. Its terms determine what it needs from the models."""

    shift: bool = True
    """Whether position i predicts label i+1 (decoders) or label i (masked tokens)."""
    projections: Mapping[Mapped, tuple[int, int]] = field(default_factory=dict)
    """What a learned matrix maps to the teacher's width before the comparison (mapped taps are in `Taps.projected`,
    embeddings of sentences in `Outputs.projected`): the input width, all heads side by side, and the output width."""
    pooling: Pooling | None = None
    """How both models make the embeddings of sentences that the terms on sequences compare; None if none does."""

    def __post_init__(self) -> None:
        """Check that the weights and the terms have the same names."""
        terms: list[LayerTerm | losses.TokenTerm | SequenceTerm]
        terms = [*self.layer_terms, *self.token_terms, *self.sequence_terms]
        assert {term.name for term in terms} == self.weights.keys(), "terms and weights differ"

    @cached_property
    def positions(self) -> Mapping[str, Positions]:
        """The kind of positions that each term sums over. Its global count is known before the first backward pass."""
        positions_of: dict[str, Positions] = {term.name: term.positions for term in self.token_terms}
        positions_of |= {term.name: "sequences" for term in self.sequence_terms}
        return {name: positions_of.get(name, "tokens") for name in self.weights}

    @cached_property
    def student_taps(self) -> TapRequest:
        """The taps that the student must return."""
        return _collect_request(tap for term in self.layer_terms for tap in term.student)

    @cached_property
    def teacher_taps(self) -> TapRequest:
        """The taps that the teacher must return."""
        return _collect_request(tap for term in self.layer_terms for tap in term.teacher)

    @cached_property
    def needs_teacher(self) -> bool:
        """Whether any term uses the teacher."""
        on_sequences = any(term.needs_teacher for term in self.sequence_terms)
        return bool(self.layer_terms) or bool(self.teacher_positions) or on_sequences

    @cached_property
    def teacher_positions(self) -> tuple[Positions, ...]:
        """The kinds of positions at which terms use the teacher's logits for tokens; empty if none does."""
        return tuple(dict.fromkeys(term.positions for term in self.token_terms if term.divergence is not None))

    def bind_terms(
        self, teacher: Outputs | None, batch: Batch, divisors: Mapping[Positions, Tensor] | None = None
    ) -> BoundTerms:
        """Return the terms that are computed during a student's forward pass, and the factor of each.

        `teacher` are its outputs for the batch, None only if `needs_teacher` is False. `divisors` are those of the sums
        over each kind of position; by default the sums are not divided.
        """
        assert teacher is not None or not self.needs_teacher, "only the labels' terms need no teacher"
        return BoundTerms(
            layer_terms=self.layer_terms,
            token_terms=[
                adapted
                for term in self.token_terms
                if (adapted := _adapt_to_answers(term, batch.own_answers)) is not None
            ],
            sequence_terms=self.sequence_terms,
            teacher=teacher,
            factors={
                name: weight if divisors is None else _divide(weight, divisors[self.positions[name]])
                for name, weight in self.weights.items()
            },
        )


def _adapt_to_answers(term: losses.TokenTerm, own: bool) -> losses.TokenTerm | None:
    """Return the term for answers that the student wrote (`own`) or the data hold; None if it has no meaning there."""
    if term.divergence is None:
        return None if own else term  # tokens that the student generated itself are no labels
    # The data's answers are no samples of the student, so the reverse KL must sum over all tokens of the vocabulary.
    if term.divergence.of_labels and not own:
        return replace(term, divergence=losses.REVERSE_KL)
    return term


def combine(methods: Mapping[str, Method]) -> Method:
    """Combine the terms of several methods; a name that two methods share gets the method as a prefix (`kd.label`)."""
    shared = Counter(term for method in methods.values() for term in method.weights)
    terms = Terms({})
    projections: dict[Mapped, tuple[int, int]] = {}
    for prefix, method in methods.items():
        names = {term: f"{prefix}.{term}" if shared[term] > 1 else term for term in method.weights}
        terms |= Terms(
            {names[term]: weight for term, weight in method.weights.items()},
            [replace(term, name=names[term.name]) for term in method.layer_terms],
            [replace(term, name=names[term.name]) for term in method.token_terms],
            [replace(term, name=names[term.name]) for term in method.sequence_terms],
        )
        for aspect, widths in method.projections.items():
            assert projections.setdefault(aspect, widths) == widths, f"two methods map {aspect} to different widths"
    (shift,) = {method.shift for method in methods.values()}
    pooling = next((method.pooling for method in methods.values() if method.pooling is not None), None)
    return Method(**vars(terms), shift=shift, projections=projections, pooling=pooling)


def _divide(weight: float, divisor: Tensor) -> Tensor:
    """Divide in fp32. A plain `weight / divisor` would multiply by the reciprocal, which rounds twice."""
    divisor = divisor.float()
    return divisor.new_full((), weight) / divisor


def _collect_request(taps: Iterable[Tap]) -> dict[Aspect, frozenset[int]]:
    request: dict[Aspect, frozenset[int]] = {}
    for aspect, layer in taps:
        request[aspect] = request.get(aspect, frozenset()) | {layer}
    return request
