"""Defines a training method: weighted terms, each with the taps and outputs that it needs from the two models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from llmdistill import losses
from llmdistill.batch import Aspect, Batch, Mapped, Outputs, Positions, TapRequest
from llmdistill.losses.terms import BoundTerms, LayerTerm, SequenceTerm, Tap
from llmdistill.objective import Pooling

if TYPE_CHECKING:
    from torch import Tensor


class Term(Protocol):
    """One term of a loss: a sum over positions, which the trainer divides by their number in the global batch.

    There are three kinds, by the place where their inputs appear: a `LayerTerm` at taps of inner layers, a `TokenTerm`
    at the LM head, and a `SequenceTerm` at the output for whole sequences.
    """

    @property
    def name(self) -> str:
        """The name of its weight, and of its column in the log."""
        ...

    @property
    def positions(self) -> Positions:
        """The kind of positions that it sums over."""
        ...

    @property
    def needs_teacher(self) -> bool:
        """Whether it compares the student with the teacher."""
        ...


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
        # Within one method the names differ; `combine` gives those of two methods a prefix.
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
        assert {term.name for term in self.terms} == self.weights.keys(), "terms and weights differ"

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms of all kinds."""
        return *self.layer_terms, *self.token_terms, *self.sequence_terms

    @cached_property
    def positions(self) -> Mapping[str, Positions]:
        """The kind of positions that each term sums over. Its global count is known before the first backward pass."""
        positions = {term.name: term.positions for term in self.terms}
        # In the order of the log; terms of one name, of several layers, sum over the same positions.
        return {name: positions[name] for name in self.weights}

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
        return any(term.needs_teacher for term in self.terms)

    @cached_property
    def teacher_positions(self) -> tuple[Positions, ...]:
        """The kinds of positions at which terms use the teacher's logits for tokens; empty if none does."""
        return tuple(dict.fromkeys(term.positions for term in self.token_terms if term.needs_teacher))

    @property
    def compared_outputs(self) -> list[str]:
        """The names of the terms that compare outputs of the teacher: of its LM head, or of its head for sequences."""
        on_tokens = [term.name for term in self.token_terms if term.needs_teacher]
        return on_tokens + [term.name for term in self.sequence_terms if term.needs_teacher]

    def token_terms_of(self, batch: Batch) -> list[losses.TokenTerm]:
        """Return the token terms by which a batch is learned: those that its labels are fit for."""
        fitting = (term.for_labels(batch.labels_are) for term in self.token_terms)
        return [term for term in fitting if term is not None]

    def bind_terms(
        self, teacher: Outputs | None, batch: Batch, divisors: Mapping[Positions, Tensor] | None = None
    ) -> BoundTerms:
        """Return the terms that are computed during a student's forward pass, and the factor of each.

        `teacher` are its outputs for the batch, None only if `needs_teacher` is False. `divisors` are those of the sums
        over each kind of position; by default the sums are not divided.
        """
        assert teacher is not None or not self.needs_teacher, "only the labels' terms need no teacher"
        factors: dict[str, float | Tensor] = {**self.weights}
        if divisors is not None:
            for name, weight in self.weights.items():
                divisor = divisors[self.positions[name]].float()
                # A plain `weight / divisor` would multiply by the reciprocal, which rounds twice.
                factors[name] = divisor.new_full((), weight) / divisor
        return BoundTerms(
            layer_terms=self.layer_terms,
            token_terms=self.token_terms_of(batch),
            sequence_terms=self.sequence_terms,
            teacher=teacher,
            factors=factors,
        )


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
    # All of them have the same student, and a decoder shifts the labels in every method.
    (shift,) = {method.shift for method in methods.values()}
    pooling = next((method.pooling for method in methods.values() if method.pooling is not None), None)
    return Method(**vars(terms), shift=shift, projections=projections, pooling=pooling)


def _collect_request(taps: Iterable[Tap]) -> dict[Aspect, frozenset[int]]:
    request: dict[Aspect, frozenset[int]] = {}
    for aspect, layer in taps:
        request[aspect] = request.get(aspect, frozenset()) | {layer}
    return request
