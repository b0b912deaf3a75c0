"""The layers of student and teacher to compare, checks that they can be compared, and the terms on a pair of layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Literal, NamedTuple

from llmdistill import losses
from llmdistill.batch import Aspect, LossSum, Taps
from llmdistill.errors import UserError
from llmdistill.losses.terms import LayerTerm
from llmdistill.methods.annotations import PreTrainedConfig, Tensor
from llmdistill.models.families import family_of, is_causal, shape_of
from llmdistill.models.layer_maps import parse_layer_map
from llmdistill.step.method import Terms

Scale = Literal["token", "plain"]
"""How squared errors of features are scaled: token divides the error of a token by the mean square of the teacher's
features at that token, so that their size does not matter; plain is the papers' mean."""


class LayerPair(NamedTuple):
    """One pair of layers to compare, both counted from 0."""

    student: int
    teacher: int
    window: int | None
    """Sliding attention window of both layers; None if the layers attend to all tokens."""


def parse_layers(spec: str, num_layers: int, *, key: str) -> tuple[int, ...]:
    """Return the layers (0-based, ascending) that a setting (`key`) names.

    The setting is lower (1..L/2, rounded down), upper (the rest), all, none, or numbers counted from 1 such as "1-3,6".
    Raises UserError if it has none of these forms, or names a layer that does not exist.
    """
    half = num_layers // 2
    named = {"lower": range(half), "upper": range(half, num_layers), "all": range(num_layers), "none": range(0)}
    text = spec.strip()
    if text in named:
        return tuple(named[text])
    layers: set[int] = set()
    for part in text.split(","):
        # Nine digits: int() refuses thousands of them by an error of its own.
        # \d also matches digits of other scripts, hence ASCII.
        match = re.fullmatch(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?", part.strip(), re.ASCII)
        low, high = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not 1 <= low <= high <= num_layers:
            raise UserError(
                f"{key} is {spec!r}: the model has {num_layers} layers; give lower, upper, all, none, or layers from 1 "
                f"to {num_layers} such as 1-3,6"
            )
        layers.update(range(low - 1, high))  # counted from 1 to the user, from 0 here
    return tuple(sorted(layers))


def map_layers(spec: str, teacher: PreTrainedConfig, student: PreTrainedConfig, *, key: str) -> list[tuple[int, int]]:
    """Return the (student, teacher) layers (0-based) to compare, as a setting `teacher_layers` maps them.

    The setting has one of the forms of `parse_layer_map`, with 0 for a layer of the student that learns from none.
    """
    depths = shape_of(student).num_layers, shape_of(teacher).num_layers
    numbers = parse_layer_map(spec, *depths, key=key, may_skip=True)
    # Setting and messages count from 1, as papers do; the code counts from 0.
    return [(layer, number - 1) for layer, number in enumerate(numbers) if number > 0]


def pair_layers(
    layers: Iterable[tuple[int, int]], teacher: PreTrainedConfig, student: PreTrainedConfig, *, method: str
) -> list[LayerPair]:
    """Return the pairs of (student, teacher) layer numbers; raise UserError if their attention windows differ."""
    student_windows, teacher_windows = shape_of(student).windows, shape_of(teacher).windows
    pairs: list[LayerPair] = []
    for mine, theirs in layers:
        if student_windows[mine] != teacher_windows[theirs]:
            raise UserError(
                f"{method} compares what tokens see, but the attention window is {student_windows[mine]} in the "
                f"student's layer {mine + 1} and {teacher_windows[theirs]} in the teacher's layer {theirs + 1}: "
                "give the student's config.json the teacher's sliding_window, or name another layer"
            )
        pairs.append(LayerPair(mine, theirs, student_windows[mine]))
    return pairs


def check_direction(teacher: PreTrainedConfig, student: PreTrainedConfig, *, method: str) -> bool:
    """Return whether both models are decoders, not encoders; raise UserError if one is a decoder and one is not."""
    causal = is_causal(student)
    if is_causal(teacher) != causal:
        kinds = {True: "a decoder", False: "an encoder"}
        raise UserError(
            f"{method} compares models of one kind, but the teacher ({teacher.model_type}) is {kinds[not causal]} and "
            f"the student ({student.model_type}) {kinds[causal]}: take a student of the teacher's kind"
        )
    return causal


def check_heads(teacher: PreTrainedConfig, student: PreTrainedConfig, *, method: str) -> None:
    """Raise a UserError unless both models have the same number of (query) heads, which are compared one by one."""
    teacher_shape, student_shape = shape_of(teacher), shape_of(student)
    if teacher_shape.num_heads != student_shape.num_heads:
        raise UserError(
            f"{method} compares head with head, but the teacher has {teacher_shape.num_heads} attention heads and the "
            f"student {student_shape.num_heads}: give the student {teacher_shape.num_heads} "
            f"(student.shape DEPTHxWIDTHx{teacher_shape.num_heads}), or take method minilmv2, which is free of that"
        )


def check_scores(weight: float, teacher: PreTrainedConfig, student: PreTrainedConfig, *, method: str) -> None:
    """Raise a UserError if a term with this weight compares attention scores that are more than queries times keys."""
    for config in (teacher, student):
        if weight > 0 and not family_of(config).scores_are_products:
            raise UserError(
                f"{method}.attention compares products of queries and keys, to which a {config.model_type} adds "
                f"distances or a cap: set {method}.attention to 0, or take method minilmv2"
            )


def pair_last_or_mapped(
    layer: int | Literal["last"],
    spec: str | None,
    teacher: PreTrainedConfig,
    student: PreTrainedConfig,
    *,
    method: str,
) -> list[LayerPair]:
    """Return the pairs of layers of a method whose settings are `teacher_layer` and `teacher_layers`.

    The student's last layer learns from `layer` of the teacher, counted from 1; with `spec`, a map as in `map_layers`,
    all of its layers learn.
    """
    depths = shape_of(student).num_layers, shape_of(teacher).num_layers
    number = depths[1] if layer == "last" else layer
    if not 1 <= number <= depths[1]:
        raise UserError(
            f"{method}.teacher_layer is {layer}: the teacher has {depths[1]} layers; give one from 1 to {depths[1]}"
        )
    # Counted from 0 from here on.
    numbers = [(depths[0] - 1, number - 1)]  # MiniLM §3: the student's last layer alone learns
    if spec is not None:
        numbers = map_layers(spec, teacher, student, key=f"{method}.teacher_layers")
    return pair_layers(numbers, teacher, student, method=method)


def pair_equal_shapes(
    spec: str | None, teacher: PreTrainedConfig, student: PreTrainedConfig, *, method: str
) -> list[LayerPair]:
    """Return the pairs of layers of two models with the same sizes, which a method compares layer by layer.

    `spec` is the method's `teacher_layers`, a map as in `map_layers`; the models may then differ in depth. None
    compares each layer with the teacher's layer of the same number. The factorization may differ.
    """
    if family_of(teacher) != family_of(student):
        raise UserError(
            f"{method} compares like with like, but the teacher is {teacher.model_type} and the student "
            f"{student.model_type}: take a student of the teacher's architecture"
        )
    teacher_sizes, student_sizes = asdict(shape_of(teacher)), asdict(shape_of(student))
    for name, size in teacher_sizes.items():
        if spec is not None and name in ("num_layers", "windows"):  # a pair's windows are compared by pair_layers
            continue
        if student_sizes[name] != size:
            mapped = f", or map the layers by {method}.teacher_layers" if name == "num_layers" else ""
            raise UserError(
                f"{method} compares layer with layer and head with head, but {name} is {size} in the teacher and "
                f"{student_sizes[name]} in the student: factorize the teacher instead of reshaping it{mapped}"
            )
    if spec is None:
        numbers = [(layer, layer) for layer in range(shape_of(teacher).num_layers)]
    else:
        numbers = map_layers(spec, teacher, student, key=f"{method}.teacher_layers")
    return pair_layers(numbers, teacher, student, method=method)


def layer_term(
    name: str, pair: LayerPair, loss: Callable[[Taps, Taps, Tensor], LossSum], *aspects: Aspect
) -> LayerTerm:
    """Return a term that needs the same aspects from both layers of a pair."""
    student_taps, teacher_taps = (
        frozenset((aspect, layer) for aspect in aspects) for layer in (pair.student, pair.teacher)
    )
    return LayerTerm(name, student_taps, teacher_taps, loss)


def check_window(pair: LayerPair, *, causal: bool) -> None:
    """Raise a UserError for layers of encoders with a window, which the losses do not support."""
    if pair.window is not None and not causal:
        raise UserError(
            f"layer {pair.student + 1} sees a window to both sides, and attention and relations are compared "
            "only where tokens see all others: name a layer without a window (teacher_layer, layer_layers), or take kd"
        )


def attention_term(pair: LayerPair, loss: Callable[..., LossSum], *, causal: bool) -> LayerTerm:
    """Return the term `attention`: a loss on queries and keys of both layers, called as `losses.attention_kl` is."""
    check_window(pair, causal=causal)

    def inputs(taps: Taps, layer: int) -> losses.AttentionInputs:
        return losses.AttentionInputs(taps.query[layer], taps.key[layer], taps.scaling[layer])

    def compute(student: Taps, teacher: Taps, _mask: Tensor) -> LossSum:
        return loss(
            inputs(student, pair.student), inputs(teacher, pair.teacher), _mask_of(student, pair, causal=causal)
        )

    return layer_term("attention", pair, compute, "query", "key")


def relation_term(
    name: str,
    sides: tuple[Aspect, Aspect],
    pair: LayerPair,
    relation_heads: int,
    *,
    causal: bool,
    repeated: bool = False,
) -> LayerTerm:
    """Return KL(R^T‖R^S) of one relation of both layers (MiniLMv2 eq. 6-8), such as that of queries with keys.

    A relation is between queries, keys or values, whose heads are split again into relation heads (or with `repeated`
    repeated to their number), or between hidden states. The number of relation heads divides the width of both sides in
    both models.
    """
    check_window(pair, causal=causal)

    def inputs(taps: Taps, layer: int) -> losses.RelationInputs:
        tensors: list[Tensor] = [getattr(taps, side)[layer] for side in sides]
        # Hidden states have one head. A relation of a side with itself must pass one tensor twice: the loss checks the
        # identity of its inputs.
        left, right = (tensor.unsqueeze(1) if tensor.dim() == 3 else tensor for tensor in tensors)
        left, right = (losses.repeat_heads(side, relation_heads) if repeated else side for side in (left, right))
        return losses.RelationInputs(left, left if sides[0] == sides[1] else right)

    def loss(student: Taps, teacher: Taps, _mask: Tensor) -> LossSum:
        return losses.relation_kl(
            inputs(student, pair.student),
            inputs(teacher, pair.teacher),
            _mask_of(student, pair, causal=causal),
            relation_heads=relation_heads,
        )

    return layer_term(name, pair, loss, *sides)


def _mask_of(student: Taps, pair: LayerPair, *, causal: bool) -> losses.AttentionMask:
    """Return which keys the queries of both layers see."""
    assert student.mask is not None, "the taps of a student's step have the mask of their batch"
    return student.mask.of_layer(causal=causal, window=pair.window)


def mse_term(
    aspect: Aspect,
    pair: LayerPair,
    *,
    scale: Scale,
    name: str | None = None,
    mapped: bool = False,
    heads_differ: bool = False,
) -> LayerTerm:
    """Return the MSE of each token's features at one place of both models: MaKD eq. 13, 15, 16; TinyBERT eq. 8, 9.

    The name of the term is by default that of the aspect. If the widths differ, a learned matrix maps the student's to
    the teacher's (`mapped`). If the heads may differ in number (`heads_differ`), they are compared side by side.
    """

    def loss(student: Taps, teacher: Taps, mask: Tensor) -> LossSum:
        student_features = (student.projected[aspect] if mapped else getattr(student, aspect))[pair.student]
        teacher_features = getattr(teacher, aspect)[pair.teacher]
        if heads_differ:
            # (B, G, T, D) of both models to (B, T, G·D); a mapped student is already as wide as the teacher.
            teacher_features = losses.side_by_side(teacher_features)
            student_features = student_features if mapped else losses.side_by_side(student_features)
        # That of the batch counts its tokens once for all layers.
        real = mask if student.mask is None else student.mask
        return losses.matrix_mse(student_features, teacher_features, real, normalize=scale == "token")

    return layer_term(name or aspect, pair, loss, aspect)


def weigh(settings: object, terms: Iterable[LayerTerm]) -> Terms:
    """Return the terms with a weight over 0. The weight of a term is the setting of the same name."""
    active = [term for term in terms if getattr(settings, term.name) > 0]
    # One weight for all terms of a name, whatever their number: a term of more layers weighs more.
    return Terms({term.name: float(getattr(settings, term.name)) for term in active}, active)
