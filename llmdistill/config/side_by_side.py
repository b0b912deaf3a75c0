"""Settings of the suites that run several models as they are, side by side: nothing is fine-tuned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from llmdistill.errors import check_least


@dataclass(frozen=True, kw_only=True)
class SideBySideConfig:
    """The models, and how they run."""

    model: list[str]
    """Folders or hub names of models, separated by commas. The folder of a run stands for its teacher, its untrained
    student and its student. NAME=FOLDER gives a model the name that the report shows; for a run this is its student."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the models; auto is bf16 on a GPU that supports it, else fp32."""
    output_dir: str | None = None
    """Folder for the results and report.md; default: a folder with the name of the suite in the folder of the run, or
    in runs/ with a folder for the model."""

    def __post_init__(self) -> None:
        """Raise a ValueError if a list is empty, a name occurs twice, or a number is out of its range."""
        self._check_list("model")

    def _check_list(self, key: str) -> None:
        values = getattr(self, key)
        if not values or len(set(values)) < len(values):
            raise ValueError(f"--{key} {values}: give one or more, each once")


@dataclass(frozen=True, kw_only=True)
class ChunksConfig(SideBySideConfig):
    """The encoders whose layers are compared, and the spans that are clustered."""

    data: str
    """File in the format of CoNLL-2000, such as its train.txt, which Jawahar et al. take: a line for each word with its
    part of speech and its chunk tag (B-NP, I-NP, O), and an empty line after each sentence."""
    chunks: int = 3000
    """Labeled chunks that are drawn; all of them if the file has fewer."""
    unlabeled: int = 500
    """Spans of words outside of chunks that are drawn; they are a label of their own."""
    held_out: int = 500
    """Spans of both kinds that k-means does not see and that are scored; 0 scores those that it sees."""
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5])
    """Seeds, separated by commas. Each draws its own spans and its own first centers."""
    batch_size: int = 16
    """Sequences in a forward pass."""

    def __post_init__(self) -> None:
        """Raise a ValueError if a list is empty, a value occurs twice, or a number is out of its range."""
        super().__post_init__()
        check_least(self, 1, "chunks", "batch_size", prefix="--")
        check_least(self, 0, "unlabeled", "held_out", prefix="--")
        self._check_list("seeds")
        if min(self.seeds) < 0:
            raise ValueError(f"--seeds {self.seeds}: give none below 0")


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(SideBySideConfig):
    """The models whose attention is drawn, the first one as the reference, and the texts that they read."""

    text: str | None = None
    """The text."""
    data: str | None = None
    """A plain text file instead, whose first lines are the texts."""
    examples: int = 1
    """Number of lines of the file."""
    max_length: int = 40
    """Largest number of tokens of a text, with special tokens; the rest is cut off."""
    layers: list[int] | None = None
    """The layer, counted from 1: one for all models, or one for each of them, separated by commas; default: the last
    layer of each model."""
    heads: list[int] | None = None
    """Heads, counted from 1 and separated by commas, which have a row each; default: the mean of all heads."""

    def __post_init__(self) -> None:
        """Raise a ValueError if a number is out of its range, or there are no texts or two sources of them."""
        super().__post_init__()
        check_least(self, 1, "examples", prefix="--")
        check_least(self, 2, "max_length", prefix="--")
        if (self.text is None) == (self.data is None):
            raise ValueError("--text or --data: give one of them, a text or a file of texts")
        if self.heads is not None:
            self._check_list("heads")
