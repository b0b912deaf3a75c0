"""Settings of the student."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from llmdistill.config.marks import COMMON, FREE, OVER_0, SHARE_BELOW_1, at_least, earlier_default, replaces, takes

FactorizeMethod = Literal["svd", "kronecker"]
"""Kinds of factorization."""
Allocation = Literal["uniform", "loss"]
"""Ways to spend a number of parameters on the ranks."""
FactorForm = Literal["plain", "pivoted"]
"""Ways to store a product of a low rank."""
RankMultiple = int | Literal["auto"]
"""The number of which ranks are multiples; auto chooses it by the shape of the matrix."""
EmbeddingRank = int | Literal["auto", "dense"]
"""The rank of the token embedding; auto chooses it by the predicted loss, dense keeps the table."""

_OTHER_SIZES = replaces(*(f"student.factorize.{name}" for name in ("rank", "ranks", "target_params", "shapes")))
_NO_SEARCH = replaces("student.factorize.allocation", "student.factorize.max_flops")
"""Given sizes leave no ranks to choose."""
_NO_WEIGHTS = replaces("student.factorize.weighting", "student.factorize.allocation")
_OF_KRONECKER = replaces(*(f"student.factorize.{name}" for name in ("embedding_columns", "max_flops", "sums")))
_OF_SVD = replaces(
    *(f"student.factorize.{name}" for name in ("sigma", "form", "rank_multiple", "embedding_rank")),
    "student.lora.rank",
    by=("kronecker",),
)


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """The data on which the teacher is measured: its inputs and gradients for a weighted factorization, or its
    activations for a student of a smaller shape (student.init important)."""

    data: str | None = None
    """File, hub name or embedded:NAME, of the kind in data.kind, or teacher for what the teacher writes itself;
    default: the run's training set; in `llmdistill compress` what a decoder writes itself."""
    examples: int | None = field(default=None, metadata=at_least(1) | earlier_default(512))
    """Number of examples. Default: 512; for the default start of a run 65,536 / data.max_length, but 64 to 512; 64 if
    `llmdistill compress` has the model write them."""
    held_out: int | None = field(default=None, metadata=at_least(0))
    """Number of further examples, which decide between ranks by the predicted loss and a single rank; 0 takes the
    former unchecked. student.init important needs none. Default: an eighth of `examples`."""
    seed: int = field(default=0, metadata=at_least(0))
    """Seed of the choice of the examples, and of the labels that are sampled from the teacher."""
    micro_batch_size: int = field(default=8, metadata=FREE | at_least(1))
    """Examples per rank and pass."""
    memory: float = field(default=16.0, metadata=FREE | OVER_0)
    """GiB that the measured matrices of one pass may take on each rank; with less memory the data are read in more
    passes, each for some of the layers."""
    folder: str | None = field(default=None, metadata=FREE)
    """Folder that keeps the measurement and the factors of every matrix. Students of another size, allocation or form
    (and, after gradients, of weighting activations) then need no other pass over the data, except for the held-out
    examples. An interrupted measurement continues, even in the middle of a pass. The folder takes the disk space of the
    statistics, and one and a half times the teacher's layers in fp32 for each weighting. Not for Kronecker products.
    Default: no folder."""

    @property
    def count(self) -> int:
        """The number of examples, which is the usual one until it is settled."""
        return 512 if self.examples is None else self.examples

    @property
    def checked(self) -> int:
        """The number of further examples that check ranks by the predicted loss."""
        return self.count // 8 if self.held_out is None else self.held_out


