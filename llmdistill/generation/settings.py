"""The settings of a teacher's answers. The docstring under a field is its help text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmdistill.errors import FieldError


@dataclass(frozen=True, kw_only=True)
class ResponseConfig:
    """The prompts that the teacher answers, and how it generates the answers."""

    decoding: Literal["sample", "greedy"] = "sample"
    """sample: sample from the teacher's distribution; greedy: take the most likely token at each position."""
    temperature: float = 1.0
    """The logits are divided by this temperature before a token is sampled."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose total probability is at least top_p; 1 keeps all tokens."""
    top_k: int = 0
    """Sample from the top_k most likely tokens; 0 keeps all tokens."""
    seed: int = 0
    """Seed of the samples; the samples do not depend on the number of ranks."""
    no_repeat_ngram_size: int = 0
    """No n-gram of this length occurs twice in prompt and answer together; 0 switches this off."""
    batch_size: int | None = None
    """Number of prompts answered at once on each rank and saved together: an interrupted run loses at most these
    answers. The samples depend on batch_size. Default: 32, or 1024 with vLLM."""
    limit: int | None = None
    """Answer only this number of prompts, from the first one on."""
    max_prompt_length: int = 256
    """Maximum number of tokens of a prompt, including the template."""
    max_length: int = 512
    """An answer has at most max_length - max_prompt_length tokens."""
    long_prompts: Literal["error", "drop", "truncate"] = "error"
    """What happens to prompts longer than max_prompt_length: stop with an error, drop them, or keep only their end.
    The number of these prompts is always reported."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the teacher; auto: bf16 on a GPU that supports it, else fp32."""
    engine: Literal["auto", "hf", "vllm"] = "auto"
    """hf: transformers' generate, on one or several ranks; vllm: vLLM, one process for all GPUs; auto: vLLM if it is
    installed and can run this request, else hf."""

    def __post_init__(self) -> None:
        """Check the settings; Decoding checks the settings of the sampling.

        Raises:
            FieldError: a number is out of range.
        """
        for key, least in (("seed", 0), ("limit", 1), ("batch_size", 1)):
            value = getattr(self, key)
            if value is not None and value < least:
                raise FieldError(f"{key} is {value}: give {least} or more")
