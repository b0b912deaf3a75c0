"""MaKD: multi-aspect knowledge distillation, each layer of the student against the same layer of the teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from torch import Tensor
from transformers import PreTrainedConfig

from llmdistill.batch import Aspect, Batch, LossSum, Outputs, Positions, TapRequest, Taps
from llmdistill.config import MakdConfig
from llmdistill.errors import UserError
from llmdistill.losses.attention import attention_kl
from llmdistill.losses.hidden import hidden_mse
from llmdistill.losses.matrix import matrix_mse
from llmdistill.methods.label import label_terms
from llmdistill.methods.layer_map import attention_of, sum_over_layers
from llmdistill.methods.objective import LABEL, WORDS, Objective, OutputTerm
from llmdistill.methods.output import soft_terms
from llmdistill.methods.partition import parse_layers
from llmdistill.models.families import family_of, shape_of

MATRIX_TERMS: tuple[Aspect, ...] = ("query", "key", "value", "ffn_up", "ffn_gate", "ffn_down")
"""Terms of the matrix aspect (eq. 17), each named as what it taps."""

TERMS = (*MATRIX_TERMS, "attention", "hidden", "logits", "label")
"""All terms, in the order of the log. Each is also a setting, its weight."""

LOGITS = OutputTerm("logits", "sequence_logits")
"""Soft cross-entropy (eq. 18): of the language model's head, and of the one for next sentences or a task."""


