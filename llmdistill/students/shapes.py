"""Students of another size than their teacher: parsing shapes, student configs, and weights copied from the teacher."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llmdistill.errors import UserError
from llmdistill.models.families import Axis, Family, Shape, base_name, family_of, has_rotary, is_head, shape_of
from llmdistill.models.layer_maps import parse_layer_map


class StudentShape(NamedTuple):
    """The sizes of a student with the architecture of its teacher."""

    depth: int
    width: int
    heads: int
    intermediate: int | None = None
    """Feed-forward width; None keeps the teacher's ratio of feed-forward width to width."""
    head_dim: int | None = None
    """Features of a head; None keeps the teacher's ratio of the features of all heads to the width."""


def parse_shape(text: str, *, key: str = "student.shape") -> StudentShape:
    """Parse a shape such as "6x384x12" or "6x384x12x1536x64": depth, width, heads, feed-forward width, head width.

    Raises UserError if the text has another form, if a number is 0, or if the heads do not divide the width.
    """
    match = re.fullmatch(r"\s*(\d{1,6})[x×](\d{1,6})[x×](\d{1,6})(?:[x×](\d{1,6})(?:[x×](\d{1,6}))?)?\s*", text)
    numbers = [int(number) for number in match.groups() if number is not None] if match is not None else [0]
    if 0 in numbers:
        raise UserError(
            f"{key} {text!r} is no shape: write DEPTHxWIDTHxHEADS such as 6x384x12, or with the feed-forward width and "
            "the head width as further numbers, 6x384x12x1536 or 6x384x12x1536x64"
        )
    shape = StudentShape(*numbers)
    if shape.width % shape.heads:
        divisors = ", ".join(str(number) for number in range(1, shape.width + 1) if shape.width % number == 0)
        raise UserError(
            f"{key} {text}: {shape.heads} heads do not divide the width {shape.width}; take one of {divisors} heads"
        )
    return shape


