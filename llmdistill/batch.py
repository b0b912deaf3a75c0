"""What flows between data, models, losses and methods.

Legend of shape letters, used as name suffixes throughout: B batch (sequences), T tokens, W model width,
H query heads, G key/value heads (G < H under grouped-query attention), D head width, F feed-forward width,
V vocabulary, N rows (tokens gathered from a batch), R relation heads, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:  # the names below are needed where torch is not yet
    import torch
    from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position that no loss looks at (the convention of torch and transformers)."""

Aspect = Literal["query", "key", "value", "ffn_up", "ffn_gate", "ffn_down", "hidden", "embedding"]
"""What can be tapped in a layer; the embedding, which stands before them all, counts as layer 0's."""

Positions = Literal["tokens", "labels", "sequences"]
"""What a loss is a sum over: all real tokens, those to be learnt, or the sequences that have a target."""

POSITIONS: tuple[Positions, ...] = ("tokens", "labels", "sequences")

TapRequest = Mapping[Aspect, frozenset[int]]
"""Which aspects to keep, and in which layers (0-based)."""


class LossSum(NamedTuple):
    """A loss before its division: the sum over positions, and how many positions it is a sum over.

    Only the trainer divides, once, by the count of the whole global batch; so the split of a batch over ranks
    and accumulation steps cannot change the result.
    """

    sum: Tensor
    """Scalar, fp32."""
    count: Tensor  # type: ignore[assignment]  # a tuple has a method of that name; the pair is never searched
    """Scalar, number of positions."""


def predicted_labels(labels: Tensor, *, shift: bool) -> Tensor:
    """The label that each position predicts: (B, T)."""
    from torch.nn import functional

    return functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX) if shift else labels


@dataclass(frozen=True)
class Batch:
    """One micro batch. Padding may stand on either side."""

    input_ids: Tensor
    """(B, T) int64."""
    attention_mask: Tensor
    """(B, T) int64, 1 at real tokens, 0 at padding. In a packed batch the number, from 1, of the token's sequence in
    its row: it sees no other."""
    labels: Tensor
    """(B, T) int64: the token itself where it is to be learnt, else IGNORE_INDEX. Not shifted: in a decoder's batch the
    first label of a sequence has nothing before it that could predict it, and no masked word stands there either."""
    own_answers: bool = False
    """Whether the student wrote what the labels stand on (on-policy), so that only a teacher can judge it."""
    token_type_ids: Tensor | None = None
    """(B, T) int64, 0 in the first and 1 in the second segment; None for models without segments."""
    position_ids: Tensor | None = None
    """(B, T) int64, from 0 in each sequence of a packed row; None where a row is one sequence."""
    label_rows: Tensor | None = None
    """(N,) int64: the flat positions b·T + t that predict a label, in order; None until `with_label_rows`."""
    padded: bool | None = None
    """Whether any row ends in padding, or begins with it; None until `with_label_rows`."""
    targets: Tensor | None = None
    """What is to be said of each sequence, (B,) or (B, K); None in batches without. int64: a class (next sentence: 0 it
    follows, 1 it does not, as in BERT), or K positions such as start and end of a span; IGNORE_INDEX where unknown.
    fp32: a score, or K labels; NaN where unknown."""
    sample_ids: tuple[tuple[int, ...], ...] = ()
    """For each row the ids of its samples, one unless the row is packed; see `data.sample_ids`. Empty where the student
    wrote the text itself."""

    def counts(self) -> dict[Positions, Tensor]:
        """How many of each kind of position the batch has, as scalars."""
        return {
            "tokens": (self.attention_mask != 0).sum(),
            "labels": (self.labels[:, 1:] != IGNORE_INDEX).sum(),
            "sequences": self.has_target().sum(),
        }

    def has_target(self) -> Tensor:
        """Which sequences have a target, or some of several: (B,), bool."""
        if self.targets is None:
            return self.input_ids.new_zeros(len(self.input_ids)).bool()
        known = ~self.targets.isnan() if self.targets.is_floating_point() else self.targets != IGNORE_INDEX
        return known.flatten(1).any(1) if known.dim() > 1 else known

    def with_label_rows(self, *, shift: bool) -> Batch:
        """The same batch with `label_rows` and `padded`, found where it is: on a GPU the host would have to wait.

        Args:
            shift: position i predicts label i+1 (decoders); without it position i predicts label i (masked words).
        """
        if self.label_rows is not None:
            return self
        rows_N = (predicted_labels(self.labels, shift=shift) != IGNORE_INDEX).flatten().nonzero()[:, 0]
        return replace(self, label_rows=rows_N, padded=bool((self.attention_mask == 0).any()))

    def row_labels(self, *, shift: bool) -> Tensor:
        """(N,): the label that each of `label_rows` predicts."""
        assert self.label_rows is not None, "the batch is not located"
        return predicted_labels(self.labels, shift=shift).flatten().index_select(0, self.label_rows)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""

        def moved(value: Any) -> Any:
            return value.to(device, non_blocking=True) if hasattr(value, "to") else value

        return Batch(**{each.name: moved(getattr(self, each.name)) for each in fields(self)})


class Loader(Protocol):
    """Where a step's batches come from."""

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's micro batches of a step (from 0)."""
        ...


@dataclass
class Taps:
    """Inner tensors of one forward pass, by aspect and layer (0-based)."""

    query: dict[int, Tensor] = field(default_factory=dict)
    """(B, H, T, D), after the rotary embedding where there is one."""
    key: dict[int, Tensor] = field(default_factory=dict)
    """(B, G, T, D), after the rotary embedding where there is one."""
    value: dict[int, Tensor] = field(default_factory=dict)
    """(B, G, T, D)."""
    ffn_up: dict[int, Tensor] = field(default_factory=dict)
    """(B, T, F), output of the up projection, before the activation."""
    ffn_gate: dict[int, Tensor] = field(default_factory=dict)
    """(B, T, F), output of the gate projection, before the activation; empty without one."""
    ffn_down: dict[int, Tensor] = field(default_factory=dict)
    """(B, T, W), output of the down projection, before the residual."""
    hidden: dict[int, Tensor] = field(default_factory=dict)
    """(B, T, W), output of the layer."""
    embedding: dict[int, Tensor] = field(default_factory=dict)
    """(B, T, W), what goes into the first layer; its only key is 0."""
    scaling: dict[int, float] = field(default_factory=dict)
    """Factor on query·key before the softmax; kept with query."""
    projected: dict[Aspect, dict[int, Tensor]] = field(default_factory=dict)
    """What was tapped, heads side by side, mapped to the teacher's width by a learnt matrix: (B, T, teacher's
    width)."""


class HeadInputs(NamedTuple):
    """The last product of a language-model head, rows · weightᵀ + bias, before it is made."""

    rows: Tensor
    """(N, K), at the positions that predict a label; K is the model's width, or the rank of a factorised head."""
    weight: Tensor
    """(V, K)."""
    bias: Tensor | None
    """(V,)."""


@dataclass
class Outputs:
    """What a model gave for one batch."""

    logits: Tensor | None
    """(B, T, V); None for a model without language-model head, or where its rows stand in `lm_head`."""
    taps: Taps
    sequence_logits: Tensor | None = None
    """(B, C), of a next-sentence or classification head (C = 1 where scores are predicted); None without one."""
    lm_head: HeadInputs | None = None
    """In place of the logits: what goes into the head's last product, and its parameters."""
