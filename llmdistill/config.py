"""Every setting of a run: typed, keyword-only, frozen. The docstring under a field is its help text."""

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
class MakdConfig:
    """The terms of MaKD (eq. 12-19), where they act and how much they count. A weight of 0 drops the term."""

    matrix_layers: str = "lower"
    """Layers of the matrix losses: lower, upper, all, none, or numbers from 1 such as 1-3,6."""
    layer_layers: str = "upper"
    """Layers of the attention and hidden-state losses, in the same notation."""
    query: float = 1.0
    """Weight of the queries' MSE (eq. 15)."""
    key: float = 1.0
    """Weight of the keys' MSE (eq. 15)."""
    value: float = 1.0
    """Weight of the values' MSE (eq. 15)."""
    ffn_up: float = 1.0
    """Weight of the MSE of the up projection's output (eq. 16)."""
    ffn_gate: float = 1.0
    """Weight of the MSE of the gate projection's output, in models that have one (eq. 16)."""
    ffn_down: float = 1.0
    """Weight of the MSE of the down projection's output (eq. 16)."""
    attention: float = 1.0
    """Weight of KL(A_student || A_teacher) (eq. 12)."""
    hidden: float = 1.0
    """Weight of the MSE of the layers' outputs (eq. 13)."""
    logits: float = 1.0
    """Weight of the soft cross-entropy on the logits (eq. 18)."""
    label: float = 0.0
    """Weight of the cross-entropy on the labels (not in the paper)."""
    temperature: float = 1.0
    """Temperature of the soft cross-entropy (t in eq. 18)."""
    normalize_mse: bool = False
    """Divide each MSE by the variance of the teacher's features at that token."""


@dataclass(frozen=True, kw_only=True)
class KdConfig:
    """Word-level distillation of the output: a divergence to the teacher, and the labels beside it."""

    divergence: Literal["forward_kl", "reverse_kl", "jsd", "skew_forward_kl", "skew_reverse_kl", "tvd"] = "forward_kl"
    """forward_kl: KL(T||S), the usual one; reverse_kl: KL(S||T); jsd: GKD's generalised Jensen-Shannon; skew_*:
    DistiLLM's, against a mixture; tvd: total variation distance."""
    beta: float = 0.5
    """The teacher's share in the mixture of jsd, between 0 and 1."""
    alpha: float = 0.1
    """Share in the mixture of skew_forward_kl (of the teacher) and skew_reverse_kl (of the student)."""
    temperature: float = 1.0
    """Both distributions are softened by it; the divergence is multiplied by its square (Hinton et al. 2015)."""
    ratio: float = 0.5
    """Weight of the divergence; the cross-entropy of the labels has the rest. 1 learns from the teacher alone."""

    def __post_init__(self) -> None:
        """Refuse what is no divergence.

        Raises:
            ValueError: a number is out of its range.
        """
        for key in ("beta", "alpha"):
            if not 0 < getattr(self, key) < 1:
                raise ValueError(f"kd.{key} is {getattr(self, key)}: give a number between 0 and 1, both excluded")
        if not 0 < self.ratio <= 1:
            raise ValueError(f"kd.ratio is {self.ratio}: give a number over 0 and up to 1 (method sft has no teacher)")
        if not self.temperature > 0:
            raise ValueError(f"kd.temperature is {self.temperature}: give a number over 0")


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
class GenerationConfig:
    """How answers are generated and scored. The defaults but `decoding` are MiniLLM's protocol."""

    decoding: Literal["sample", "greedy"] = "sample"
    """sample: temperature 1, top_p 1, no top_k, one pass per seed; greedy: one pass."""
    seeds: list[int] = field(default_factory=lambda: [10, 20, 30, 40, 50])
    """Seeds of the sampling passes; ROUGE-L is their mean."""
    no_repeat_ngram_size: int = 6
    """No n-gram of this length twice in an answer; 0 switches it off."""
    batch_size: int = 32
    """Prompts generated at once on each rank."""
    limit: int | None = None
    """Score only the first so many examples of each set."""
    models: list[Literal["teacher", "untrained", "student"]] = field(
        default_factory=lambda: ["teacher", "untrained", "student"]
    )
    """Which models of a run are scored."""

    def __post_init__(self) -> None:
        """Refuse what cannot be generated.

        Raises:
            ValueError: a number is out of its range, or sampling has no seed.
        """
        for key, least in (("no_repeat_ngram_size", 0), ("batch_size", 1), ("limit", 1)):
            value = getattr(self, key)
            if value is not None and value < least:
                raise ValueError(f"scoring.{key} is {value}: give {least} or more")
        if not self.seeds or min(self.seeds) < 0 or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"scoring.seeds is {self.seeds}: give at least one, each once and none below 0")


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


