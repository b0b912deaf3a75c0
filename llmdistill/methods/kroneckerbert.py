"""KroneckerBERT: embedding, attention scores and feed-forward outputs of every layer, the output, and the labels."""

from __future__ import annotations

from dataclasses import dataclass

from llmdistill.losses.terms import LayerTerm
from llmdistill.methods.annotations import PreTrainedConfig
from llmdistill.methods.entry import check_weights
from llmdistill.methods.layer_map import LayerPair, check_same_shape
from llmdistill.methods.layer_terms import score_term, state_term
from llmdistill.methods.method import Method
from llmdistill.methods.objective import LOGITS
from llmdistill.methods.output import label_terms, soft_terms
from llmdistill.models.families import family_of, shape_of
from llmdistill.objective import TOKENS, Objective


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
        """Check the settings.

        Raises:
            ValueError: a negative weight, none at all, or no temperature.
        """
        check_weights("kroneckerbert", self, ("embedding", "attention", "ffn", "logits", "label"))
        if not self.temperature > 0:
            raise ValueError(f"kroneckerbert.temperature is {self.temperature}: give a number over 0")


def build_kroneckerbert(
    settings: KroneckerbertConfig,
    teacher: PreTrainedConfig,
    student: PreTrainedConfig,
    objective: Objective = TOKENS,
) -> Method:
    """The loss of KroneckerBERT (eq. 14), for a student of the teacher's own shape, however it is factorised.

    MSE of the embedding's output, of the attention scores before the softmax (O_l of eq. 9) and of the feed-forward
    outputs H_l; soft cross-entropy of the logits, whose loss the paper does not spell out; and the labels: masked words
    and next sentences, the next word, or a task's. The inner losses are sums over all layers of means over tokens.

    "The outputs of the FFN" are read as what the second feed-forward matrix gives, before dropout, residual and norm:
    that is where the feed-forward network ends in the paper's eq. 12 and 13. With the residual they would be the
    layer's output, which would be called so.

    Raises:
        UserError: the models' sizes differ.
    """
    check_same_shape(teacher, student, method="kroneckerbert")
    causal, windows = family_of(student).causal, shape_of(student).windows
    pairs = [LayerPair(layer, layer, window) for layer, window in enumerate(windows)]
    inner: dict[str, list[LayerTerm]] = {
        "embedding": [state_term("embedding", "embedding", pairs[0])],
        "attention": [score_term(pair, causal=causal) for pair in pairs],
        "ffn": [state_term("ffn", "ffn_down", pair) for pair in pairs],
    }
    weights = {name: float(getattr(settings, name)) for name in inner if getattr(settings, name) > 0}
    output = soft_terms(LOGITS, settings.logits, objective, temperature=settings.temperature)
    output = output | label_terms(settings.label, objective)
    return Method(
        weights={**weights, **output.weights},
        layer_terms=[term for name in weights for term in inner[name]],
        token_terms=output.token_terms,
        sequence_terms=output.sequence_terms,
        shift=causal,
    )
