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
    dtype: Literal["auto", "int8"] = "auto"
    """hidden_states: their number format. auto: that of the teacher; int8: 8 bits with one scale for each token, a
    quarter of the bytes of fp32 and half of those of bf16. The command says how many nats a token this moves the
    teacher's distributions."""
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

    def __post_init__(self) -> None:
        if self.dtype == "int8" and self.content == "top_k":
            raise ValueError(
                "--cache.dtype int8 is for hidden states: leave it out, or take --cache.content hidden_states"
            )

    @property
    def stored_top_k(self) -> int | None:
        """The number of most likely tokens that are kept; None if hidden states are."""
        return self.top_k if self.content == "top_k" else None