def shape_config(teacher: PreTrainedConfig, shape: StudentShape) -> PreTrainedConfig:
    """Return the config of a dense student of the given shape; all other values are the teacher's.

    The student keeps the teacher's ratios of feed-forward width to width (rounded), of key-value heads to heads, and of
    the features of all heads to the width, and the pattern of layer types, unless the shape says otherwise. Depth and
    width are free. Raises UserError if a ratio does not give a whole number, if a model with rotary positions gets an
    odd head width, or if an architecture has no head width of its own.
    """
    sizes = shape_of(teacher)
    if family_of(teacher).layer_axes is None:
        raise UserError(
            f"student.shape {shape}: the entry of {teacher.model_type} in FAMILIES does not say which axes of its "
            "matrices a shape cuts: factorize it (student.factorize), or give a smaller model as student.model"
        )
    values = teacher.to_dict()
    # They describe the factors of a factorized teacher, and this student is dense.
    for key in ("quantization_config", "transformers_weights"):
        values.pop(key, None)

    def put(name: str, value: int) -> None:
        # Architectures such as GPT-2 write these sizes under names of their own (n_embd).
        values[teacher.attribute_map.get(name, name)] = value

    put("num_hidden_layers", shape.depth)
    put("hidden_size", shape.width)
    put("num_attention_heads", shape.heads)
    proportional = round(shape.width * sizes.intermediate_size / sizes.hidden_size)
    intermediate = proportional if shape.intermediate is None else shape.intermediate
    values[family_of(teacher).ffn_size] = intermediate
    if hasattr(teacher, "num_key_value_heads"):
        values["num_key_value_heads"], rest = divmod(shape.heads * sizes.num_kv_heads, sizes.num_heads)
        if rest:
            group = sizes.num_heads // sizes.num_kv_heads
            raise UserError(
                f"student.shape: {shape.heads} heads cannot share keys and values {group} at a time, as the teacher's "
                f"{sizes.num_heads} do; take a multiple of {group}"
            )
    if has_rotary(teacher):
        # In some models the head width is larger than width / heads.
        head_dim, rest = divmod(shape.width * sizes.head_dim * sizes.num_heads, sizes.hidden_size * shape.heads)
        if shape.head_dim is not None:
            head_dim, rest = shape.head_dim, 0
        if rest or head_dim % 2:
            raise UserError(
                f"student.shape: {shape.heads} heads of the width {shape.width} have no even number of features each, "
                "as rotary positions need; take other heads or another width, or give the features as a fifth number"
            )
        if hasattr(teacher, "head_dim"):
            values["head_dim"] = head_dim
    if not hasattr(teacher, "head_dim") and shape.head_dim not in (None, shape.width // shape.heads):
        raise UserError(
            f"student.shape: the heads of a {teacher.model_type} have width / heads = {shape.width // shape.heads} "
            f"features each, not {shape.head_dim}: leave out the fifth number"
        )
    kinds = getattr(teacher, "layer_types", None)
    if kinds is not None:
        # Layer i has the kind of the teacher's layer at the same share of the depth.
        values["layer_types"] = [kinds[i * sizes.num_layers // shape.depth] for i in range(shape.depth)]
    if hasattr(teacher, "max_window_layers"):  # index of the first layer with a window, scaled to the depth
        # Rounded up: the first layer i with i · L // depth ≥ max_window_layers, as for layer_types above.
        values["max_window_layers"] = -(-teacher.max_window_layers * shape.depth // sizes.num_layers)
    return cast(PreTrainedConfig, type(teacher).from_dict(values))


def teacher_layers(
    spec: str, student_depth: int, teacher_depth: int, *, key: str, influence: Tensor | None = None
) -> list[int]:
    """Return the teacher's layers (0-based) whose weights initialize the student's layers.

    `spec` is important (those with the largest `influence`, which has a number for each of the teacher's layers; in
    their order), or one of `parse_layer_map`. Raises UserError, which names the setting by `key`, for another word, for
    numbers that do not fit, and for a student that is deeper than its teacher.
    """
    if student_depth > teacher_depth:
        raise UserError(
            f"{key} {spec}: a student of {student_depth} layers cannot be made of a teacher's {teacher_depth}; "
            "take fewer, or student.init random"
        )
    if spec == "important":
        assert influence is not None, "the influence of the layers is not measured"
        return largest(influence, student_depth).tolist()
    numbers = parse_layer_map(spec, student_depth, teacher_depth, key=key, more=["important"])
    return [number - 1 for number in numbers]


def largest(values_N: Tensor, count: int) -> Tensor:
    """Return the indices of the largest values of the last axis, ascending; among equal values the first."""
    return values_N.argsort(dim=-1, descending=True, stable=True)[..., :count].sort(dim=-1).values


def check_sizes(init: str, student: Shape, teacher: Shape) -> None:
    """Raise a UserError if a student of these sizes cannot take its weights from the teacher by `init`."""
    assert student.num_heads * teacher.num_kv_heads == teacher.num_heads * student.num_kv_heads, (student, teacher)
    for what, own, theirs in (
        ("width", student.hidden_size, teacher.hidden_size),
        ("number of heads", student.num_heads, teacher.num_heads),
        ("head width", student.head_dim, teacher.head_dim),
        ("feed-forward width", student.intermediate_size, teacher.intermediate_size),
    ):
        if init == "layers" and own != theirs:
            raise UserError(
                f"student.init layers takes layers as they are, but the student's {what} is {own} and the teacher's "
                f"{theirs}: take init important, slice or random"
            )
        if own > theirs:
            raise UserError(
                f"student.init {init} takes a part, but the student's {what} of {own} is more than the teacher's "
                f"{theirs}: take a smaller shape, or init random"
            )


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a teacher that a student of a smaller shape takes, as indices in the teacher, in ascending order.

    L, W, G, D and F are the student's sizes, as in the legend of `llmdistill.batch`.
    """

    layers: list[int]
    """The teacher's layer for each of the student's layers."""
    hidden_W: Tensor
    """Channels of the residual stream, the same in the whole model."""
    groups_LG: Tensor
    """Key/value heads, each with the query heads that share it; without grouped-query attention these are heads."""
    matched_LGD: Tensor
    """Features of the queries and keys of each group."""
    values_LGD: Tensor
    """Features of the values of each group, and so of the attention output."""
    neurons_LF: Tensor
    """Feed-forward neurons."""
    norm_factors: Mapping[str, float] = field(default_factory=dict)
    """Factor on the weight of a norm, by its name in the teacher's base model; the other norms keep their weights."""


def first_parts(student: PreTrainedConfig, teacher: PreTrainedConfig, layers: list[int]) -> Parts:
    """Return the first channels, heads and neurons of a teacher's layers, and the first features of each head.

    Rotary positions rotate feature i together with feature i + D/2 of a head, so queries and keys take the first D'/2
    features of each half, which keeps the pairs together.
    """
    sizes = shape_of(student)
    features, half = torch.arange(sizes.head_dim), sizes.head_dim // 2
    rotated = features
    if has_rotary(student):
        rotated = torch.cat([features[:half], shape_of(teacher).head_dim // 2 + features[:half]])
    depth, groups = sizes.num_layers, sizes.num_kv_heads
    return Parts(
        layers=layers,
        hidden_W=torch.arange(sizes.hidden_size),
        groups_LG=torch.arange(groups).expand(depth, -1),
        matched_LGD=rotated.expand(depth, groups, -1),
        values_LGD=features.expand(depth, groups, -1),
        neurons_LF=torch.arange(sizes.intermediate_size).expand(depth, -1),
    )


@torch.no_grad()
def initialize(student: PreTrainedModel, teacher: PreTrainedModel, parts: Parts) -> None:
    """Copy parts of the teacher's weights into the student, in place.

    Args:
        student: a model with a config from `shape_config`.
        teacher: a dense model of the same architecture, of sizes that `check_sizes` allows. A model head that only one
            of them has is not changed.
        parts: what the student takes. The frequencies of rotary positions are those of the student's head width D',
            whatever pairs of features it takes.
    """
    teacher_sizes, family = shape_of(teacher.config), family_of(student.config)
    rules: dict[str, tuple[Axis, ...]] = {**(family.layer_axes or {}), family.ffn_down: ("hidden", "ffn")}
    for name in (family.ffn_up, family.ffn_gate):
        if name is not None:
            rules[name] = ("ffn", "hidden")
    # The indices to take from each axis of the teacher's parameters, in the order of a layer of the student
    shared, head_dim = teacher_sizes.num_heads // teacher_sizes.num_kv_heads, teacher_sizes.head_dim
    block = teacher_sizes.num_heads * head_dim
    indices: list[dict[Axis, Tensor]] = []
    for groups_G, matched_GD, values_GD, neurons in zip(
        parts.groups_LG, parts.matched_LGD, parts.values_LGD, parts.neurons_LF, strict=True
    ):
        # (G, Q): the query heads that share keys and values are neighbors.
        heads_GQ = groups_G[:, None] * shared + torch.arange(shared)
        query = (heads_GQ[:, :, None] * head_dim + matched_GD[:, None]).flatten()
        key = (groups_G[:, None] * head_dim + matched_GD).flatten()
        value = (groups_G[:, None] * head_dim + values_GD).flatten()
        indices.append(
            {
                "hidden": parts.hidden_W,
                "ffn": neurons,
                "query": query,
                "key": key,
                "value": value,
                "context": (heads_GQ[:, :, None] * head_dim + values_GD[:, None]).flatten(),
                "fused": torch.cat([query, block + key, 2 * block + value]),
                # Norms that all heads share, so models with them take the same features of every head.
                "head": matched_GD[0],
            }
        )
    sources = {base_name(teacher, name): weight for name, weight in teacher.named_parameters(remove_duplicate=False)}
    for name, target in student.named_parameters():
        owner, _, leaf = base_name(student, name).rpartition(".")
        layer, owner_in_layer = split_name(owner, family)
        source_owner = owner if layer is None else f"{family.layers}.{parts.layers[layer]}.{owner_in_layer}"
        source: Tensor | None = sources.get(f"{source_owner}.{leaf}")
        if source is None:
            assert is_head(student, name), f"the teacher has no {name}"
            continue
        module = student.get_submodule(name.rpartition(".")[0])
        axes = _axes_of(module, owner, leaf) if layer is None else _axes_of(module, owner_in_layer, leaf, rules)
        assert len(axes) == source.ndim, f"no rule for the axes of {name}"
        for dim, axis in enumerate(axes):
            if axis != "whole":
                # Outside of the layers only the channels are chosen, and these are the same for all layers.
                source = source.index_select(dim, indices[layer or 0][axis].to(source.device))
        assert source.shape == target.shape, f"no rule for the axes of {name}: {source.shape} is not {target.shape}"
        factor = parts.norm_factors.get(source_owner, 1.0) if leaf == "weight" else 1.0
        target.copy_(source if factor == 1 else source * factor)


def split_name(owner: str, family: Family) -> tuple[int | None, str]:
    """Return the layer of a module and the module's name within it; None and the full name outside of the layers."""
    match = re.fullmatch(rf"{re.escape(family.layers)}\.(\d+)\.(.+)", owner)
    return (None, owner) if match is None else (int(match[1]), match[2])


def _axes_of(
    module: nn.Module, owner: str, leaf: str, rules: Mapping[str, tuple[Axis, ...]] | None = None
) -> tuple[Axis, ...]:
    """Return the axes of a module's parameter in stored order; empty if there is no rule.

    Without `rules` the module is outside the layers: an embedding, or a linear of a head. Those that are called dense
    or vocab_transform map the width to the width, all others to tokens or classes.
    """
    axes = () if rules is None else rules.get(owner, ())
    if not axes and getattr(getattr(module, "weight", None), "ndim", 0) == 1:  # a norm
        axes = ("hidden",)
    elif rules is None:
        axes = ("hidden" if owner.endswith(("dense", "vocab_transform")) else "whole", "hidden")
    if leaf == "bias":
        return axes[:1]
    return axes[::-1] if type(module) is Conv1D else axes
