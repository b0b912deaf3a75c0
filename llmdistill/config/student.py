"""The two models: what to learn from, and what learns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class FactorizeConfig:
    """How the teacher's matrices become products of two (MaKD §3.1). One of rank, ranks, target_params."""

    rank: int | None = None
    """One rank for every factorised linear."""
    ranks: dict[str, int] | None = None
    """Rank per module pattern, as {glob over module names: rank}; the first pattern that matches counts."""
    target_params: str | int | None = None
    """Parameters the student may have: a number (690000000), a short form (0.69B, 77.25M) or a share of the
    teacher (62%); the largest single rank that stays below it is taken."""
    embedding_rank: int | None = None
    """Also factorise the token embedding (and a tied head with it) to this rank."""
    sigma: Literal["left", "balanced"] = "left"
    """Where the singular values go: into A = UΣ (left, the paper's choice), or √Σ on both sides (balanced)."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (peft): they alone are trained and saved in checkpoints, and merged into the final student."""

    rank: int | None = None
    """Rank of the adapters; without it all of the student is trained."""
    alpha: float = 16.0
    """The adapters' output is multiplied by alpha / rank."""
    dropout: float = 0.0
    """Dropout in front of the adapters."""
    targets: list[str] | None = None
    """Ends of the names of the linears to adapt, such as q_proj; without it every linear of the layers, the two factors
    of a factorised one included."""

    def __post_init__(self) -> None:
        """Refuse what is no adapter.

        Raises:
            ValueError: a number is out of its range.
        """
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"student.lora.rank is {self.rank}: give 1 or more, or leave it out to train all weights")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"student.lora.dropout is {self.dropout}: give a number from 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """The model to learn from. It runs in evaluation mode and without gradients."""

    model: str = "embedded:teacher"
    """Folder or hub name of a Hugging Face model, or of a peft adapter, which is merged into its base;
    embedded:teacher is the small one that ships with the package."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the teacher; auto takes that of the run."""
    sharding: Literal["replicated", "zero3"] = "replicated"
    """replicated: every rank holds the whole teacher; zero3: each holds its share, whatever the student's stage."""
    ahead: bool = False
    """On GPUs, with accumulation: let the teacher run one micro batch ahead, on a stream of its own, where the first
    steps show that memory allows it and that it pays. Not yet tried on a GPU."""

    def __post_init__(self) -> None:
        """Refuse what no run can do.

        Raises:
            ValueError: settings that exclude each other.
        """
        if self.ahead and self.sharding == "zero3":
            raise ValueError("teacher.ahead needs the whole teacher on every rank: set teacher.sharding to replicated")


@dataclass(frozen=True, kw_only=True)
class StudentConfig:
    """The model that learns."""

    model: str | None = None
    """Folder or hub name of a student made before (by `llmdistill compress`, another run, or anyone); with it
    student.shape and student.factorize are not looked at, and with neither it nor a shape the teacher is factorised."""
    method: Literal["svd"] = "svd"
    """How the teacher becomes the student's starting point, where it is factorised."""
    shape: str | None = None
    """DEPTHxWIDTHxHEADS of a smaller student of the teacher's architecture, such as 6x384x12, or with its feed-forward
    width as a fourth number; without that the teacher's proportion is kept. Of student.factorize only embedding_rank is
    then looked at."""
    init: Literal["random", "layers", "slice"] = "random"
    """Weights of a student with a shape: random; layers: those of teacher layers, at the teacher's width; slice: the
    same, of each matrix the first rows and columns, of each head the first features."""
    layers: str = "spread"
    """Teacher layers that init takes: spread (evenly, every second for half of them), first, last, or numbers from 1
    such as 1,3,5."""
    assistants: list[str] = field(default_factory=list)
    """Shapes of teacher assistants (MiniLM §3.3): the first learns from the teacher, each next one from the one before,
    the student from the last; all by the same settings, each in a folder of its own in the run's."""
    factorize: FactorizeConfig = field(default_factory=FactorizeConfig)
    """The factorisation."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters."""