class Makd:
    """The loss of MaKD (eq. 19): matrix terms in some layers, attention and hidden states in others, logits on top.

    A term is the sum over its layers of the mean over tokens, so it grows with the number of layers. A term of weight
    0 or without layers does not exist: it is not in `weights`, not computed, and asks for no taps. Where sequences have
    targets, logits and label have a counterpart of the same weight on them (sequence_logits, sequence_label).

    Attributes:
        weights: factor of each term.
        positions: what each term is a sum over.
        teacher_taps, student_taps: what the models must hand over.
        needs_teacher: whether any term looks at the teacher.
        projections: none, as both models have the same widths.
    """

    def __init__(
        self,
        settings: MakdConfig,
        num_layers: int,
        *,
        causal: bool,
        gated: bool,
        windows: Sequence[int | None] | None = None,
        objective: Objective = WORDS,
    ) -> None:
        """Resolve the settings for a model.

        Args:
            settings: terms, layers, weights.
            num_layers: layers of the teacher and of the student.
            causal: decoder or encoder.
            gated: whether the feed-forward layers have a gate; without one the term ffn_gate does not exist.
            windows: sliding attention window of each layer; None where, or if, there is none.
            objective: what the batches have to be learnt.

        Raises:
            UserError: layers that are not there, a negative weight, a temperature of 0, or no term left.
        """
        self._settings = settings
        self._causal, self._objective = causal, objective
        self._windows = (None,) * num_layers if windows is None else tuple(windows)
        self._matrix_layers = parse_layers(settings.matrix_layers, num_layers, key="makd.matrix_layers")
        self._layer_layers = parse_layers(settings.layer_layers, num_layers, key="makd.layer_layers")
        self.weights: Mapping[str, float] = self._weights(gated=gated)
        of_output = LOGITS.positions(objective) | LABEL.positions(objective)
        self.positions: Mapping[str, Positions] = {name: of_output.get(name, "tokens") for name in self.weights}
        self.student_taps: TapRequest = self._taps()
        self.teacher_taps: TapRequest = self.student_taps
        self.needs_teacher = not self.weights.keys() <= set(LABEL)
        self.projections: Mapping[Aspect, tuple[int, int]] = {}

    def __call__(self, student: Outputs, teacher: Outputs | None, batch: Batch) -> dict[str, LossSum]:
        """The terms of one batch, unweighted, under the names of `weights`.

        Args:
            student: logits and taps, with their graph.
            teacher: logits and taps; None only if `needs_teacher` is False.
            batch: the batch both have seen.
        """
        terms: dict[str, LossSum] = {}
        if self.needs_teacher:
            assert teacher is not None, "only the labels' terms need no teacher"
            for name in self.weights:
                if name not in (*LOGITS, *LABEL):
                    terms[name] = self._layer_term(name, student.taps, teacher.taps, batch.attention_mask)
            if self._settings.logits > 0:
                terms |= soft_terms(
                    LOGITS,
                    student,
                    teacher,
                    batch,
                    self._objective,
                    temperature=self._settings.temperature,
                    causal=self._causal,
                )
        if self._settings.label > 0:
            terms |= label_terms(student, batch, self._objective, causal=self._causal)
        return terms

    def _layer_term(self, name: str, student: Taps, teacher: Taps, mask: Tensor) -> LossSum:
        normalize = self._settings.normalize_mse
        losses: list[LossSum] = []
        for layer in self._layers_of_term(name):
            if name == "attention":
                of_student, of_teacher = attention_of(student, layer), attention_of(teacher, layer)
                losses.append(
                    attention_kl(of_student, of_teacher, mask, causal=self._causal, window=self._windows[layer])
                )
            elif name == "hidden":
                losses.append(hidden_mse(student.hidden[layer], teacher.hidden[layer], mask, normalize=normalize))
            else:
                of_student, of_teacher = getattr(student, name)[layer], getattr(teacher, name)[layer]
                losses.append(matrix_mse(of_student, of_teacher, mask, normalize=normalize))
        return sum_over_layers(losses)

    def _layers_of_term(self, name: str) -> tuple[int, ...]:
        return self._matrix_layers if name in MATRIX_TERMS else self._layer_layers

    def _weights(self, *, gated: bool) -> dict[str, float]:
        settings = asdict(self._settings)
        weights: dict[str, float] = {}
        for name in TERMS:
            if settings[name] < 0:
                raise UserError(f"makd.{name} is {settings[name]}: a weight is 0 (the term is off) or more")
            if settings[name] == 0:
                continue
            if name in (LOGITS.words, LABEL.words):
                names = LOGITS if name == LOGITS.words else LABEL
                weights |= dict.fromkeys(names.positions(self._objective), settings[name])
            elif self._layers_of_term(name) and (gated or name != "ffn_gate"):
                weights[name] = settings[name]
        if not weights:
            raise UserError("makd: no term is left to train with: give one a weight over 0, and layers to act in")
        if settings["temperature"] <= 0:
            raise UserError(f"makd.temperature is {settings['temperature']}: give a number over 0, 1 as in the paper")
        return weights

    def _taps(self) -> dict[Aspect, frozenset[int]]:
        matrix, upper = frozenset(self._matrix_layers), frozenset(self._layer_layers)
        taps = {name: matrix for name in MATRIX_TERMS if name in self.weights}
        if "hidden" in self.weights:
            taps["hidden"] = upper
        if "attention" in self.weights:
            taps["query"] = taps.get("query", frozenset()) | upper
            taps["key"] = taps.get("key", frozenset()) | upper
        return taps


def build_makd(
    settings: MakdConfig, teacher: PreTrainedConfig, student: PreTrainedConfig, objective: Objective = WORDS
) -> Makd:
    """MaKD for two models, from their configs.

    Raises:
        UserError: the models' sizes differ, or the settings do not fit them.
    """
    check_same_shape(teacher, student)
    family, shape = family_of(student), shape_of(student)
    return Makd(
        settings,
        shape.num_layers,
        causal=family.causal,
        gated=family.ffn_gate is not None,
        windows=shape.windows,
        objective=objective,
    )


def check_same_shape(teacher: PreTrainedConfig, student: PreTrainedConfig) -> None:
    """MaKD compares layer with layer and head with head: all sizes but the ranks must agree.

    Raises:
        UserError: they do not.
    """
    if family_of(teacher) != family_of(student):
        raise UserError(
            f"MaKD compares like with like, but the teacher is {teacher.model_type} and the student "
            f"{student.model_type}: take a student of the teacher's architecture"
        )
    teacher_shape, student_shape = asdict(shape_of(teacher)), asdict(shape_of(student))
    for name, size in teacher_shape.items():
        if student_shape[name] != size:
            raise UserError(
                f"MaKD compares layer with layer and head with head, but {name} is {size} in the teacher and "
                f"{student_shape[name]} in the student: factorise the teacher instead of reshaping it"
            )
