"""Settings of generating and scoring answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from llmdistill.errors import FieldError


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How answers are generated and scored. All defaults except `decoding` follow MiniLLM's protocol."""

    decoding: Literal["sample", "greedy"] = "sample"
    """sample: temperature 1, top_p 1, no top_k, one pass per seed; greedy: one pass."""
    seeds: list[int] = field(default_factory=lambda: [10, 20, 30, 40, 50])
    """Seeds of the sampling passes; the reported ROUGE-L is their mean."""
    no_repeat_ngram_size: int = 6
    """No n-gram of this length occurs twice in an answer; 0 switches it off."""
    batch_size: int = 32
    """Number of prompts in a generation batch on each rank."""
    limit: int | None = None
    """Score only the first so many examples of each set."""
    models: list[Literal["teacher", "untrained", "student"]] = field(
        default_factory=lambda: ["teacher", "untrained", "student"]
    )
    """The models of a run to score."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            FieldError: a number is out of its range, or sampling has no seed.
        """
        for key, least in (("no_repeat_ngram_size", 0), ("batch_size", 1), ("limit", 1)):
            value = getattr(self, key)
            if value is not None and value < least:
                raise FieldError(f"{key} is {value}: give {least} or more")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise FieldError(f"seeds is {self.seeds}: give at least one, each once and none below 0")
