"""The losses the plain way, by autograd: attention and relations with matrices of (B, H, T, T), tokens with all logits,
features in fp32 copies.

What benches and tests hold the package's own losses against; training never takes it. At the end the cases that
bench_losses times and gpu_check compares: a case takes numbers, whether the loss is the plain one, and sizes, and
returns what is learned and the loss. The second row of a batch has padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llmdistill.batch import LossSum
from llmdistill.losses import attention, features, head
from llmdistill.losses.attention import AttentionInputs, Direction, RelationInputs, repeat_heads, side_by_side
from llmdistill.losses.divergence import LOG_FLOOR
from llmdistill.losses.features import MIN_SQUARE
from llmdistill.losses.head import HeadInputs, TokenLosses
from llmdistill.losses.terms import TokenTerm


def token_losses_plain(
    student: HeadInputs,
    teacher: HeadInputs | None,
    labels_N: Tensor,
    terms: Sequence[TokenTerm],
    factors: Tensor,
    *,
    vocabulary: int | None = None,
    chunk: int | None = None,
) -> TokenLosses:
    """`head.token_losses` from the full (N, V) logits of both models; `chunk` does nothing here."""
    student_NV = _logits(student, vocabulary)
    with torch.no_grad():
        teacher_NV = None if teacher is None else _logits(teacher, vocabulary)
    sums = []
    for term in terms:
        if term.divergence is None:
            on_labels = functional.cross_entropy(student_NV, labels_N, reduction="sum")
            evenly = -student_NV.log_softmax(-1).clamp(min=LOG_FLOOR).mean(-1).sum() if term.smoothing > 0 else 0
            sums.append((1 - term.smoothing) * on_labels + term.smoothing * evenly)
            continue
        assert teacher_NV is not None
        log_p_NV = (teacher_NV / term.temperature).log_softmax(-1).clamp(min=LOG_FLOOR)
        log_q_NV = (student_NV / term.temperature).log_softmax(-1).clamp(min=LOG_FLOOR)
        sums.append(term.scale * term.divergence.value(log_p_NV, log_q_NV).sum())
    sums_C = torch.stack(sums)
    return TokenLosses((sums_C * factors).sum(), sums_C.detach())


def _logits(inputs: HeadInputs, vocabulary: int | None) -> Tensor:
    bias_V = None if inputs.bias is None else inputs.bias[:vocabulary]
    logits_NV = functional.linear(inputs.rows.to(inputs.weight.dtype), inputs.weight[:vocabulary], bias_V)
    return logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))


def attention_kl_plain(
    student: AttentionInputs,
    teacher: AttentionInputs,
    attention_mask: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    direction: Direction = "student_teacher",
) -> LossSum:
    """`attention.attention_kl`, by autograd."""
    real_BT, visible_B1TT = attention_mask != 0, visible_keys(attention_mask, causal=causal, window=window)
    p_BHTT, q_BHTT = (
        attention_scores(each, real_BT).masked_fill(~visible_B1TT, -torch.inf).log_softmax(-1)
        for each in ((student, teacher) if direction == "student_teacher" else (teacher, student))
    )
    # Where a key is not visible both logarithms are -inf and their difference is NaN; its share is zero.
    log_ratio_BHTT = torch.where(visible_B1TT, p_BHTT - q_BHTT, 0.0)
    kl_BT = (p_BHTT.exp() * log_ratio_BHTT).sum(-1).mean(1)
    return LossSum(torch.where(real_BT, kl_BT, 0.0).sum(), real_BT.sum())


def attention_score_mse_plain(
    student: AttentionInputs,
    teacher: AttentionInputs,
    attention_mask: Tensor,
    *,
    causal: bool,
    window: int | None = None,
) -> LossSum:
    """`attention.attention_score_mse`, by autograd."""
    real_BT, visible_B1TT = attention_mask != 0, visible_keys(attention_mask, causal=causal, window=window)
    error_BHTT = attention_scores(student, real_BT) - attention_scores(teacher, real_BT)
    squares_BHT = torch.where(visible_B1TT, error_BHTT, 0.0).square().sum(-1)
    # The scores of a padded query are 0 in both models, so it adds nothing.
    return LossSum((squares_BHT / visible_B1TT.sum(-1)).mean(1).sum(), real_BT.sum())


def relation_kl_plain(
    student: RelationInputs,
    teacher: RelationInputs,
    attention_mask: Tensor,
    *,
    relation_heads: int,
    causal: bool,
    window: int | None = None,
) -> LossSum:
    """`relation.relation_kl`, by autograd."""

    def relation(sides: RelationInputs) -> AttentionInputs:
        heads = max(sides.left.shape[1], sides.right.shape[1])
        left_BTF, right_BTF = (side_by_side(repeat_heads(side, heads)) for side in sides)
        left_BRTD, right_BRTD = (x.unflatten(-1, (relation_heads, -1)).transpose(1, 2) for x in (left_BTF, right_BTF))
        return AttentionInputs(left_BRTD, right_BRTD, left_BRTD.shape[-1] ** -0.5)

    return attention_kl_plain(
        relation(student), relation(teacher), attention_mask, causal=causal, window=window, direction="teacher_student"
    )


def matrix_mse_plain(student: Tensor, teacher: Tensor, attention_mask: Tensor, *, normalize: bool = False) -> LossSum:
    """`features.matrix_mse`, by autograd."""
    real_BT = attention_mask != 0
    dtype = torch.promote_types(student.dtype, torch.float32)
    student_BTF, teacher_BTF = (
        torch.where(real_BT[..., None], side if side.dim() == 3 else side_by_side(side), 0.0).to(dtype)
        for side in (student, teacher)
    )
    error_BT = (student_BTF - teacher_BTF).square().mean(-1)
    if normalize:
        error_BT = error_BT / teacher_BTF.square().mean(-1).clamp_min(MIN_SQUARE)
    return LossSum(error_BT.sum(), real_BT.sum())


def visible_keys(attention_mask: Tensor, *, causal: bool, window: int | None = None) -> Tensor:
    """Which key (last axis) each query may look at: (B, 1, T, T), True where it may.

    Padded queries look at everything, so that their softmax is a number; nobody uses it.
    """
    real_BT = attention_mask != 0
    position_T = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    distance_TT = position_T[:, None] - position_T[None, :]
    visible_BTT = real_BT[:, None, :] & (attention_mask[:, :, None] == attention_mask[:, None, :])
    if causal:
        visible_BTT = visible_BTT & (distance_TT >= 0)
    if window is not None:
        visible_BTT = visible_BTT & (distance_TT < window)
    return (visible_BTT | ~real_BT[:, :, None])[:, None]


def attention_scores(inputs: AttentionInputs, real_BT: Tensor) -> Tensor:
    """Scaled products of queries and keys: (B, H, T, T) in at least fp32; 0 where either is padding."""
    dtype = torch.promote_types(inputs.query.dtype, torch.float32)
    # Cleared before the product: a masked score alone would still let a padded row's NaN into the other's gradient.
    query_BHTD, key_BGTD = (torch.where(real_BT[:, None, :, None], each, 0.0).to(dtype) for each in inputs[:2])
    key_BHTD = repeat_heads(key_BGTD, query_BHTD.shape[1])
    return query_BHTD @ key_BHTD.transpose(-1, -2) * inputs.scaling


# Cases of random numbers

Made = tuple[list[Tensor], Callable[[], Tensor]]
"""What is learned, and the loss: a scalar whose graph is there."""


@dataclass(frozen=True)
class Draw:
    """Normal numbers: the same in every format, but for their rounding."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    rounded: torch.dtype = torch.float32
    """A coarser format that the numbers have been through."""

    def __call__(self, *shape: int, learned: bool, scale: float = 1.0) -> Tensor:
        numbers = (scale * torch.randn(shape)).to(self.rounded)
        return numbers.to(self.device, self.dtype).requires_grad_(learned)

    def mask(self, batch: int, tokens: int) -> Tensor:
        mask = torch.ones(batch, tokens, dtype=torch.int64, device=self.device)
        mask[1:, 3 * tokens // 5 :] = 0
        return mask


def _sides(
    draw: Draw, tokens: int, width: int = 64, heads: int = 8, groups: Sequence[int] = (2, 4), batch: int = 2
) -> list[AttentionInputs]:
    """Queries and keys of student and teacher, with so many key heads each."""
    sides = []
    for learned, keys in zip((True, False), groups, strict=True):
        query, key = (draw(batch, each, tokens, width, learned=learned) for each in (heads, keys))
        sides.append(AttentionInputs(query, key, width**-0.5))
    return sides


def attention_kl(
    draw: Draw,
    plain: bool,
    *,
    tokens: int,
    causal: bool = True,
    direction: Direction = "student_teacher",
    batch: int = 2,
    **sizes: Any,
) -> Made:
    student, teacher = _sides(draw, tokens, batch=batch, **sizes)
    mask, function = draw.mask(batch, tokens), attention_kl_plain if plain else attention.attention_kl
    return [*student[:2]], lambda: function(student, teacher, mask, causal=causal, direction=direction).sum


def attention_score_mse(draw: Draw, plain: bool, *, tokens: int) -> Made:
    (student, teacher), mask = _sides(draw, tokens), draw.mask(2, tokens)
    function = attention_score_mse_plain if plain else attention.attention_score_mse
    return [*student[:2]], lambda: function(student, teacher, mask, causal=False).sum


def relation_kl(draw: Draw, plain: bool, *, tokens: int, batch: int = 2) -> Made:
    """Values of both models, 12 heads of 64 each, cut anew into 48."""
    student, teacher = (draw(batch, 12, tokens, 64, learned=learned) for learned in (True, False))
    mask, sides = draw.mask(batch, tokens), (RelationInputs(student, student), RelationInputs(teacher, teacher))
    function = relation_kl_plain if plain else attention.relation_kl
    return [student], lambda: function(*sides, mask, relation_heads=48, causal=False).sum


def matrix_mse(
    draw: Draw, plain: bool, *, tokens: int, width: int = 64, heads: Sequence[int] = (8, 2), batch: int = 2
) -> Made:
    """Heads as projections leave them, views of (B, T, H, D); each number of heads is a matrix of its own."""
    mask = draw.mask(batch, tokens)
    pairs = [[draw(batch, tokens, each, width, learned=learned) for learned in (True, False)] for each in heads]
    function = matrix_mse_plain if plain else features.matrix_mse

    def call() -> Tensor:
        return torch.stack([function(*(side.transpose(1, 2) for side in pair), mask).sum for pair in pairs]).sum()

    return [learned for learned, _ in pairs], call


def normalized_mse(draw: Draw, plain: bool, *, tokens: int) -> Made:
    student, teacher = (draw(2, tokens, 1_100, learned=learned) for learned in (True, False))
    mask = draw.mask(2, tokens)
    function = matrix_mse_plain if plain else features.matrix_mse
    return [student], lambda: function(student, teacher, mask, normalize=True).sum


def head_inputs(draw: Draw, *, rows: int, width: int, vocabulary: int) -> tuple[HeadInputs, HeadInputs]:
    """What goes into the LM heads of student and teacher, and their weights."""

    def side(learned: bool) -> HeadInputs:
        weight_scale = 1.5 * width**-0.5
        inputs = draw(rows, width, learned=learned)
        return HeadInputs(inputs, draw(vocabulary, width, learned=learned, scale=weight_scale), None)

    return side(True), side(False)


def head_losses(draw: Draw, plain: bool, *, terms: Sequence[TokenTerm], **sizes: int) -> Made:
    student, teacher = head_inputs(draw, **sizes)
    labels_N = torch.randint(sizes["vocabulary"], (sizes["rows"],)).to(draw.device)
    factors = torch.tensor([0.7, 0.3][: len(terms)], device=draw.device) / sizes["rows"]
    function = token_losses_plain if plain else head.token_losses
    return [student.rows, student.weight], lambda: function(student, teacher, labels_N, terms, factors).total
