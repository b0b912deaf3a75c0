"""Settings of the teacher, or of several, and of `llmdistill cache`, which keeps their outputs for later trainings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from llmdistill.config.marks import ADDRESS, COMMON, FREE, OVER_0, PATIENCE, VALUES, at_least, replaced_by, replaces
from llmdistill.config.strict import did_you_mean
from llmdistill.errors import FieldError, UserError, check_name

_NO_SERVER = replaces("teacher.url", "teacher.top_k")
_LABELS_ALONE = replaced_by("method", "sft")
_OTHER_TEACHERS = replaces("teacher.cache") | _NO_SERVER


TeacherBits = Literal["none", "int8", "int4", "fp8"]


@dataclass(frozen=True, kw_only=True)
class OneTeacher:
    """One of the models to learn from."""

    model: str | None = None
    """Folder or hub name of a Hugging Face model; or of a peft adapter, which is merged into its base model; or a GGUF
    file, or a folder with one, which is dequantized. embedded:teacher is the small model that ships with llmdistill,
    package:NAME/PATH the folder of an installed Python package, or a path in it. null: a run without a teacher, with
    method sft on a task and the model in student.model."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the teacher; auto takes that of the run."""
    sharding: Literal["replicated", "node", "zero3", "tensor"] = field(
        default="replicated", metadata=FREE | replaces("teacher.zero", by=("replicated", "tensor"))
    )
    """replicated: every rank holds the whole teacher; zero3: each rank holds a share, whatever the student's stage is;
    node: the ranks of each node share a whole teacher, so its weights never travel between nodes; tensor: the same by
    tensor parallelism, where sums of activations and logits travel instead of weights (method kd on decoders)."""
    zero: dict[str, Any] = field(default_factory=dict, metadata=FREE)
    """Settings of zero_optimization for a sharded teacher, as DeepSpeed names them, such as
    {stage3_prefetch_bucket_size: 100000000, offload_param: {device: cpu}}. The stage is 3."""
    cache: str | None = field(default=None, metadata=_NO_SERVER | _LABELS_ALONE)
    """Folder with the outputs of the teacher for every training example, made by `llmdistill cache`. The run reads
    these, does not score the teacher, and loads its weights only to make the student. Default: the teacher runs in
    every step."""
    quantize: TeacherBits = "none"
    """Number format to which torchao rounds the linears in the teacher's layers when the steps begin: int8 halves the
    memory of these weights in bf16; int4 rounds to 4 bits in groups of 32 and saves no more memory; fp8 needs a GPU
    that multiplies in it. The run reports how far this moves the teacher's predictions. The teacher's scores, caches,
    and a student made from it use the exact weights. Not for a sharded teacher."""
    weight: float = field(default=1.0, metadata=OVER_0)
    """Weight of this teacher in the average of several; only the proportions matter."""

    def __post_init__(self) -> None:
        if self.zero and self.sharding not in ("node", "zero3"):
            raise FieldError("zero shapes a sharded teacher: set sharding to node or zero3 as well")
        if "stage" in self.zero:
            raise FieldError("zero sets the stage, which is 3 for a sharded teacher: remove it")

    @property
    def is_sharded(self) -> bool:
        """Whether no rank holds the whole teacher, so that its forward pass needs every rank."""
        return self.sharding != "replicated"


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(OneTeacher):
    """The model to learn from. It runs in evaluation mode and without gradients."""

    model: str | None = field(default="embedded:teacher", metadata=COMMON | _OTHER_TEACHERS)
    url: str | None = field(default=None, metadata=FREE | replaces("teacher.cache") | _LABELS_ALONE | ADDRESS)
    """Address of a server that runs the teacher, such as http://localhost:8000: it speaks OpenAI's protocol, gives the
    log-probabilities of a prompt as vLLM does, and serves the model under the name in teacher.model. The run itself
    reads only that model's configuration and tokenizer, and its weights to make the student. It does not score the
    teacher."""
    top_k: int | None = field(default=None, metadata=replaces("teacher.cache") | _LABELS_ALONE | at_least(1))
    """Number of most likely tokens to request from teacher.url; all others are one more class. The server must allow
    this number (vLLM: --max-logprobs)."""
    wait: float = field(default=60.0, metadata=FREE | PATIENCE)
    """Seconds without any answer from teacher.url after which the training saves its last step and ends; until then it
    repeats failed requests."""
    source: str | None = field(default=None, metadata=replaces("teacher.cache", "teacher.settings") | _NO_SERVER)
    """Name of the entry point in llmdistill.teachers by which an installed package gives the teacher's outputs;
    teacher.model is read as with teacher.url."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of teacher.source, which its package defines."""
    others: dict[str, OneTeacher] = field(default_factory=dict, metadata={VALUES: OneTeacher})
    """More teachers by name, with the student's tokens, such as {people: {model: DIR, weight: 2}}; each has its own
    model, dtype, sharding, zero, cache, quantize and weight. The run makes the student from teacher.model, the only
    teacher that it scores."""
    average: Literal["probabilities", "log_probabilities", "rows"] = "probabilities"
    """What the student learns from several teachers. probabilities: the average of their distributions, a mixture;
    log_probabilities: the average of their log-probabilities, a geometric mean; rows: each row of data.train from the
    teacher that its key `teacher` names, and rows without the key from teacher.model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.url is None) != (self.top_k is None):
            given, lacking = ("url", "top_k") if self.top_k is None else ("top_k", "url")
            raise ValueError(
                f"teacher.{given} is {getattr(self, given)}, but teacher.{lacking} is not set: a server is asked for a "
                "number of most likely tokens, so give both, such as http://localhost:8000 and 20, or neither"
            )
        if self.settings and self.source is None:
            raise FieldError("settings are those of teacher.source: name it too")
        if self.by_rows and not self.others:
            raise FieldError("average is rows, but there is one teacher: name the others in teacher.others")
        for name, other in self.others.items():
            check_name(name, "teacher.others")
            if other.model is None:
                raise FieldError(f"others.{name} has no model: give it as teacher.others.{name}.model")

    @property
    def everyone(self) -> dict[str, OneTeacher]:
        """`teacher.model` under the name "", and the others."""
        return {"": self, **self.others}

    @property
    def by_rows(self) -> bool:
        """Whether each row of the training set has one teacher."""
        return self.average == "rows"

    def replicated(self) -> TeacherConfig:
        """Return the same teachers, whole on every rank."""
        others = {name: replace(other, sharding="replicated", zero={}) for name, other in self.others.items()}
        return replace(self, others=others, sharding="replicated", zero={})

    def check_names(self, named: Collection[str], source: str) -> None:
        """Raise a UserError unless the rows of a training set name these teachers alone, and each of them."""
        for name in sorted({*named} - self.everyone.keys()):
            raise UserError(
                f"{source}: a row has the teacher {name!r}, which is not in teacher.others "
                f"({', '.join(self.others)}){did_you_mean(name, self.others)}"
            )
        for name in sorted(self.others.keys() - {*named}):
            raise UserError(
                f"{source}: teacher.average is rows, but no row has the key teacher with the value {name!r}: name it "
                "in the rows that it shall teach, or leave it out of teacher.others"
            )


def key_of(name: str) -> str:
    """Return where the settings of a teacher are, by its name in `TeacherConfig.everyone`."""
    return f"teacher.others.{name}" if name else "teacher"


def others_of(teacher: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the key and the settings of each further teacher, from the plain values of a TeacherConfig."""
    for name, other in teacher.get("others", {}).items():
        yield key_of(name), other


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """What a cache keeps, and how it is written."""

    content: Literal["hidden_states", "top_k"] = "hidden_states"
    """What is kept for each predicted token. hidden_states: the input of the last matrix of the LM head, from which the
    exact logits follow; top_k: the most likely tokens with their log-probabilities, and the mass of all others, which
    gives a lower bound of each divergence."""
    top_k: int = field(default=64, metadata=at_least(1))
    """top_k: number of tokens."""
    dtype: Literal["auto", "int8"] = "auto"
    """hidden_states: their number format. auto: the teacher's; int8: 8 bits with one scale per token, a quarter of the
    bytes of fp32 and half of those of bf16. The command reports by how many nats per token this moves the teacher's
    distributions."""
    engine: Literal["auto", "hf", "vllm"] = "auto"
    """What runs the teacher. hf: the run's own teacher, on one or several ranks; vllm: vLLM, one process for all GPUs,
    which gives top_k at temperature 1 and nothing else; auto: vLLM if it is installed and can do it, else hf."""
    teacher: str = ""
    """Which of several teachers runs, by name. Default: teacher.model."""
    micro_batch_size: int = field(default=8, metadata=at_least(1))
    """hf: examples per rank and forward pass of the teacher."""
    shard_tokens: int = field(default=65536, metadata=at_least(1))
    """Tokens of the examples of one shard, approximately. A shard is written at once, from memory, and an interrupted
    command repeats at most one shard a rank."""

    def __post_init__(self) -> None:
        if self.dtype == "int8" and self.content == "top_k":
            raise ValueError(
                "--cache.dtype int8 is for hidden states: leave it out, or take --cache.content hidden_states"
            )

    @property
    def stored_top_k(self) -> int | None:
        """The number of most likely tokens that are kept; None if hidden states are."""
        return self.top_k if self.content == "top_k" else None
