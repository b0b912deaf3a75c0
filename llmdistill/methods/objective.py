"""The names of the terms on the models' outputs, under an objective."""

from __future__ import annotations

from typing import NamedTuple

from llmdistill.batch import Positions
from llmdistill.objective import Objective


class OutputTerm(NamedTuple):
    """The two names of one term on the outputs."""

    token_name: str
    """Its name for tokens, at the positions of the labels."""
    sequence_name: str
    """Its name for the targets of sequences."""

    def positions(self, objective: Objective) -> dict[str, Positions]:
        """The names of the term under an objective, each with the kind of positions that it sums over."""
        positions: dict[str, Positions] = {}
        if objective.tokens:
            positions[self.token_name] = "labels"
        if objective.sequences is not None:
            positions[self.sequence_name] = "sequences"
        return positions


LABEL = OutputTerm("label", "sequence_label")
"""The loss on the labels of the data."""

LOGITS = OutputTerm("logits", "sequence_logits")
"""Soft cross-entropy (MaKD eq. 18) on the logits of the lm_head, and of the head for next sentences or a task."""
