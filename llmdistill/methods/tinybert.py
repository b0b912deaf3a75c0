"""TinyBERT (Jiao et al. 2020): embedding, attention scores, hidden states of evenly spread layers, and the output."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedConfig

from llmdistill.batch import Aspect, Batch, LossSum, Outputs, Positions, TapRequest, Taps
from llmdistill.config import TinybertConfig
from llmdistill.losses.attention import attention_score_mse
from llmdistill.losses.hidden import hidden_mse
from llmdistill.methods.layer_map import (
    LayerPair,
    attention_of,
    check_heads,
    pair_layers,
    same_direction,
    sum_over_layers,
    uniform_map,
)
from llmdistill.methods.objective import WORDS, Objective, OutputTerm
from llmdistill.methods.output import soft_terms
from llmdistill.models.families import shape_of

SOFT = OutputTerm("soft", "sequence_soft")
"""Soft cross-entropy of the output."""

INNER_TERMS: tuple[str, ...] = ("attention", "hidden", "embedding")


class Tinybert:
    """MSE of the attention scores (eq. 7), hidden states (eq. 8) and embedding (eq. 9); soft cross-entropy (eq. 10).

    Layer m of the student learns from layer m·L/M of the teacher; a term is the sum over the student's layers (eq. 11).
    Where the widths differ, one learnt matrix maps the hidden states of all layers, and another the embedding.
    """

    def __init__(
        self,
        settings: TinybertConfig,
        teacher: PreTrainedConfig,
        student: PreTrainedConfig,
        objective: Objective = WORDS,
    ) -> None:
        """Resolve the settings for two models, from their configs.

        Raises:
            UserError: one model is a decoder and the other an encoder, or their numbers of heads or attention windows
                differ under the attention loss.
        """
        self._settings, self._objective = settings, objective
        self._causal = same_direction(teacher, student, method="tinybert")
        of_student, of_teacher = shape_of(student), shape_of(teacher)
        self._layers = list(enumerate(uniform_map(of_student.num_layers, of_teacher.num_layers)))
        self._pairs: list[LayerPair] = []
        if settings.attention > 0:
            check_heads(teacher, student, method="tinybert.attention")
            self._pairs = pair_layers(self._layers, teacher, student, method="tinybert.attention")
        inner = {name: float(getattr(settings, name)) for name in INNER_TERMS if getattr(settings, name) > 0}
        soft = SOFT.positions(objective) if settings.soft > 0 else {}
        self.weights: Mapping[str, float] = inner | dict.fromkeys(soft, settings.soft)
        self.positions: Mapping[str, Positions] = {name: soft.get(name, "tokens") for name in self.weights}
        self.student_taps: TapRequest = self._taps(frozenset(mine for mine, _ in self._layers))
        self.teacher_taps: TapRequest = self._taps(frozenset(theirs for _, theirs in self._layers))
        self.needs_teacher = True
        widths = of_student.hidden_size, of_teacher.hidden_size
        mapped: tuple[Aspect, ...] = ("hidden", "embedding") if widths[0] != widths[1] else ()
        self.projections: Mapping[Aspect, tuple[int, int]] = {each: widths for each in mapped if each in self.weights}

    def __call__(self, student: Outputs, teacher: Outputs | None, batch: Batch) -> dict[str, LossSum]:
        """The terms of one batch, unweighted, under the names of `weights`."""
        assert teacher is not None
        mask = batch.attention_mask
        terms: dict[str, LossSum] = {}
        if "attention" in self.weights:
            terms["attention"] = sum_over_layers(
                [self._attention(student.taps, teacher.taps, pair, mask) for pair in self._pairs]
            )
        if "hidden" in self.weights:
            of_student = self._states("hidden", student.taps)
            terms["hidden"] = sum_over_layers(
                [hidden_mse(of_student[mine], teacher.taps.hidden[theirs], mask) for mine, theirs in self._layers]
            )
        if "embedding" in self.weights:
            of_student = self._states("embedding", student.taps)
            terms["embedding"] = hidden_mse(of_student[0], teacher.taps.embedding[0], mask)
        if self._settings.soft > 0:
            terms |= soft_terms(
                SOFT,
                student,
                teacher,
                batch,
                self._objective,
                temperature=self._settings.temperature,
                causal=self._causal,
            )
        return terms

    def _attention(self, student: Taps, teacher: Taps, pair: LayerPair, mask: Tensor) -> LossSum:
        of_student, of_teacher = attention_of(student, pair.student), attention_of(teacher, pair.teacher)
        return attention_score_mse(of_student, of_teacher, mask, causal=self._causal, window=pair.window)

    def _states(self, aspect: Aspect, taps: Taps) -> dict[int, Tensor]:
        """The student's, by layer and as wide as the teacher's."""
        states: dict[int, Tensor] = taps.projected[aspect] if aspect in self.projections else getattr(taps, aspect)
        return states

    def _taps(self, layers: frozenset[int]) -> dict[Aspect, frozenset[int]]:
        taps: dict[Aspect, frozenset[int]] = {}
        if "attention" in self.weights:
            taps["query"] = taps["key"] = layers
        if "hidden" in self.weights:
            taps["hidden"] = layers
        if "embedding" in self.weights:
            taps["embedding"] = frozenset({0})
        return taps
