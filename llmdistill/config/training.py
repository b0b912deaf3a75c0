"""Settings of the optimization."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from llmdistill.config.marks import COMMON, FREE, SHARE, at_least, earlier_default, replaces, takes

DEFAULT_STEPS = 1000
"""The number of steps if neither steps nor epochs is given."""
USUAL_RATE = 5e-4
"""The learning rate of a student that is far from its teacher, if none is given."""
NEAR_RATE = 5e-5
"""That of a student that starts near its teacher; a higher rate would lead it away."""

MOST_LEARNING_RATE = 10.0
"""The largest learning rate: a step of AdamW changes each weight by about the rate, and weights are mostly below 1."""
LEARNING_RATE = takes(
    lambda value: 0 <= value <= MOST_LEARNING_RATE,
    f"give a number from 0 to {MOST_LEARNING_RATE:g}, because a step of AdamW changes each weight by about the "
    "learning rate, and weights are mostly below 1",
)
LEARNING_RATES = takes(
    lambda rates: rates and len(set(rates)) == len(rates) and all(0 < rate <= MOST_LEARNING_RATE for rate in rates),
    f"give one or more, each once, all over 0 and {MOST_LEARNING_RATE:g} or less",
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Optimization. The user sets the global batch size; its split over ranks and accumulation is derived."""

    steps: int = field(default=DEFAULT_STEPS, metadata=COMMON | replaces("train.epochs") | at_least(1))
    """Number of optimizer steps of the whole run."""
    epochs: int | None = field(default=None, metadata=replaces("train.steps") | at_least(1))
    """Passes over the training set, instead of steps; give only one of the two. The run counts the steps once it has
    read the set, and rounds them up (for a task each pass on its own). Not with data.kind instructions."""
    global_batch_size: int = field(default=64, metadata=COMMON | at_least(1))
    """Sequences per optimizer step, over all ranks and accumulation steps."""
    micro_batch_size: int | None = field(default=None, metadata=FREE | COMMON | at_least(1))
    """Sequences per rank and forward pass; default: the whole share of a rank at once."""
    learning_rate: float | None = field(default=None, metadata=COMMON | LEARNING_RATE | earlier_default(USUAL_RATE))
    """Peak learning rate. Default: 5e-5 for a student that is given or starts by data, because it is near its teacher;
    5e-4 for others."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay of the learning rate after the warm-up."""
    warmup_steps: int = field(default=0, metadata=replaces("train.warmup_ratio") | at_least(0))
    """Steps of linear warm-up; a shorter run ends during the warm-up."""
    warmup_ratio: float | None = field(default=None, metadata=replaces("train.warmup_steps") | SHARE)
    """Share of the steps that are warm-up, rounded up to whole steps, instead of warmup_steps."""
    min_learning_rate: float = field(default=0.0, metadata=LEARNING_RATE)
    """Learning rate at the end of a cosine or linear decay."""
    weight_decay: float = field(default=0.0, metadata=at_least(0))
    """AdamW's weight decay, except of biases and norms."""
    betas: tuple[float, float] = field(
        default=(0.9, 0.999),
        metadata=takes(
            lambda value: all(0 <= beta < 1 for beta in value), "give two numbers from 0 to below 1, (0.9, 0.999) usual"
        ),
    )
    """AdamW's β1 and β2."""
    eps: float = field(default=1e-8, metadata=takes(lambda value: value > 0, "give a number over 0, 1e-8 is usual"))
    """AdamW's ε."""
    max_grad_norm: float = field(default=1.0, metadata=at_least(0))
    """Clip gradients to this norm; 0 switches it off."""
    not_finite: Literal["skip", "stop"] = field(default="skip", metadata=FREE)
    """What to do if a gradient is inf or NaN: skip leaves the student as it was, and ends the run after three such
    steps in a row; stop ends it at the first. The run's folder keeps the batch. A step that DeepSpeed applies anyway
    (ZeRO stage 0 in fp32, bf16.check_grad_overflow false) always ends the run, before anything is saved."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the student's forward and backward pass. auto takes that of the ds_config (bf16.enabled); if
    this is "auto" too, as in the shipped ones, bf16 on a GPU that supports it and fp32 elsewhere."""
    activation_checkpointing: bool = field(default=False, metadata=FREE)
    """Recompute the student's activations in the backward pass: less memory, more time."""
    compile: bool | Literal["auto"] = field(default=False, metadata=FREE)
    """Compile the layers of student and teacher (torch.compile), one graph for all layers of a kind and all lengths:
    the first steps take minutes, later steps are faster. auto: on a GPU, in runs of 500 steps or more, if possible. Not
    with ZeRO-3, a sharded teacher, an architecture that makes its own masks, or without a C++ compiler. Dropout then
    draws other random numbers."""
    liger: bool | Literal["auto"] = field(default=False, metadata=FREE)
    """Run RMSNorm, RoPE and SwiGLU of both models with Liger's kernels (the extra liger), one launch each; equal up to
    rounding, and not yet measured on a GPU. auto: on a GPU with the library, unless the layers are compiled. Only for
    granite, llama, mistral, olmo2, qwen2, qwen3 and smollm3 with SiLU; other models stay as they are, but true refuses
    other students."""
    log_every: int | None = field(default=10, metadata=FREE | at_least(1))
    """Steps between two lines of the log; null writes about four lines. A validation has its own line."""
    report_to: list[Literal["tensorboard", "wandb", "mlflow"]] | None = field(
        default=None, metadata=FREE | takes(lambda names: len(set(names)) == len(names), "name each of them once")
    )
    """Where the log goes besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow; [] for nowhere. Default: the
    monitors that ds_config enables, TensorBoard in the shipped ones."""
    validate_every: int = field(default=100, metadata=FREE | at_least(1))
    """Steps between two validations on data.valid, if there is one. A run also validates before the first step and
    after the last."""
    keep_best: Literal["loss", "score"] | None = None
    """Keep the student of the best validation instead of the last one: loss is the validation loss, score the mean
    ROUGE-L of generated answers to data.valid (with the first seed of scoring), as in MiniLLM, or for sentences
    Spearman's correlation. Of equal validations the first wins."""
    save_every: int | None = field(default=100, metadata=FREE | at_least(1))
    """Steps between two checkpoints; a run always saves its last step. null saves none in between: a killed run starts
    again from the beginning, but after a signal or a lost server a run still saves its last step."""
    keep_checkpoints: int = field(default=2, metadata=FREE | at_least(1))
    """Number of checkpoints to keep."""

    def __post_init__(self) -> None:
        if self.warmup_ratio is not None and self.warmup_steps != 0:
            raise ValueError(
                f"train.warmup_ratio is {self.warmup_ratio} and train.warmup_steps {self.warmup_steps}: both say how "
                "long the warm-up is; leave one out"
            )
        if self.epochs is not None and self.steps != DEFAULT_STEPS:
            raise ValueError(
                f"train.epochs is {self.epochs} and train.steps {self.steps}: both say how long to train; leave one "
                f"out (a recipe's is undone by --train.epochs null, or by --train.steps {DEFAULT_STEPS}, the default)"
            )
        if self.weight_decay * self.peak_learning_rate > 1:
            raise ValueError(
                f"train.weight_decay is {self.weight_decay} and train.learning_rate {self.peak_learning_rate}: a step "
                "takes their product off each weight, more than all of it; give a smaller weight_decay, 0.01 is usual"
            )

    @property
    def peak_learning_rate(self) -> float:
        """`learning_rate`, which is the usual one until it is settled."""
        return USUAL_RATE if self.learning_rate is None else self.learning_rate

    def with_steps(self, steps: int) -> TrainConfig:
        """Return the settings for a known number of steps, with epochs, warmup_ratio and an open log_every resolved."""
        warmup = self.warmup_steps if self.warmup_ratio is None else math.ceil(self.warmup_ratio * steps)
        log_every = math.ceil(steps / 4) if self.log_every is None else self.log_every
        return replace(self, steps=steps, epochs=None, warmup_steps=warmup, warmup_ratio=None, log_every=log_every)
