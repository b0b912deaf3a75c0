"""What a student learns by: the terms of each method and their weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

TeacherMethod = Literal["makd", "kd", "minilm", "minilmv2", "distilbert", "tinybert", "kroneckerbert"]
"""Methods that learn from a teacher at work beside the student."""


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
class MinilmConfig:
    """MiniLM: the attention and the value relation of one layer (MiniLM §3.1, §3.2). Teacher and student need the same
    number of heads; depth and width are free. A weight of 0 drops the term."""

    attention: float = 1.0
    """Weight of KL(A_teacher || A_student) (L_AT)."""
    value_relation: float = 1.0
    """Weight of the KL between the value relations (L_VR)."""
    value_mse: float = 0.0
    """Weight of the MSE of the values, a learnt matrix in between where the widths differ (MiniLM Table 6)."""
    layers: Literal["last", "uniform"] = "last"
    """last: the last layer alone; uniform: every layer of the student against one of the teacher's, evenly spread
    (layer-to-layer, MiniLM Table 7)."""
    teacher_layer: int | None = None
    """The teacher's layer, from 1, where layers is last; without it the last (MiniLMv2 Table 4 takes another)."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ValueError: a negative weight, none at all, or a layer that layers rules out.
        """
        check_weights("minilm", self, ("attention", "value_relation", "value_mse"))
        if self.teacher_layer is not None and self.layers == "uniform":
            raise ValueError(
                "minilm.teacher_layer names one layer, but minilm.layers is uniform: leave one of them out"
            )


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """The search for the teacher's layer (MiniLMv2 Figure 2): for each candidate a short run, then some steps on the
    words alone, as any use of the student would be; the loss on data.valid after them is its score."""

    layers: str = "all"
    """Candidates: lower, upper, all, or numbers from 1 such as 9-12."""
    steps: int = 1000
    """Steps of distillation for each candidate."""
    probe_steps: int = 200
    """Steps on the words (masked ones for an encoder, the next one for a decoder) before the score is taken."""

    def __post_init__(self) -> None:
        """Refuse what is no search.

        Raises:
            ValueError: no steps.
        """
        for key in ("steps", "probe_steps"):
            if getattr(self, key) < 1:
                raise ValueError(f"minilmv2.search.{key} is {getattr(self, key)}: give 1 or more")


@dataclass(frozen=True, kw_only=True)
class Minilmv2Config:
    """MiniLMv2: relations between queries, keys and values (MiniLMv2 eq. 5-8). Depth, width and heads are free."""

    relations: list[Literal["qq", "qk", "qv", "kq", "kk", "kv", "vq", "vk", "vv"]] = field(
        default_factory=lambda: ["qq", "kk", "vv"]
    )
    """Which of the nine relations, each named by its two sides: query, key, value. All have weight 1 (alpha in eq.
    5)."""
    relation_heads: int = 48
    """Heads that queries, keys and values are cut into anew; must divide the width of both models. The paper takes 48
    for base-size and 64 for large teachers."""
    teacher_layer: int | Literal["last", "auto"] = "last"
    """The teacher's layer, from 1 (the paper: the last of 12; of 24 the 21st for BERT, the 19th for RoBERTa and XLM-R),
    or auto to search for it."""
    weight: float = 1.0
    """Weight of each relation."""
    search: SearchConfig = field(default_factory=SearchConfig)
    """Where teacher_layer is auto."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ValueError: no relation, one twice, no heads, or a weight of 0.
        """
        if not self.relations or len(set(self.relations)) < len(self.relations):
            raise ValueError(f"minilmv2.relations is {self.relations}: give at least one of the nine, each once")
        if self.relation_heads < 1:
            raise ValueError(f"minilmv2.relation_heads is {self.relation_heads}: give 1 or more")
        check_weights("minilmv2", self, ("weight",))


@dataclass(frozen=True, kw_only=True)
class DistilbertConfig:
    """DistilBERT's triple loss (Sanh et al. 2019). A weight of 0 drops the term."""

    soft: float = 5.0
    """Weight of KL(T||S) on the softened output, times the squared temperature."""
    label: float = 2.0
    """Weight of the cross-entropy on the labels (the masked words)."""
    cosine: float = 1.0
    """Weight of 1 - cos between the last hidden states; teacher and student must be of the same width."""
    temperature: float = 2.0
    """Both distributions are softened by it."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ValueError: a negative weight, none at all, or no temperature.
        """
        check_weights("distilbert", self, ("soft", "label", "cosine"))
        if not self.temperature > 0:
            raise ValueError(f"distilbert.temperature is {self.temperature}: give a number over 0")


@dataclass(frozen=True, kw_only=True)
class TinybertConfig:
    """TinyBERT's distillation of embedding, attention and hidden states, the teacher's layers evenly spread over the
    student's (Jiao et al. 2020, eq. 7-9). Learnt matrices map the student's width to the teacher's. A weight of 0 drops
    the term."""

    attention: float = 1.0
    """Weight of the MSE of the attention scores before the softmax; needs the teacher's number of heads."""
    hidden: float = 1.0
    """Weight of the MSE of the layers' outputs."""
    embedding: float = 1.0
    """Weight of the MSE of the embedding's output."""
    soft: float = 0.0
    """Weight of the soft cross-entropy on the output (eq. 10): for a task, not for general distillation."""
    temperature: float = 1.0
    """Of the soft cross-entropy."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ValueError: a negative weight, none at all, or no temperature.
        """
        check_weights("tinybert", self, ("attention", "hidden", "embedding", "soft"))
        if not self.temperature > 0:
            raise ValueError(f"tinybert.temperature is {self.temperature}: give a number over 0")


@dataclass(frozen=True, kw_only=True)
class KroneckerbertConfig:
    """KroneckerBERT's loss (eq. 14), between all layers of a teacher and of its factorised self. A weight of 0 drops
    the term; in the paper all are 1."""

    embedding: float = 1.0
    """Weight of the MSE of the embedding's output."""
    attention: float = 1.0
    """Weight of the MSE of the attention scores before the softmax, summed over layers."""
    ffn: float = 1.0
    """Weight of the MSE of the feed-forward outputs (of the down projection), summed over layers."""
    logits: float = 1.0
    """Weight of the soft cross-entropy on the logits, of words and of sequences."""
    label: float = 1.0
    """Weight of the loss on the labels: masked words and next sentences, next words, or a task's labels."""
    temperature: float = 1.0
    """Of the soft cross-entropy (not in the paper)."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ValueError: a negative weight, none at all, or no temperature.
        """
        check_weights("kroneckerbert", self, ("embedding", "attention", "ffn", "logits", "label"))
        if not self.temperature > 0:
            raise ValueError(f"kroneckerbert.temperature is {self.temperature}: give a number over 0")


def check_weights(method: str, settings: object, keys: tuple[str, ...]) -> None:
    """Refuse a negative weight, and weights that are all 0.

    Raises:
        ValueError: one of both, with the key.
    """
    for key in keys:
        if getattr(settings, key) < 0:
            raise ValueError(f"{method}.{key} is {getattr(settings, key)}: a weight is 0 (the term is off) or more")
    if not any(getattr(settings, key) for key in keys):
        raise ValueError(f"{method}: no term is left to train with: give one of {', '.join(keys)} a weight over 0")
