"""The names that the output's terms have under an objective."""

from __future__ import annotations

from typing import NamedTuple

from llmdistill.batch import Positions
from llmdistill.objective import Objective


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
