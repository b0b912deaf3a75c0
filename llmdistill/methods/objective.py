"""What there is to learn in a run's batches, and the names that the output's terms have after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from llmdistill.batch import Positions


@dataclass(frozen=True)
class Objective:
    """What a run's batches have to be learnt: words (labels), a target for each sequence, or both."""

    tokens: bool = True
    sequences: Literal["classes", "scores"] | None = None

    def __post_init__(self) -> None:
        """A batch without either would leave the output nothing to say."""
        assert self.tokens or self.sequences is not None, "an objective is words, a target for each sequence, or both"


TOKENS = Objective()
"""Of decoders, and of encoders on masked words alone."""


class OutputTerm(NamedTuple):
    """The two names of one term of the output."""

    token_name: str
    """Where it stands on words, so at the labels."""
    sequence_name: str
    """Where it stands on what is said of each sequence."""

    def positions(self, objective: Objective) -> dict[str, Positions]:
        """The names that the term has under an objective, and what each is a sum over."""
        positions: dict[str, Positions] = {}
        if objective.tokens:
            positions[self.token_name] = "labels"
        if objective.sequences is not None:
            positions[self.sequence_name] = "sequences"
        return positions


LABEL = OutputTerm("label", "sequence_label")
"""What the data itself says."""

LOGITS = OutputTerm("logits", "sequence_logits")
"""Soft cross-entropy (MaKD eq. 18): of the language model's head, and of the one for next sentences or a task."""
