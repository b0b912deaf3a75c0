"""The learning objective of a run: the task defines it, and the methods build their loss terms from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
"""How the tokens' outputs become the embedding of their sentence, by the names of sentence-transformers."""


@dataclass(frozen=True)
class Pooling:
    """How the outputs of an encoder become the embedding of a sentence."""

    modes: tuple[PoolingMode, ...] = ("mean",)
    """One or more modes; the results of several are side by side."""
    normalize: bool = False
    """Whether the embedding is divided by its length."""


@dataclass(frozen=True)
class Objective:
    """What the models learn: tokens (at the labels), a target for each sequence, or both.

    The target of a sequence is a class, a score, a span (the positions of its first and its last token), or the
    embedding that the teacher gives it.
    """

    tokens: bool = True
    sequences: Literal["classes", "scores", "spans", "embeddings"] | None = None
    label_smoothing: float = 0.0
    """Share of each token's label that is spread evenly over the vocabulary."""
    pooling: Pooling | None = None
    """How both models make the embeddings of sequences; None if they learn none."""

    def __post_init__(self) -> None:
        """Assert that the objective is not empty, and that embeddings and their pooling come together."""
        assert self.tokens or self.sequences is not None, "an objective is tokens, a target for each sequence, or both"
        assert (self.sequences == "embeddings") == (self.pooling is not None), "embeddings are pooled, nothing else is"


TOKENS = Objective()
"""The objective of decoders, and of encoders that learn only masked tokens."""
