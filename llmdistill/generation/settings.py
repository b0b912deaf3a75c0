"""The settings of a teacher's answers: typed, keyword-only, frozen. The docstring under a field is its help text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llmdistill.errors import FieldError


@dataclass(frozen=True, kw_only=True)
class ResponseConfig:
    """What is asked of the teacher, and how it answers."""

    decoding: Literal["sample", "greedy"] = "sample"
    """sample: draw from the teacher's distribution; greedy: take the likeliest token each time."""
    temperature: float = 1.0
    """The logits are divided by it before a token is drawn."""
    top_p: float = 1.0
    """Draw from the fewest tokens that have this probability together; 1 keeps all."""
    top_k: int = 0
    """Draw from the likeliest so many; 0 keeps all."""
    seed: int = 0
    """Seed of the samples; they do not depend on the number of ranks."""
    no_repeat_ngram_size: int = 0
    """No n-gram of this length twice in prompt and answer; 0 switches it off."""
    batch_size: int | None = None
    """Prompts answered at once on each rank, and kept together: a kill loses at most these. Samples depend on it.
    Without it 32, or 1024 with vLLM."""
    limit: int | None = None
    """Answer only the first so many prompts."""
    max_prompt_length: int = 256
    """Most tokens a prompt may have, template included."""
    max_length: int = 512
    """An answer has at most max_length - max_prompt_length tokens."""
    long_prompts: Literal["error", "drop", "truncate"] = "error"
    """What happens to prompts over max_prompt_length: stop, leave them out, or keep their end. Always said."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the teacher; auto is bf16 on a GPU that has it, else fp32."""
    engine: Literal["auto", "hf", "vllm"] = "auto"
    """hf: transformers' generate, on one rank or several; vllm: vLLM, one process for all GPUs; auto: vLLM where it is
    installed and can run this request."""

    def __post_init__(self) -> None:
        """Refuse what cannot be generated; what a token may be drawn from is looked at by Decoding.

        Raises:
            FieldError: a number is out of its range.
        """
        for key, least in (("seed", 0), ("limit", 1), ("batch_size", 1)):
            value = getattr(self, key)
            if value is not None and value < least:
                raise FieldError(f"{key} is {value}: give {least} or more")
