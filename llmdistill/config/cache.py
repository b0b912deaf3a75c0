"""Settings of `llmdistill cache`, which keeps a teacher's outputs for later trainings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from llmdistill.config.marks import at_least


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """What a cache keeps, and how it is written."""

    content: Literal["hidden_states", "top_k"] = "hidden_states"
    """What is kept for each predicted token. hidden_states: the input of the last matrix of the LM head, from which the
    exact logits follow; top_k: the most likely tokens with their log-probabilities, and the mass of all others, which
    gives a lower bound of each divergence."""
    top_k: int = field(default=64, metadata=at_least(1))
    """top_k: number of tokens."""
    engine: Literal["auto", "hf", "vllm"] = "auto"
    """What runs the teacher. hf: the run's own teacher, on one or several ranks; vllm: vLLM, one process for all GPUs,
    which gives top_k at temperature 1 and nothing else; auto: vLLM if it is installed and can do it, else hf."""
    teacher: str = ""
    """Of several teachers the name of the one that is run. Default: teacher.model."""
    micro_batch_size: int = field(default=8, metadata=at_least(1))
    """hf: examples per rank and forward pass of the teacher."""
    shard_tokens: int = field(default=65536, metadata=at_least(1))
    """Tokens of the examples of one shard, approximately. A shard is written at once, from memory, and an interrupted
    command repeats at most one shard a rank."""

    @property
    def stored_top_k(self) -> int | None:
        """The number of most likely tokens that are kept; None if hidden states are."""
        return self.top_k if self.content == "top_k" else None
