"""The types that data, models, losses and methods exchange: batches, taps, outputs and sums of losses.

Legend of shape letters, used as name suffixes throughout: B batch (sequences), T tokens, W model width,
H query heads, G key/value heads (G < H under grouped-query attention), D head width, F feed-forward width,
V vocabulary, N rows (tokens gathered from a batch), R relation heads, C classes, K targets of a sequence, S sequences
(of all rows, packed or not).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from llmdistill.attention_mask import AttentionMask

if TYPE_CHECKING:  # the names below are also used before torch is imported
    from concurrent.futures import Future

    import torch
    from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position that every loss ignores (the convention of torch and transformers)."""

Aspect = Literal["query", "key", "value", "ffn_up", "ffn_gate", "ffn_down", "hidden", "embedding"]
"""The kinds of tensor that can be tapped in a layer. The embedding, input of the first layer, counts as layer 0."""

Mapped = Literal[Aspect, "sentence", "dense"]
"""What a learned matrix maps to the teacher's width: the taps of an aspect, or the embeddings of sentences. The matrix
for these is left out of the saved student (sentence), or its Dense in the files of sentence-transformers (dense)."""

Positions = Literal["tokens", "labels", "sequences"]
"""The positions that a loss is summed over: all real tokens, tokens with a label, or sequences with a target."""

POSITIONS: tuple[Positions, ...] = ("tokens", "labels", "sequences")

Labels = Literal["answers", "samples"]
"""What tokens with a label are: answers that were given, or samples of the student, which only a teacher can judge."""

TapRequest = Mapping[Aspect, frozenset[int]]
"""The aspects to keep, and for each aspect the layers (0-based)."""


class LossSum(NamedTuple):
    """A loss before the division: the sum over positions, and the number of these positions.

    Only the trainer divides, once, by the count of the whole global batch. Therefore the split of a batch over ranks
    and accumulation steps does not change the result.
    """

    sum: Tensor
    """Scalar, fp32."""
    count: Tensor  # type: ignore[assignment]  # hides the method tuple.count, which is not used here
    """Scalar, number of positions."""


def predicted_labels(labels: Tensor, *, shift: bool) -> Tensor:
    """The label that each position predicts: (B, T)."""
    from torch.nn import functional

    return functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX) if shift else labels  # nothing follows the last


@dataclass(frozen=True)
class Sequences:
    """Where the sequences of a batch are, its rows one after the other; a row's padding counts as a sequence."""

    starts: Tensor
    """(S + 1,) int32: the flat position b·T + t at which each sequence starts, and B·T at the end."""
    lengths: tuple[int, ...]
    """The lengths of the S sequences, which the host knows without asking the device."""
    longest: int
    """The largest of the lengths."""

    @classmethod
    def of(cls, attention_mask: Tensor) -> Sequences:
        """The sequences of a mask (B, T) on the CPU, as `Batch.attention_mask` numbers them."""
        import torch

        is_start_BT = torch.ones_like(attention_mask, dtype=torch.bool)
        is_start_BT[:, 1:] = attention_mask[:, 1:] != attention_mask[:, :-1]
        firsts_S = is_start_BT.flatten().nonzero()[:, 0]
        starts = torch.cat([firsts_S, firsts_S.new_tensor([attention_mask.numel()])])
        lengths = starts.diff().tolist()
        return cls(starts.int(), tuple(lengths), max(lengths))  # torch's varlen_attn reads int32

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Sequences:
        return replace(self, starts=self.starts.to(device, non_blocking=non_blocking))


