"""Settings of the timing of models side by side."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmdistill.config.side_by_side import SideBySideConfig
from llmdistill.errors import check_least


@dataclass(frozen=True, kw_only=True)
class SpeedConfig(SideBySideConfig):
    """The models to time, with speed-ups against the first, and the batches. The defaults are those of MiniLM Table 4,
    PKD and TinyBERT."""

    shapes: list[str] = field(default_factory=list)
    """Shapes such as 6x768x12,6x384x12, separated by commas: models of the first one's family with random weights,
    whose time is that of trained ones."""
    batches: int = 100
    """Number of batches, which every model reads."""
    batch_size: int = 128
    """Sequences in a batch."""
    max_length: int = 128
    """Number of tokens in a sequence, after padding."""
    task: str | None = None
    """Read the training examples of a task of GLUE, such as qnli, padded to the longest of their batch only. Default:
    sequences of max_length random tokens, as the papers pad every example to max_length."""
    data_dir: str = "glue"
    """Folder of the task's files."""
    training: bool = False
    """Time a whole training step as well: forward pass, backward pass and AdamW (KroneckerBERT A.1)."""
    warmup: int = 3
    """Number of batches before the others that are not timed."""

    def __post_init__(self) -> None:
        """Raise a ValueError if there is no model, a name occurs twice, or a number is out of its range."""
        super().__post_init__()
        check_least(self, 1, "batches", "batch_size", "max_length", prefix="--")
        check_least(self, 0, "warmup", prefix="--")
        if len(set(self.shapes)) < len(self.shapes):
            raise ValueError(f"--shapes {self.shapes}: give each once")
