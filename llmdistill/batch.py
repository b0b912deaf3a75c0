"""What flows between data, models, losses and methods.

Legend of shape letters, used as name suffixes throughout: B batch (sequences), T tokens, W model width,
H query heads, G key/value heads (G < H under grouped-query attention), D head width, F feed-forward width,
V vocabulary, N rows (tokens gathered from a batch).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a position that no loss looks at (the convention of torch and transformers)."""

Aspect = Literal["query", "key", "value", "ffn_up", "ffn_gate", "ffn_down", "hidden"]
"""What can be tapped in a layer."""

Positions = Literal["tokens", "labels"]
"""What a loss is a sum over: all real tokens, or those to be learnt."""

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


@dataclass(frozen=True)
class Batch:
    """One micro batch. Padding may stand on either side."""

    input_ids: Tensor
    """(B, T) int64."""
    attention_mask: Tensor
    """(B, T) int64, 1 at real tokens."""
    labels: Tensor
    """(B, T) int64: the token itself where it is to be learnt, else IGNORE_INDEX. Not shifted."""
    own_answers: bool = False
    """Whether the student wrote what the labels stand on (on-policy), so that only a teacher can judge it."""

    def num_labels(self) -> Tensor:
        """How many tokens are to be learnt, scalar; the first of a sequence has nothing before it to learn it from."""
        return (self.labels[:, 1:] != IGNORE_INDEX).sum()

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        return Batch(
            self.input_ids.to(device, non_blocking=True),
            self.attention_mask.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.own_answers,
        )


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
    scaling: dict[int, float] = field(default_factory=dict)
    """Factor on query·key before the softmax; kept with query."""


@dataclass
class Outputs:
    """What a model gave for one batch."""

    logits: Tensor
    """(B, T, V)."""
    taps: Taps
