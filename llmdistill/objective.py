"""What the batches of a run have to be learnt; a task says it, and methods build their terms after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Objective:
    """Tokens (at the labels), a target for each sequence, or both."""

    tokens: bool = True
    sequences: Literal["classes", "scores"] | None = None

    def __post_init__(self) -> None:
        """Assert that there is something to learn."""
        assert self.tokens or self.sequences is not None, "an objective is tokens, a target for each sequence, or both"


TOKENS = Objective()
"""The objective of decoders, and of encoders that learn masked tokens alone."""
