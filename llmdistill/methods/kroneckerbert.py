"""KroneckerBERT: loss on embedding, attention scores and feed-forward outputs of all layers, logits, labels."""

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
    """The loss of KroneckerBERT (eq. 14), between all layers of the teacher and of its factorized copy. A weight of
    0 drops the term; in the paper all weights are 1."""

    embedding: float = 1.0
    """Weight of the MSE of the embedding's output."""
    attention: float = 1.0
    """Weight of the MSE of the attention scores before the softmax, summed over the layers."""
    ffn: float = 1.0
    """Weight of the MSE of the feed-forward outputs (the outputs of the down projection), summed over the layers."""
    logits: float = 1.0
    """Weight of the soft cross-entropy on the logits, of tokens and of sequences."""
    label: float = 1.0
    """Weight of the loss on the labels: masked tokens and next sentences, next tokens, or the labels of a task."""
    temperature: float = 1.0
    """Temperature of the soft cross-entropy (not in the paper)."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: a weight is negative, all weights are 0, or the temperature is not positive.
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
    """The loss of KroneckerBERT (eq. 14), for a student with the shape of its teacher, with any factorization.

    The terms are: the MSE of the embedding's output, of the attention scores before the softmax (O_l of eq. 9) and of
    the feed-forward outputs H_l; the soft cross-entropy on the logits (the paper does not give a formula for this
    loss); and the loss on the labels: masked tokens and next sentences, next tokens, or the labels of a task. The
    losses of layers are sums over all layers of means over tokens.

    "The outputs of the FFN" are taken as the outputs of the second feed-forward matrix, before dropout, residual and
    norm, because the feed-forward network ends there in eq. 12 and 13 of the paper. With the residual they would be the
    output of the layer, and the paper would call them so.

    Raises:
        UserError: the sizes of the models differ.
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
