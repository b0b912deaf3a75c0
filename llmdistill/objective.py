"""The learning objective of a run: the task defines it, and the methods build their loss terms from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Objective:
    """What the models learn: tokens (at the labels), a target for each sequence, or both.

    The target of a sequence is a class, a score, or a span: the positions of its first and its last token.
    """

    tokens: bool = True
    sequences: Literal["classes", "scores", "spans"] | None = None
    label_smoothing: float = 0.0
    """Share of each token's label that is spread evenly over the vocabulary."""

    def __post_init__(self) -> None:
        """Assert that the objective is not empty."""
        assert self.tokens or self.sequences is not None, "an objective is tokens, a target for each sequence, or both"


TOKENS = Objective()
"""The objective of decoders, and of encoders that learn only masked tokens."""
