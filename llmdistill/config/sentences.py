"""Settings of sentences, whose embeddings are learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SentencesConfig:
    """How the embeddings of sentences are made. Files of sentence-transformers beside the teacher say it by default."""

    pooling: Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"] | None = None
    """How the outputs of the tokens become the embedding; default: as in the teacher's 1_Pooling/config.json, and
    mean without it."""
    triples: bool = False
    """The training set has rows of a query (or anchor), a positive and a negative, which stay together in a batch, for
    embedding.margin. Batches are then counted in triples."""
    normalize: bool | None = None
    """Whether an embedding is divided by its length; default: whether the teacher's modules.json says so."""
