"""The learning objective of a run: the task defines it, and the methods build their loss terms from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from llmdistill.batch import Batch, LossSum, Positions

if TYPE_CHECKING:
    from torch import Tensor

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
"""How the tokens' outputs become the embedding of their sentence, by the names of sentence-transformers."""

CompareLogits = Callable[["Tensor", "Tensor", "Tensor"], LossSum]
"""A divergence: a function of the logits of student and teacher, (N, ..., C), and of which of the N count, (N,)."""


@dataclass(frozen=True)
class Pooling:
    """How the outputs of an encoder become the embedding of a sentence."""

    modes: tuple[PoolingMode, ...] = ("mean",)
    """One or more modes; the results of several are side by side."""
    normalize: bool = False
    """Whether the embedding is divided by its length."""


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What the output of a task's head learns: the labels of the batch, and the output of the teacher."""

    label_loss: Callable[[Tensor, Batch], LossSum] | None
    """Function of the student's output and the batch; None if only a teacher tells what to learn."""
    compare: Callable[[Tensor, Tensor, Batch, CompareLogits], LossSum] | None
    """Function of the outputs of student and teacher, the batch, and the divergence that the method has chosen; None if
    the outputs are no logits or scores."""
    own_measure: str | None = None
    """How `compare` is called in the log if it compares in a way of its own and ignores the divergence."""
    positions: Positions = "sequences"
    """What is counted: sequences with a target (`Batch.targets`), or tokens with a label (`Batch.labels`)."""
    prefix: str = "sequence_"
    """Precedes the names of the terms in the log."""
    num_classes: Callable[[Any, Batch], int] | None = None
    """How many classes a guess at random chooses from, by the model's config and the batch; None without classes."""
    from_inputs: Callable[[Mapping[str, Any]], tuple[Tensor | None, Tensor | None]]
    """`Batch.labels` and `Batch.targets` of a batch that a collator of transformers made; None for a missing one."""
    of_zeros: Callable[[Tensor], Tensor | None]
    """`Batch.targets` of a batch whose values do not matter, from its (B, T) zeros: the dry run takes it."""
    is_per_token: bool = False
    """Whether the output has a place for each token, so that its size is that of the batch."""


@dataclass(frozen=True)
class Objective:
    """What the models learn: tokens of the vocabulary at the labels, the targets of a task's head, or both."""

    tokens: bool = True
    targets: Targets | None = None
    label_smoothing: float = 0.0
    """Share of each token's label that is spread evenly over the vocabulary."""
    pooling: Pooling | None = None
    """How both models make the embeddings of sequences; None if they learn none."""

    def __post_init__(self) -> None:
        """Assert that the objective is not empty."""
        assert self.tokens or self.targets is not None, "an objective is tokens, the targets of a head, or both"

    @property
    def positions(self) -> Positions:
        """What the labels of the objective are counted by."""
        return "labels" if self.tokens or self.targets is None else self.targets.positions


TOKENS = Objective()
"""The objective of decoders, and of encoders that learn only masked tokens."""