@dataclass(frozen=True, kw_only=True)
class FactorizeConfig:
    """How svd or kronecker replaces each matrix by a product of two smaller ones.

    svd (MaKD §3.1) takes one of rank, ranks and target_params, kronecker (KroneckerBERT §3.2) one of shapes and
    target_params; the text of each setting begins with the method that uses it.
    """

    rank: int | None = field(default=None, metadata=COMMON | _OTHER_SIZES | _NO_SEARCH)
    """svd: one rank for all factorized linears."""
    ranks: dict[str, int] | None = field(default=None, metadata=_OTHER_SIZES | _NO_SEARCH)
    """svd: rank for each module pattern, as {glob over module names: rank}; the first pattern that matches is used."""
    target_params: str | int | float | None = field(default=None, metadata=COMMON | _OTHER_SIZES)
    """Largest number of parameters of the student: a number (690000000), a short form (0.69B, 77.25M) or a share of the
    teacher's (62%). svd takes the largest ranks that fit, by `allocation` and rank_multiple; kronecker (only in
    `llmdistill compress`) the shapes with the smallest error on the weights, estimated from three layers."""
    embedding_rank: EmbeddingRank | None = field(default=None, metadata=earlier_default(None))
    """svd: also factorize the token embedding (and a head that is tied to it) to this rank. A weighting weights its
    rows by how often their tokens occur, and with gradients also its columns. auto (with allocation loss): the rank
    with which a student of target_params is nearest to its teacher on held-out examples; the table stays dense unless
    this saves a tenth of the divergence. dense: the table stays as it is. Default: auto if target_params is set and
    weighting is not, else dense."""
    sigma: Literal["left", "balanced"] = field(
        default="left", metadata=replaces("student.factorize.form", by=("balanced",))
    )
    """svd: the position of the singular values: left puts them into A = UΣ (the paper's choice), balanced puts √Σ on
    both sides (kronecker always does this)."""
    form: FactorForm | None = field(
        default=None, metadata=replaces("student.factorize.sigma", by=("pivoted",)) | earlier_default("plain")
    )
    """svd: how a product of rank r is stored. plain: as two factors of r (m + n) numbers for an (m, n) matrix; pivoted:
    r of the outputs are computed directly and the others from them, which takes r (m + n - r) numbers, so target_params
    allows higher ranks. Default: pivoted if target_params is set and weighting is not, else plain."""
    weighting: Literal["none", "activations", "gradients"] | None = field(
        default=None,
        metadata=replaces("student.factorize.allocation", unless=(None, "gradients")) | earlier_default("none"),
    )
    """svd, kronecker: what a factorized matrix keeps as well as it can. none: its entries (the papers' choice);
    activations: its outputs on the calibration data; gradients: the loss, predicted from the inputs and the gradients
    at the outputs. Default: gradients for svd if there are calibration data, as in every run; else none."""
    allocation: Allocation | None = field(default=None, metadata=earlier_default("uniform"))
    """svd: how target_params is spent. uniform: one rank for all matrices; loss: the ranks with the smallest predicted
    loss, which needs weighting gradients. Default: loss if target_params is set and weighting is not, else uniform."""
    rank_multiple: RankMultiple = field(
        default="auto",
        metadata=takes(lambda value: value == "auto" or value >= 1, "give auto, or 1 or more") | earlier_default(1),
    )
    """svd: the ranks for target_params are multiples of this number, which suits the matrix units of a GPU. auto: 64
    where the smaller side of a matrix is 1,024 or more, 8 from 256 on, and 1 below; ranks under 64 or 8 take the next
    smaller of these. 1: exact ranks. `rank` and `ranks` are never rounded."""
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    """Calibration data, for a weighted factorization or student.init important."""
    shapes: dict[str, str] | None = field(default=None, metadata=_OTHER_SIZES | _NO_SEARCH)
    """kronecker: rows x columns of the first factor A of W ≈ A ⊗ B for each module pattern, where each row of W is
    an output, as {glob over module names: 384x48}, or dense for linears that stay dense; the first pattern that
    matches is used."""
    sums: int = 1
    """kronecker: number of products A ⊗ B that are added up for each matrix."""
    embedding_columns: int | None = None
    """kronecker: also replace each row of the token embedding (and of a head that is tied to it) by a product a ⊗ b,
    where all rows share b, which has this number of columns; 1 keeps the table as it is. Default: a search for
    target_params chooses it."""
    max_flops: str | None = None
    """kronecker: limit on the FLOPs of the layers' linears in the search for target_params, as a share of the
    teacher's such as 30%; default: no limit."""

    def __post_init__(self) -> None:
        if self.allocation == "loss" and (self.target_params is None or self.weighting not in (None, "gradients")):
            raise ValueError(
                "student.factorize.allocation loss spends target_params by the predicted loss: give target_params and "
                "weighting gradients"
            )
        if self.embedding_rank == "auto" and not self.may_choose_ranks:
            raise ValueError(
                "student.factorize.embedding_rank auto takes its share of target_params by the predicted loss: give "
                "target_params, weighting gradients and allocation loss, or a number"
            )
        if self.embedding_rank == "auto" and self.calibration.checked == 0:
            raise ValueError(
                "student.factorize.embedding_rank auto is chosen on held-out calibration examples, and there are none: "
                "raise student.factorize.calibration.held_out, or give a number"
            )
        if self.form == "pivoted" and self.sigma != "left":
            raise ValueError(
                f"student.factorize.sigma is {self.sigma}, but pivoted factors have no singular values: set it back to "
                "left, or form to plain"
            )

    @property
    def is_weighted(self) -> bool:
        """Whether calibration data weight the factors; a start that is not settled yet counts as the plain SVD."""
        return self.weighting not in (None, "none")

    @property
    def may_choose_ranks(self) -> bool:
        """Whether the predicted loss chooses ranks, or may do so once the start is settled."""
        is_open = self.allocation is None and self.weighting is None
        return self.target_params is not None and (self.allocation == "loss" or is_open)

    @property
    def table_rank(self) -> int | None:
        """The rank of the token embedding, if it is given."""
        return self.embedding_rank if isinstance(self.embedding_rank, int) else None

    def with_one_rank(self) -> FactorizeConfig:
        """Return the settings of a student that needs no data to choose its ranks."""
        return replace(self, allocation="uniform", embedding_rank=self.table_rank)

    @property
    def stored_form(self) -> FactorForm:
        """`form`, which is plain until it is settled."""
        return self.form or "plain"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (peft): only the adapters are trained and saved in checkpoints, and they are merged into the
    final student."""

    rank: int | None = field(default=None, metadata=at_least(1, ", or leave it out to train all weights"))
    """Rank of the adapters; default: no adapters, the whole student is trained."""
    alpha: float = field(default=16.0, metadata=takes(lambda value: value > 0, "give a number over 0, 16 is usual"))
    """The output of the adapters is multiplied by alpha / rank."""
    dropout: float = field(default=0.0, metadata=SHARE_BELOW_1)
    """Dropout before the adapters."""
    targets: list[str] | None = None
    """Ends of the names of the linears that get adapters, such as q_proj; default: every linear of the layers,
    including the two factors of a factorized linear."""


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Weights of few bits in every nn.Linear of the layers, by torchao.

    The two factors of an SVD product are such linears. Norms and biases keep their format.
    """

    weights: Literal["none", "int8", "int4"] = "none"
    """int8, int4: the student learns with weights that are rounded to these integers in every forward pass, and is
    saved with them. Not under ZeRO-3."""
    group_size: int | None = field(default=None, metadata=at_least(2))
    """Number of weights in a row that share a scale; default: 32 for int4, the whole row for int8. A matrix whose
    number of inputs it does not divide, such as a factor of some ranks, has one scale per row."""
    packed: bool = False
    """Save two int4 weights in a byte, which `import llmdistill` reads; transformers and torchao alone keep each in a
    byte. Students that need llmdistill anyway, factorized or with an embedding that has a buffer (Gemma 3), are always
    packed."""
    embeddings: Literal["int8", "exact"] = "int8"
    """int8: the token embedding and the LM head, which learn as floats, are saved in int8 with one scale per row, even
    beside int4; of a factorized embedding, the factor with a row for each token. exact: they keep their format, and
    take most of a small model's file."""

    def __post_init__(self) -> None:
        if self.weights == "none" and (self.group_size is not None or self.packed or self.embeddings == "exact"):
            raise ValueError(
                "student.quantize has settings, but no weights: give student.quantize.weights int8 or int4"
            )
        if self.packed and self.weights != "int4":
            raise ValueError("student.quantize.packed puts two int4 weights into a byte: leave it out for int8")