@dataclass(frozen=True)
class Batch:
    """One micro batch. It may be padded on the left or on the right."""

    input_ids: Tensor
    """(B, T) int64."""
    attention_mask: Tensor
    """(B, T) int64, 1 at real tokens, 0 at padding. In a packed batch, the number (from 1) of the token's sequence in
    the row; a token sees only tokens with the same number."""
    labels: Tensor
    """(B, T) int64, not shifted: the token id where the token is to be learned, else IGNORE_INDEX. The first label of a
    sequence is never learned: in a decoder no token before it predicts it, and encoders never mask the first token."""
    labels_are: Labels = "answers"
    """What the tokens with a label are; a loss term says of which kind it learns."""
    written_log_probs: Tensor | None = None
    """(N,) fp32: the log-probability of each token that has a label, row by row, under the model that has written the
    answers beside the training; None if nothing else than the student has."""
    token_type_ids: Tensor | None = None
    """(B, T) int64, 0 in the first and 1 in the second segment; None for models without segments."""
    position_ids: Tensor | None = None
    """(B, T) int64, counted from 0 in each sequence of a packed row; None if each row is one sequence."""
    visible_until: Tensor | None = None
    """(B, T) int64: the position before which the keys lie that a token sees; T at padding. None: an encoder sees all
    tokens of its sequence, a decoder those up to itself. In a source with its target (UniLM §2.3) it is the length of
    the source for each of its tokens, and the next position for a token of the target. Only encoders read it."""
    label_positions: Tensor | None = None
    """(N,) int64: the flat positions b·T + t that predict a label, in order; None until `with_positions`."""
    token_positions: Tensor | None = None
    """(N,) int64: the flat positions of all real tokens, in order; None until `with_positions`."""
    padding: Literal["none", "right", "left"] | None = None
    """Where the rows have padding: left if any row starts with it; None until `with_positions`."""
    sequences: Sequences | None = None
    """Where the sequences of each row are; None for encoders, and until `with_positions`."""
    targets: Tensor | None = None
    """The target of each sequence, (B,) or (B, K); None if the batch has no targets. int64: a class (next sentence: 0
    if it follows, 1 if it does not, as in BERT), or K positions such as the start and end of a span; IGNORE_INDEX where
    unknown. fp32: a score, or K labels; NaN where unknown."""
    sample_ids: tuple[tuple[int, ...], ...] = ()
    """For each row the ids of its samples: one id, or several if the row is packed; see `data.collate.sample_id`.
    Empty if the student generated the text."""
    teachers: tuple[str, ...] = ()
    """For each row the name of the teacher that its examples ask for, "" for none; empty if the data name none."""
    requests: tuple[Future[TopK], ...] = ()
    """The answers to come from a teacher behind a server, one for each sequence; empty before they are requested."""
    copied_from: Batch | None = None
    """The batch on the CPU of which this one is a copy on a device; None on the CPU."""

    @property
    def mask(self) -> AttentionMask:
        """Which keys the tokens see, if a layer does not hide more of them."""
        return AttentionMask(self.attention_mask, visible_until_BT=self.visible_until)

    def counts(self) -> dict[Positions, Tensor]:
        """The number of positions of each kind in the batch, as scalars."""
        return {
            "tokens": (self.attention_mask != 0).sum(),
            "labels": (self.labels[:, 1:] != IGNORE_INDEX).sum(),  # the first is never learned, see `labels`
            "sequences": self.has_target().sum(),
        }

    def divisors(self) -> dict[Positions, Tensor]:
        """What the sums over a batch that stands alone are divided by: its own counts, at least 1."""
        return {name: count.clamp(min=1) for name, count in self.counts().items()}  # a batch without any divides 0 by 1

    def has_target(self) -> Tensor:
        """Which sequences have a target, or at least one of their K targets: (B,), bool."""
        if self.targets is None:
            return self.input_ids.new_zeros(len(self.input_ids)).bool()
        known = ~self.targets.isnan() if self.targets.is_floating_point() else self.targets != IGNORE_INDEX
        return known.flatten(1).any(1) if known.dim() > 1 else known

    def with_positions(self, *, shift: bool) -> Batch:
        """The same batch with `label_positions`, `token_positions`, `padding` and, for decoders, `sequences` filled in.

        Call it while the batch is on the CPU: on a GPU the host would have to wait for the result.

        Args:
            shift: if True, position i predicts label i+1 (decoders); if False, label i (masked tokens of encoders).
        """
        if self.label_positions is not None:
            return self
        rows_N = (predicted_labels(self.labels, shift=shift) != IGNORE_INDEX).flatten().nonzero()[:, 0]
        real_BT = self.attention_mask != 0
        padding: Literal["none", "right", "left"] = "right" if real_BT[:, 0].all() else "left"
        return replace(
            self,
            label_positions=rows_N,
            token_positions=real_BT.flatten().nonzero()[:, 0],
            padding="none" if real_BT.all() else padding,
            sequences=Sequences.of(self.attention_mask) if shift else None,
        )

    def without_positions(self) -> Batch:
        """The same batch as before `with_positions`."""
        return replace(self, label_positions=None, token_positions=None, padding=None, sequences=None, copied_from=None)

    def pad_to_multiple(self, multiple: int, longest: int) -> Batch:
        """The same batch with more padding on the right: its length is a multiple, but at most `longest`.

        The matrix units of a GPU work on tiles, and kernels that are compiled for a shape are used again.
        """
        length = self.input_ids.shape[1]
        more = min(-(-length // multiple) * multiple, longest) - length
        if more <= 0:
            return self
        assert self.label_positions is None, "the places of the labels depend on the length"
        from torch.nn import functional

        # Any token id will do at padding, which is masked; `visible_until` is the new length there.
        fills = {"labels": IGNORE_INDEX, "visible_until": length + more}
        longer: dict[str, Any] = {
            name: functional.pad(tensor, (0, more), value=fills.get(name, 0))
            for name, tensor in self._of_tokens().items()
        }
        return replace(self, copied_from=None, **longer)

    def select(self, rows: slice | list[int], longest: int | None = None) -> Batch:
        """Some rows of a batch without `label_positions`, and without padding on the right that none of them needs.

        Each row keeps at most its first `longest` tokens.
        """
        assert self.label_positions is None, "the places of the labels depend on the rows"
        real_T = (self.attention_mask[rows] != 0).any(0).nonzero()
        longest = self.input_ids.shape[1] if longest is None else longest
        length = min(int(real_T[-1]) + 1 if len(real_T) else 1, longest)
        cut: dict[str, Any] = {name: tensor[rows, :length] for name, tensor in self._of_tokens().items()}
        cut["copied_from"] = None
        if self.visible_until is not None:
            cut["visible_until"] = cut["visible_until"].clamp(max=length)  # at padding it is the length
        if self.targets is not None:
            cut["targets"] = self.targets[rows]
        numbers = range(len(self.input_ids))[rows] if isinstance(rows, slice) else rows
        for name in ("sample_ids", "teachers"):
            values = getattr(self, name)
            cut[name] = tuple(values[number] for number in numbers) if values else ()
        return replace(self, **cut)

    def _of_tokens(self) -> dict[str, Tensor]:
        """The tensors (B, T) that the batch has, by name."""
        names = ("input_ids", "attention_mask", "labels", "token_type_ids", "position_ids", "visible_until")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def flat_positions(self, kind: Positions) -> Tensor:
        """(N,): the positions b·T + t of one kind, real tokens or those that predict a label."""
        positions_N = self.token_positions if kind == "tokens" else self.label_positions
        assert positions_N is not None, "call with_positions first"
        return positions_N

    def row_labels(self, *, shift: bool) -> Tensor:
        """(N,): the label that each position of `label_positions` predicts."""
        assert self.label_positions is not None, "call with_positions first"
        return predicted_labels(self.labels, shift=shift).flatten().index_select(0, self.label_positions)

    def on_cpu(self) -> Batch:
        """The same batch on the CPU, where its values may be read: no GPU is asked for a batch that came from there."""
        return self.to("cpu") if self.copied_from is None else self.copied_from

    def to(self, device: torch.device | str) -> Batch:
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "copied_from"}
        # The loader pins its batches, so the copies to a GPU run beside the host's work. What comes back from a GPU is
        # read at once, and must have arrived.
        beside = getattr(device, "type", device) != "cpu"
        movable = {name: value for name, value in values.items() if hasattr(value, "to")}
        moved = {name: value.to(device, non_blocking=beside) for name, value in movable.items()}
        here = self if self.input_ids.device.type == "cpu" else self.copied_from
        return replace(self, copied_from=here if beside else None, **moved)


class Loader(Protocol):
    """The source of the batches of each step."""

    def micro_batches(self, step: int) -> list[Batch]:
        """The micro batches of this rank for a step (counted from 0)."""


@dataclass
class Taps:
    """Inner tensors of one forward pass, by aspect and layer (0-based)."""

    query: dict[int, Tensor] = field(default_factory=dict)
    """(B, H, T, D), after the rotary embedding if the model has one."""
    key: dict[int, Tensor] = field(default_factory=dict)
    """(B, G, T, D), after the rotary embedding if the model has one."""
    value: dict[int, Tensor] = field(default_factory=dict)
    """(B, G, T, D)."""
    ffn_up: dict[int, Tensor] = field(default_factory=dict)
    """(B, T, F), output of the up projection, before the activation."""
    ffn_gate: dict[int, Tensor] = field(default_factory=dict)
    """(B, T, F), output of the gate projection, before the activation; empty if the model has no gate."""
    ffn_down: dict[int, Tensor] = field(default_factory=dict)
    """(B, T, W), output of the down projection, before the residual."""
    hidden: dict[int, Tensor] = field(default_factory=dict)
    """(B, T, W), output of the layer."""
    embedding: dict[int, Tensor] = field(default_factory=dict)
    """(B, T, W), input of the first layer; the only key is 0."""
    scaling: dict[int, float] = field(default_factory=dict)
    """Factor on query·key before the softmax; recorded together with the query."""
    mask: AttentionMask | None = None
    """Which keys of the batch the queries see, if a layer does not hide more of them."""
    projected: dict[Aspect, dict[int, Tensor]] = field(default_factory=dict)
    """Tapped tensors with their heads concatenated, mapped to the teacher's width by a learned matrix: (B, T, teacher's
    width)."""


class LogitScale(NamedTuple):
    """What a model does to the output z of its LM head: the logits are cap · tanh(factor · z / cap), or factor · z."""

    factor: float = 1.0
    """Cohere's logit_scale, or 1 / logits_scaling of Granite."""
    cap: float | None = None
    """Gemma's final_logit_softcapping; None without one."""

    @property
    def is_plain(self) -> bool:
        """Whether the logits are the output of the LM head itself."""
        return self.factor == 1 and self.cap is None

    def apply_(self, outputs: Tensor) -> Tensor:
        """Turn outputs of the LM head into logits, in place."""
        if self.factor != 1:
            outputs.mul_(self.factor)
        return outputs if self.cap is None else outputs.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return the derivative of the logits with respect to the outputs of the LM head, from the logits."""
        # tanh' = 1 - tanh²
        return self.factor if self.cap is None else (logits / self.cap).square_().neg_().add_(1).mul_(self.factor)


class HeadInputs(NamedTuple):
    """The inputs of the last linear of an LM head, from whose output rows · weightᵀ + bias the logits follow.

    The logits of some models follow in another way; those models give the logits themselves.
    """

    rows: Tensor
    """(N, K), rows at positions of one kind (labels or tokens); K is the model's width, or a factorized head's rank.
    Without a weight the logits, (N, V)."""
    weight: Tensor | None
    """(V, K); None if the rows are the logits."""
    bias: Tensor | None
    """(V,)."""
    scale: LogitScale = LogitScale()
    """The logits as a function of that output."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Rows, weight and bias."""
        return self.rows, self.weight, self.bias

    @property
    def heads(self) -> tuple[HeadInputs, ...]:
        """What the logits are computed from."""
        return (self,)


class TopK(NamedTuple):
    """The k most likely tokens of a teacher at positions of one kind; all other tokens are one more class, the rest."""

    tokens: Tensor
    """(N, k) int64, the most likely token first."""
    log_probs: Tensor
    """(N, k), at least fp32: the log-probabilities of these tokens at temperature 1."""
    rest: Mapping[float, Tensor]
    """Temperature t -> (N,): log Σ p^(1/t) over all other tokens, the log-mass of the rest beside log_probs / t."""

    @property
    def heads(self) -> tuple[HeadInputs, ...]:
        """None: no logits are computed."""
        return ()

    def at(self, here: slice | Tensor) -> TopK:
        return TopK(self.tokens[here], self.log_probs[here], {t: mass[here] for t, mass in self.rest.items()})


class OtherTokens(NamedTuple):
    """What a teacher with another tokenizer says of a batch: its own rows, and the rows of the student they belong to.

    Both have read the same text. A span is a stretch of it, as short as it can be, that begins and ends at the same
    bytes in both tokenizations. Of M rows of the teacher and N of the student; all but head and labels are on the CPU,
    because how many rows are compared is a value:
    """

    head: HeadInputs
    """The teacher's M rows, which predict the tokens of the spans in its own tokenization."""
    labels: Tensor
    """(M,): the token that each of them predicts."""
    spans: Tensor
    """(M,): the span of this token, counted from 0; -1 for a pair."""
    pairs: Tensor
    """(N,): for each row of the student whose token both tokenizers know, as a span of its own, the row of the teacher
    that predicts it; else -1."""
    student_spans: Tensor
    """(N,): for each other row of the student the span of the token that it predicts, -1 if it is in none."""
    starts: Tensor
    """(N,): for the row that predicts the first token of a span of `student_spans`, the row of the teacher that does;
    else -1."""
    num_spans: int
    """The number of the spans that are no pairs."""
    shared: tuple[Tensor, Tensor]
    """The ids of the K tokens that both tokenizers know, (K,) in the student's and (K,) in the teacher's numbers."""

    @property
    def heads(self) -> tuple[HeadInputs, ...]:
        """What the logits are computed from."""
        return (self.head,)


class JointRows(Protocol):
    """Rows whose distributions follow from several heads, or from one that several ranks share.

    See `losses/several.py` and `losses/vocabulary_shards.py`.
    """

    @property
    def heads(self) -> tuple[HeadInputs, ...]:
        """What the logits are computed from."""
        ...

    @property
    def num_rows(self) -> int:
        """The number of rows; where ranks must ask for logits together, that of the rank which has most."""
        ...

    def cut(self, vocabulary: int | None) -> JointRows:
        """The same with the first `vocabulary` tokens alone."""
        ...

    def logits_at(self, here: slice) -> Tensor:
        """The logits of some rows, (n, V); fewer, or none, where this rank has no more rows."""
        ...


TeacherRows = HeadInputs | TopK | OtherTokens | JointRows
"""What a teacher's distributions over tokens follow from, at positions of one kind."""


@dataclass
class Outputs:
    """The outputs of a model for one batch."""

    logits: Tensor | None
    """(B, T, V); None if the model has no LM head, or if `lm_head` holds the inputs of the logits instead."""
    taps: Taps
    sequence_logits: Tensor | None = None
    """(B, C), logits of a next-sentence or classification head (C = 1 if it predicts scores); or (B, K, C) of a head
    for spans, with K = 2 for start and end and C = T, -inf at padding; or the embeddings of sentences (B, W), if these
    are learned; None without such a head."""
    projected: Tensor | None = None
    """(B, teacher's W), a student's embeddings of sentences mapped by a learned matrix; None without one."""
    lm_head: Mapping[Positions, TeacherRows] = field(default_factory=dict)
    """In place of the logits, for each kind of positions at which they are compared."""
