"""KroneckerBERT: loss on embedding, attention scores and feed-forward outputs of all layers, logits, labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from llmdistill import losses
from llmdistill.batch import Aspect
from llmdistill.config.marks import OVER_0
from llmdistill.methods.annotations import PreTrainedConfig
from llmdistill.methods.entry import MethodEntry, check_weights
from llmdistill.methods.layers import LayerPair, Scale, attention_term, check_scores, mse_term, pair_equal_shapes, weigh
from llmdistill.methods.output import label_terms, soft_terms
from llmdistill.models.families import family_of
from llmdistill.objective import TOKENS, Objective
from llmdistill.step.method import Method


@dataclass(frozen=True, kw_only=True)
class KroneckerbertConfig:
    """KroneckerBERT (eq. 14): all layers of the teacher and its factorized copy.

    Weight 0 drops a term; in the paper all weights are 1.
    """

    teacher_layers: str | None = None
    """The teacher's layer for each layer of the student: uniform, spread, first, last, or a number for each, such as
    2,4,6, with 0 for a layer that learns from none; the models may then differ in depth. Default: the layer of the
    same number, as in the paper."""
    embedding: float = 1.0
    """Weight of the MSE of the embedding's output."""
    attention: float = 1.0
    """Weight of the MSE of the attention scores before the softmax, summed over the layers."""
    ffn: float = 1.0
    """Weight of the MSE of the feed-forward outputs, summed over the layers."""
    ffn_output: Literal["layer", "projection"] = "layer"
    """Where a feed-forward output is read, for the loss and for t-SNE. layer: at the end of its layer, after the
    residual (and BERT's norm); projection: at the down projection, before both."""
    logits: float = 1.0
    """Weight of the soft cross-entropy on the logits, of tokens and of sequences."""
    label: float = 1.0
    """Weight of the loss on the labels: masked tokens and next sentences, next tokens, or the labels of a task."""
    temperature: float = field(default=1.0, metadata=OVER_0)
    """Temperature of the soft cross-entropy (not in the paper)."""
    scale: Scale = "token"
    """What the squared errors of embedding and feed-forward outputs are divided by. token: the mean square of the
    teacher's features at that token; plain: nothing, as in the paper."""

    def __post_init__(self) -> None:
        """Raises ValueError if a weight or the temperature is out of its range."""
        check_weights("kroneckerbert", self, ("embedding", "attention", "ffn", "logits", "label"))


_FFN_OUTPUTS: Mapping[str, Aspect] = {"layer": "hidden", "projection": "ffn_down"}


def ffn_aspect(sections: Mapping[str, Any]) -> Aspect:
    """Return the tap of a feed-forward output by the methods' settings, which may lack those of KroneckerBERT."""
    settings: KroneckerbertConfig = sections.get("kroneckerbert", KroneckerbertConfig())
    return _FFN_OUTPUTS[settings.ffn_output]


def build_kroneckerbert(
    settings: KroneckerbertConfig,
    teacher: PreTrainedConfig,
    student: PreTrainedConfig,
    objective: Objective = TOKENS,
) -> Method:
    """Build the loss of KroneckerBERT (eq. 14), for a student with the shape of its teacher, with any factorization.

    The terms are: the MSE of the embedding's output, of the attention scores before the softmax (O_l of eq. 9) and of
    the feed-forward outputs H_l; the soft cross-entropy on the logits (the paper does not give a formula for this
    loss); and the loss on the labels: masked tokens and next sentences, next tokens, or the labels of a task. The
    losses of layers are sums over all layers of means over tokens.

    The paper does not say where a feed-forward output is read. Where it draws one, its text (§4.4) names the
    feed-forward network of the middle layer and its caption (Figure 4) the output of the middle layer: these are one
    place only if the feed-forward part includes its residual and norm, as in §3.5.1, which introduces the loss by the
    outputs of layers. `ffn_output` chooses the other reading, in which the network ends with the matrix of eq. 13.
    """
    pairs = pair_equal_shapes(settings.teacher_layers, teacher, student, method="kroneckerbert")
    check_scores(settings.attention, teacher, student, method="kroneckerbert")
    causal = family_of(student).causal
    inner = [
        mse_term("embedding", LayerPair(0, 0, None), scale=settings.scale),  # tapped as the input of layer 0
        *(attention_term(pair, losses.attention_score_mse, causal=causal) for pair in pairs),
        *(mse_term(_FFN_OUTPUTS[settings.ffn_output], pair, scale=settings.scale, name="ffn") for pair in pairs),
    ]
    output = soft_terms("logits", settings.logits, objective, temperature=settings.temperature)
    terms = weigh(settings, inner) | output | label_terms(settings.label, objective)
    return Method(**vars(terms), shift=causal)


KRONECKERBERT = MethodEntry(
    label="KroneckerBERT",
    help="embedding, attention scores and feed-forward outputs of all layers, the output, and the labels",
    settings=KroneckerbertConfig,
    build=build_kroneckerbert,
    uses_output=True,
    copies_classifier=True,
)