@dataclass(frozen=True, kw_only=True)
class StudentConfig:
    """The model to train."""

    model: str | None = field(
        default=None,
        metadata=COMMON | _NO_WEIGHTS | replaces("student.shape", "student.assistants", "student.assistant_training"),
    )
    """Folder or hub name of an existing student; made by `llmdistill compress`, another run, or anyone. It replaces the
    shape and the weighting of a recipe; giving them together is an error. The other settings of student.factorize are
    ignored. Without model and shape, the run factorizes the teacher."""
    method: FactorizeMethod = field(default="svd", metadata=_OTHER_SIZES | _NO_WEIGHTS | _OF_KRONECKER | _OF_SVD)
    """Factorization that makes the student from the teacher, if the student is factorized: low-rank (svd) or
    Kronecker products."""
    shape: str | None = field(default=None, metadata=COMMON | _NO_WEIGHTS | replaces("student.model"))
    """DEPTHxWIDTHxHEADS of a smaller student of the teacher's architecture, such as 6x384x12; a fourth number sets
    the feed-forward width and a fifth the head width, which by default keep the teacher's proportions. Of
    student.factorize only calibration and embedding_rank (svd) or embedding_columns (kronecker) are then used."""
    init: Literal["random", "layers", "slice", "important"] = "random"
    """Initial weights of a student with a shape: random; layers: the weights of teacher layers, at the teacher's
    width; slice: as layers, but of each matrix only the first rows and columns, and of each head the first features;
    important: as slice, but the channels, heads and feed-forward neurons with the largest activations on the data of
    student.factorize.calibration."""
    layers: str | None = None
    """Teacher layers that init copies: spread (evenly from the first, 1, 3, 5 for 3 of 6), uniform (evenly to the last,
    2, 4, 6), first, last, important (those that change their input most on the calibration data), or numbers counted
    from 1 such as 1,3,5. Default: important for init important, else spread."""
    assistants: list[str] = field(default_factory=list, metadata=replaces("student.assistant_training", by=([],)))
    """Shapes of teacher assistants (MiniLM §3.3): the first assistant learns from the teacher, each further one from
    the one before it, and the student from the last, each in its own folder inside the run's folder."""
    assistant_training: dict[str, Any] = field(default_factory=dict)
    """Settings of train in which the assistants differ from the student, such as {global_batch_size: 256,
    learning_rate: 0.0003}; the others are the same for all."""
    factorize: FactorizeConfig = field(default_factory=FactorizeConfig)
    """The factorization."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """The adapters."""
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    """Weights of few bits."""
    forms: dict[str, Any] | None = None
    """Further forms of the student, from entry points of installed packages (llmdistill.forms): the settings of each
    under its name, such as {pruned: {share: 0.5}}."""

    @property
    def teacher_layers(self) -> str:
        """`layers`, or its default."""
        if self.layers is not None:
            return self.layers
        return "important" if self.init == "important" else "spread"

    @property
    def is_factorized(self) -> bool:
        """Whether the student is made of the teacher's matrices."""
        return self.model is None and self.shape is None

    @property
    def weighs_by_default(self) -> bool:
        """Whether the run chooses how the teacher's matrices are weighted, which is by gradients where it can."""
        return self.is_factorized and self.method == "svd" and self.factorize.weighting is None

    @property
    def starts_near(self) -> bool:
        """Whether the student starts near its teacher: it is given, or data choose what it keeps of the teacher."""
        of_data = self.factorize.is_weighted if self.is_factorized else self.measures_importance
        return self.model is not None or self.weighs_by_default or of_data

    @property
    def measures_importance(self) -> bool:
        """Whether a student with a shape takes parts of the teacher that calibration data choose."""
        if self.model is not None or self.shape is None or self.init == "random":
            return False
        return "important" in (self.init, self.teacher_layers)

    def without_factorization(self, *, model: str | None = None, shape: str | None = None) -> StudentConfig:
        """Return the settings for a student that is not factorized from the teacher: a model, or one of a shape."""
        factorize = replace(self.factorize, weighting="none", allocation="uniform")
        return replace(
            self,
            model=model,
            shape=shape,
            assistants=[],
            assistant_training={},
            factorize=factorize,
            quantize=self.quantize if shape is None else QuantizeConfig(),  # assistants teach in full precision
            forms=self.forms if shape is None else None,
        )