@dataclass(frozen=True, kw_only=True)
class StudentConfig:
    """The model that learns."""

    model: str | None = None
    """Folder or hub name of a student made before (by `llmdistill compress`, another run, or anyone); without it the
    teacher is factorised, with it student.factorize is not looked at."""
    method: Literal["svd"] = "svd"
    """How the teacher becomes the student's starting point."""
    factorize: FactorizeConfig = field(default_factory=FactorizeConfig)
    """The factorisation."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Instruction data: a JSONL, JSON, Parquet or CSV file, or NAME[:SPLIT] of a data set on the hub. Rows hold
    instruction, input (may be empty) and output (a string or a list of them), or prompt and completion, or messages."""

    train: str = "embedded:train"
    """Training set; its first reference is the one learnt."""
    valid: str | None = None
    """Validation set: its loss is logged and its ROUGE-L scored, for choosing settings; it is never learnt."""
    tests: dict[str, str] = field(default_factory=dict)
    """Test sets as {name: path}; every model of the final table is scored on each."""
    streaming: bool = False
    """Read the training set while training instead of before it, for sets that do not fit into memory."""
    shuffle_buffer: int = 10_000
    """Examples among which a streamed set is shuffled."""
    on_policy: float = 0.0
    """Share of the steps whose answers the student writes itself while it learns (GKD's lambda), from 0 to 1."""
    max_prompt_length: int = 256
    """Most tokens a prompt may have, template included."""
    max_length: int = 512
    """Most tokens a prompt and its answer may have together; a longer answer is cut, and counted."""
    long_prompts: Literal["error", "drop", "truncate"] = "error"
    """What happens to prompts over max_prompt_length: stop, leave them out, or keep their end. Always said."""

    def __post_init__(self) -> None:
        """Refuse limits that leave no room.

        Raises:
            ValueError: the limits contradict each other.
        """
        if not 0 < self.max_prompt_length < self.max_length:
            raise ValueError(
                f"data.max_prompt_length is {self.max_prompt_length} and data.max_length {self.max_length}: "
                "the prompt's limit must be positive and leave room for an answer"
            )
        if not 0 <= self.on_policy <= 1:
            raise ValueError(f"data.on_policy is {self.on_policy}: give a share from 0 to 1")
        if self.shuffle_buffer < 1:
            raise ValueError(f"data.shuffle_buffer is {self.shuffle_buffer}: give 1 or more (1 does not shuffle)")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Optimisation. The global batch is what is given; how it is split over ranks and accumulation is derived."""

    steps: int = 1000
    """Optimizer steps of the whole run."""
    global_batch_size: int = 64
    """Sequences per optimizer step, over all ranks and accumulation steps."""
    micro_batch_size: int | None = None
    """Sequences per rank and forward pass; without it the whole share of a rank at once."""
    learning_rate: float = 5e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay of the learning rate after the warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up; a run shorter than that ends on the way up."""
    min_learning_rate: float = 0.0
    """Learning rate at the end of a cosine or linear decay."""
    weight_decay: float = 0.0
    """AdamW's weight decay; biases and norms have none."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's β1 and β2."""
    eps: float = 1e-8
    """AdamW's ε."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm; 0 switches it off."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the student's forward and backward pass; auto is bf16 on a GPU that has it, else fp32."""
    activation_checkpointing: bool = False
    """Recompute the student's activations in the backward pass: less memory, more time."""
    log_every: int = 10
    """Steps between two lines of the log."""
    validate_every: int = 100
    """Steps between two looks at the loss on data.valid, where there is one; the last step always looks."""
    save_every: int = 100
    """Steps between two checkpoints; the last step is always saved."""
    keep_checkpoints: int = 2
    """How many checkpoints are kept."""

    def __post_init__(self) -> None:
        """Refuse what no run can do.

        Raises:
            ValueError: a number is out of its range.
        """
        for key in (
            "steps",
            "global_batch_size",
            "micro_batch_size",
            "log_every",
            "validate_every",
            "save_every",
            "keep_checkpoints",
        ):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"train.{key} is {value}: give 1 or more")
        for key in ("learning_rate", "warmup_steps", "min_learning_rate", "weight_decay", "max_grad_norm"):
            if getattr(self, key) < 0:
                raise ValueError(f"train.{key} is {getattr(self, key)}: give 0 or more")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: teacher, student, data, method, optimisation, scoring."""

    ds_config: str
    """DeepSpeed configuration (JSON). Where it says "auto", this configuration decides."""
    output_dir: str | None = None
    """Folder of the run; without it runs/<recipe>-<ds_config>."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue where the folder's last checkpoint stands; never: stop if the folder holds a run already."""
    seed: int = 0
    """Seed of the data order and of everything random in training."""
    method: Literal["makd", "kd", "sft", "seqkd", "none"] = "makd"
    """makd: the depth-partitioned losses set under makd; kd: the output's divergence set under kd; sft: cross-entropy
    on the labels alone, without teacher; seqkd: sft on answers that the teacher wrote (data.train is what
    `llmdistill generate` made of the training set); none: no training, only scores."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """Teacher."""
    student: StudentConfig = field(default_factory=StudentConfig)
    """Student."""
    data: DataConfig = field(default_factory=DataConfig)
    """Data."""
    makd: MakdConfig = field(default_factory=MakdConfig)
    """MaKD, where method is makd."""
    kd: KdConfig = field(default_factory=KdConfig)
    """The output's divergence, where method is kd."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Training."""
    scoring: GenerationConfig = field(default_factory=GenerationConfig)
    """Scoring."""

    def __post_init__(self) -> None:
        """Refuse what no run can do.

        Raises:
            ValueError: a number is out of its range.
        """
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}: give 0 or more")
        if self.data.on_policy > 0 and self.method not in ("makd", "kd"):
            raise ValueError(
                f"data.on_policy is {self.data.on_policy}, but method {self.method} learns from given answers: "
                "the student's own need a teacher to judge them (makd or kd)"
            )
        if self.method == "kd" and self.data.on_policy == 1 and self.kd.ratio < 1:
            raise ValueError("data.on_policy 1 leaves no labels to learn, but kd.ratio keeps some: set kd.ratio to 1")
