"""Generation loop and metrics."""

from llmdistill.scoring.rouge import rouge_l

__all__ = ["rouge_l"]
