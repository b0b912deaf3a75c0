"""The two models: what to learn from, and what learns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FactorizeMethod = Literal["svd", "kronecker"]
"""Kinds of factorisation."""


@dataclass(frozen=True, kw_only=True)
class FactorizeConfig:
    """How the teacher's matrices become products of two smaller ones, by svd or by kronecker.

    svd (MaKD §3.1) takes one of rank, ranks and target_params, kronecker (KroneckerBERT §3.2) one of shapes and
    target_params; each setting says whose it is.
    """

    rank: int | None = None
    """svd: one rank for every factorised linear."""
    ranks: dict[str, int] | None = None
    """svd: rank per module pattern, as {glob over module names: rank}; the first pattern that matches counts."""
    target_params: str | int | None = None
    """Parameters the student may have: a number (690000000), a short form (0.69B, 77.25M) or a share of the
    teacher (62%). svd takes the largest single rank that stays below it; kronecker, in `llmdistill compress` alone,
    the shapes with the smallest error on the weights, as far as those of three layers tell."""
    embedding_rank: int | None = None
    """svd: also factorise the token embedding (and a tied head with it) to this rank."""
    sigma: Literal["left", "balanced"] = "left"
    """svd: where the singular values go: into A = UΣ (left, the paper's choice), or √Σ on both sides (balanced, which
    kronecker always does)."""
    shapes: dict[str, str] | None = None
    """kronecker: rows x columns of the first factor A of W ≈ A ⊗ B per module pattern, W with a row an output, as
    {glob over module names: 384x48}, or dense for what stays; the first pattern that matches counts."""
    sums: int = 1
    """kronecker: products A ⊗ B that are added up for each matrix."""
    embedding_columns: int | None = None
    """kronecker: also make each row of the token embedding (and of a tied head) a product a ⊗ b, with a b of so many
    columns that all rows share; 1 keeps the table as it is, and without it a search for target_params chooses."""
    max_flops: str | None = None
    """kronecker: FLOPs that the layers' linears may take in the search for target_params, as a share of the teacher's
    such as 30%; without it they are not looked at."""


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

    model: str | None = "embedded:teacher"
    """Folder or hub name of a Hugging Face model, or of a peft adapter, which is merged into its base;
    embedded:teacher is the small one that ships with the package. null: a run without a teacher, by method sft on a
    task, of a model that student.model names."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the teacher; auto takes that of the run."""
    sharding: Literal["replicated", "zero3"] = "replicated"
    """replicated: every rank holds the whole teacher; zero3: each holds its share, whatever the student's stage."""


@dataclass(frozen=True, kw_only=True)
class StudentConfig:
    """The model that learns."""

    model: str | None = None
    """Folder or hub name of a student made before (by `llmdistill compress`, another run, or anyone); with it
    student.shape and student.factorize are not looked at, and with neither it nor a shape the teacher is factorised."""
    method: FactorizeMethod = "svd"
    """How the teacher becomes the student's starting point, where it is factorised: low-rank or Kronecker products."""
    shape: str | None = None
    """DEPTHxWIDTHxHEADS of a smaller student of the teacher's architecture, such as 6x384x12, or with its feed-forward
    width as a fourth number; without that the teacher's proportion is kept. Of student.factorize only embedding_rank,
    or embedding_columns by the method, is then looked at."""
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

    def __post_init__(self) -> None:
        """Refuse what no run can do.

        Raises:
            ValueError: adapters on a student that has no linears for them.
        """
        if self.method == "kronecker" and self.lora.rank is not None and self.model is None and self.shape is None:
            raise ValueError(
                "student.lora.rank: adapters go on linears, and the Kronecker factors of student.method kronecker are "
                "none: leave it out to train all weights, or take student.method svd"
            )
