"""Settings of the suites that run several models as they are, side by side: nothing is fine-tuned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from llmdistill.config.marks import at_least, distinct, takes


@dataclass(frozen=True, kw_only=True)
class SideBySideConfig:
    """The models, and how they run."""

    model: list[str] = field(metadata=distinct())
    """Folders or hub names of models, separated by commas. The folder of a run stands for its teacher, its untrained
    student and its student. NAME=FOLDER gives a model the name that the report shows; for a run this is its student."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the models; auto is bf16 on a GPU that supports it, else fp32."""
    output_dir: str | None = None
    """Folder for the results and report.md; default: a folder with the name of the suite in the folder of the run, or
    in runs/ with a folder for the model."""


@dataclass(frozen=True, kw_only=True)
class ChunksConfig(SideBySideConfig):
    """The encoders whose layers are compared, and the spans that are clustered."""

    data: str
    """File in the format of CoNLL-2000, such as its train.txt, which Jawahar et al. take: a line for each word with its
    part of speech and its chunk tag (B-NP, I-NP, O), and an empty line after each sentence."""
    chunks: int = field(default=3000, metadata=at_least(1))
    """Labeled chunks that are drawn; all of them if the file has fewer."""
    unlabeled: int = field(default=500, metadata=at_least(0))
    """Spans of words outside of chunks that are drawn; they are a label of their own."""
    held_out: int = field(default=500, metadata=at_least(0))
    """Spans of both kinds that k-means does not see and that are scored; 0 scores those that it sees."""
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5], metadata=distinct(0, ", none below 0"))
    """Seeds, separated by commas. Each draws its own spans and its own first centers."""
    batch_size: int = field(default=16, metadata=at_least(1))
    """Sequences in a forward pass."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(SideBySideConfig):
    """The models whose attention is drawn (the first is the reference), and texts."""

    text: str | None = None
    """The text."""
    data: str | None = None
    """A plain text file instead, whose first lines are the texts."""
    examples: int = field(default=1, metadata=at_least(1))
    """Number of lines of the file."""
    max_length: int = field(default=40, metadata=at_least(2))
    """Largest number of tokens of a text, with special tokens; the rest is cut off."""
    layers: list[int] | None = None
    """The layer, counted from 1: one for all models, or one for each of them, separated by commas; default: the last
    layer of each model."""
    heads: list[int] | None = field(default=None, metadata=distinct())
    """Heads, counted from 1 and separated by commas, which have a row each; default: the mean of all heads."""

    def __post_init__(self) -> None:
        if (self.text is None) == (self.data is None):
            raise ValueError("--text or --data: give one of them, a text or a file of texts")


@dataclass(frozen=True, kw_only=True)
class SpeedConfig(SideBySideConfig):
    """The models to time, with speed-ups against the first, and the batches.

    The defaults are those of MiniLM Table 4, PKD and TinyBERT.
    """

    shapes: list[str] = field(
        default_factory=list, metadata=takes(lambda shapes: len(set(shapes)) == len(shapes), "give each once")
    )
    """Shapes such as 6x768x12,6x384x12, separated by commas: models of the first one's family with random weights,
    whose time is that of trained ones."""
    batches: int = field(default=100, metadata=at_least(1))
    """Number of batches, which every model reads."""
    batch_size: int = field(default=128, metadata=at_least(1))
    """Sequences in a batch."""
    max_length: int = field(default=128, metadata=at_least(1))
    """Number of tokens in a sequence, after padding."""
    task: str | None = None
    """Read the training examples of a task of GLUE, such as qnli, padded to the longest of their batch only. Default:
    sequences of max_length random tokens, as the papers pad every example to max_length."""
    data_dir: str = "glue"
    """Folder of the task's files."""
    training: bool = False
    """Time a whole training step as well: forward pass, backward pass and AdamW (KroneckerBERT A.1)."""
    warmup: int = field(default=3, metadata=at_least(0))
    """Number of batches before the others that are not timed."""


@dataclass(frozen=True, kw_only=True)
class ZeroShotConfig(SideBySideConfig):
    """The decoders to score, and the tasks of lm-evaluation-harness."""

    tasks: list[str] = field(metadata=distinct())
    """Tasks, groups or tags of lm-evaluation-harness, separated by commas, such as arc_easy,hellaswag,piqa."""
    task_dir: str | None = None
    """Folder with tasks of your own, in the harness's YAML; they are added to those that come with it."""
    num_fewshot: int | None = field(default=None, metadata=at_least(0))
    """Number of solved examples before each question; default: as the task says, mostly 0."""
    limit: int | None = field(default=None, metadata=at_least(1))
    """Score only the first so many examples of each task, for a quick test."""
    batch_size: int = field(default=16, metadata=at_least(1))
    """Sequences in a forward pass."""
    max_length: int | None = field(default=None, metadata=at_least(1))
    """Largest number of tokens of a question and its answer, whose start is cut off; default: the model's positions."""


@dataclass(frozen=True, kw_only=True)
class MtebConfig(SideBySideConfig):
    """The encoders to score, and the tasks of MTEB."""

    tasks: list[str] | None = field(default=None, metadata=distinct())
    """Tasks of MTEB, separated by commas, such as STSBenchmark,Banking77Classification.v2."""
    benchmark: str | None = None
    """A benchmark of MTEB instead, which stands for its tasks, such as "MTEB(eng)" for the English one."""
    languages: list[str] | None = field(default=None, metadata=distinct())
    """Score --tasks only in these languages, by their three letters (ISO 639-3), separated by commas: eng,deu."""
    batch_size: int = field(default=32, metadata=at_least(1))
    """Texts in a forward pass."""
    max_length: int | None = field(default=None, metadata=at_least(1))
    """Largest number of tokens of a text, whose end is cut off; default: as the files of sentence-transformers beside
    the model say, else 512, and never more than the model's positions."""

    def __post_init__(self) -> None:
        if (self.tasks is None) == (self.benchmark is None):
            raise ValueError("--tasks or --benchmark: give one of them, names of tasks or the name of a benchmark")
        if self.benchmark is not None and self.languages is not None:
            raise ValueError("--languages: a benchmark has its own languages; leave it out, or give --tasks")
