"""Mean squared errors in one pair of layers, shared by the methods that use them."""

from __future__ import annotations

from llmdistill import losses
from llmdistill.batch import Aspect, LossSum, Taps
from llmdistill.losses.terms import LayerTerm
from llmdistill.methods.annotations import Tensor
from llmdistill.methods.layer_map import LayerPair, attention_of, layer_term


def score_term(pair: LayerPair, *, causal: bool) -> LayerTerm:
    """`attention`: MSE of the attention scores before the softmax (TinyBERT eq. 7, KroneckerBERT eq. 14).

    Args:
        pair: layers with the same number of query heads and the same window.
        causal: whether the models are decoders.
    """

    def loss(student: Taps, teacher: Taps, mask: Tensor) -> LossSum:
        of_student, of_teacher = attention_of(student, pair.student), attention_of(teacher, pair.teacher)
        return losses.attention_score_mse(of_student, of_teacher, mask, causal=causal, window=pair.window)

    return layer_term("attention", ("query", "key"), pair, loss)


def state_term(name: str, aspect: Aspect, pair: LayerPair, *, mapped: bool = False) -> LayerTerm:
    """MSE of each token's features at one place of both models, (B, T, W): TinyBERT eq. 8, 9, KroneckerBERT eq. 14.

    Args:
        name: the name of the term.
        aspect: the features to compare: hidden states, the embedding or a feed-forward output.
        pair: the layers.
        mapped: whether a learnt matrix maps the student's width to the teacher's; without it both widths are the same.
    """

    def loss(student: Taps, teacher: Taps, mask: Tensor) -> LossSum:
        of_student = student.projected[aspect] if mapped else getattr(student, aspect)
        return losses.hidden_mse(of_student[pair.student], getattr(teacher, aspect)[pair.teacher], mask)

    return layer_term(name, (aspect,), pair, loss)
