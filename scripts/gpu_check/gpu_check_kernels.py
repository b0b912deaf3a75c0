"""The fused losses of gpu_check against the plain ones in fp64: Triton's kernels on a GPU, the blocks on a CPU.

The numbers of both are the same: drawn in fp32, rounded to the format that is checked. Differences are norms, as a
share of the norm that there should be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import plain_losses
import torch
from bench_losses import Call, Draw
from benching_table import Line
from torch import Tensor

from llmdistill.losses import attention, divergence, features, head
from llmdistill.losses.attention import AttentionInputs, Direction
from llmdistill.losses.fused.triton import available
from llmdistill.losses.head import HeadInputs
from llmdistill.losses.terms import TokenTerm

HEAD_WIDTHS = (64, 80, 96, 128)
"""Of Llama, GPT-2 and Qwen; of phi-2; of Phi-3-mini; of Llama 3."""

FORMATS = {torch.bfloat16: ("bf16", 2e-2), torch.float32: ("fp32", 1e-5)}
"""Number format -> its name, and how far from fp64 it may be. The logits themselves are rounded to the 8 bits of bf16,
and the gradient of KL(S‖T) is made of their differences: 1.1e-2 in blocks on a CPU, the other losses 0.2e-2."""

TERMS = {
    "labels and KL(T‖S)": (TokenTerm("label", None), TokenTerm("kl", divergence.FORWARD_KL, 2.0, 4.0)),
    "KL(S‖T) and JSD": (
        TokenTerm("kl", divergence.REVERSE_KL),
        TokenTerm("jsd", divergence.jsd_with_derivative(0.3)),
    ),
    "smoothed labels and skew KL": (
        TokenTerm("label", None, smoothing=0.1),
        TokenTerm("kl", divergence.skew_reverse_kl_with_derivative(0.1)),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the tensors are."""

    tokens: int
    rows: int
    vocabulary: int
    width: int
    """Of the model before its LM head."""


FULL = Sizes(tokens=512, rows=256, vocabulary=128_256, width=256)
SMALL = Sizes(tokens=40, rows=12, vocabulary=1_000, width=32)

Make = Callable[[Draw, bool], tuple[list[Tensor], Call]]
"""What is learned and the loss, of numbers and whether the loss is the plain one."""


def kernels(sizes: Sizes, device: torch.device) -> Iterator[Line | str]:
    """Check each loss; a text says what is left out."""
    by = "Triton" if available(device) else "blocks"
    if by == "blocks":
        why = "no GPU" if device.type == "cpu" else "no Triton 3.4, or a GPU older than the A100"
        yield f"Triton's kernels: {why}; the losses in blocks stand for them"
    checks: dict[str, Make] = {
        **{
            f"attention KL(S‖T), heads of {width}, GQA": partial(_attention_kl, sizes.tokens, width, "student_teacher")
            for width in HEAD_WIDTHS
        },
        **{f"LM head, {name}, V = {sizes.vocabulary:,}": partial(_head, sizes, terms) for name, terms in TERMS.items()},
        "attention KL(T‖S), heads of 64, GQA": partial(_attention_kl, sizes.tokens, 64, "teacher_student"),
        "attention scores, heads of 64, GQA": partial(_score_mse, sizes.tokens),
        "relation KL, 48 heads of 16": partial(_relation_kl, sizes.tokens),
        **{
            f"squared error of queries and keys, heads of {width}, GQA": partial(_matrix_mse, sizes.tokens, width)
            for width in HEAD_WIDTHS
        },
        "squared error over the mean square, 1,100 features": partial(_normalized_mse, sizes.tokens),
    }
    for dtype, (short, limit) in FORMATS.items():
        for name, make in checks.items():
            loss, gradients = differences(make, dtype, device)
            worst = float(torch.tensor([loss, gradients]).max())  # NaN where either is
            yield Line(f"{name}, {short}", worst, limit, f"{by}: loss {loss:.1e}, gradients {gradients:.1e}")


def differences(make: Make, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Of the loss, and the largest of its gradients."""
    found: list[tuple[Tensor, list[Tensor]]] = []
    for draw, plain in ((Draw(device, dtype, dtype), False), (Draw(device, torch.float64, dtype), True)):
        torch.manual_seed(0)
        leaves, call = make(draw, plain)
        loss = call()
        loss.backward()
        found.append((loss.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]))
    (loss, gradients), (exact_loss, exact_gradients) = found
    pairs = zip(gradients, exact_gradients, strict=True)
    return difference(loss, exact_loss), float(torch.tensor([difference(*pair) for pair in pairs]).max())


def difference(found: Tensor, exact: Tensor) -> float:
    """The norm of the difference, as a share of the norm that there should be."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def _sides(draw: Draw, tokens: int, width: int) -> tuple[AttentionInputs, AttentionInputs, Tensor]:
    """Eight query heads over two key heads of the student and four of the teacher, and a mask with padding."""
    inputs = []
    for learned, groups in ((True, 2), (False, 4)):
        query, key = (draw(2, heads, tokens, width, learned=learned) for heads in (8, groups))
        inputs.append(AttentionInputs(query, key, width**-0.5))
    return inputs[0], inputs[1], _padded(draw, tokens)


def _padded(draw: Draw, tokens: int) -> Tensor:
    mask = torch.ones(2, tokens, dtype=torch.int64, device=draw.device)
    mask[1, 3 * tokens // 5 :] = 0
    return mask


def _attention_kl(tokens: int, width: int, direction: Direction, draw: Draw, plain: bool) -> tuple[list[Tensor], Call]:
    student, teacher, mask = _sides(draw, tokens, width)
    function = plain_losses.attention_kl_plain if plain else attention.attention_kl
    return [*student[:2]], lambda: function(student, teacher, mask, causal=True, direction=direction).sum


def _score_mse(tokens: int, draw: Draw, plain: bool) -> tuple[list[Tensor], Call]:
    student, teacher, mask = _sides(draw, tokens, 64)
    function = plain_losses.attention_score_mse_plain if plain else attention.attention_score_mse
    return [*student[:2]], lambda: function(student, teacher, mask, causal=False).sum


def _relation_kl(tokens: int, draw: Draw, plain: bool) -> tuple[list[Tensor], Call]:
    student, teacher = (draw(2, 12, tokens, 64, learned=learned) for learned in (True, False))
    mask = torch.ones(2, tokens, dtype=torch.int64, device=draw.device)
    sides = attention.RelationInputs(student, student), attention.RelationInputs(teacher, teacher)
    function = plain_losses.relation_kl_plain if plain else attention.relation_kl
    return [student], lambda: function(*sides, mask, relation_heads=48, causal=False).sum


def _matrix_mse(tokens: int, width: int, draw: Draw, plain: bool) -> tuple[list[Tensor], Call]:
    """Heads as projections leave them: views of (B, T, H, D)."""
    mask = _padded(draw, tokens)
    pairs = [[draw(2, tokens, heads, width, learned=learned) for learned in (True, False)] for heads in (8, 2)]
    function = plain_losses.matrix_mse_plain if plain else features.matrix_mse

    def call() -> Tensor:
        return torch.stack([function(*(side.transpose(1, 2) for side in pair), mask).sum for pair in pairs]).sum()

    return [learned for learned, _ in pairs], call


def _normalized_mse(tokens: int, draw: Draw, plain: bool) -> tuple[list[Tensor], Call]:
    student, teacher = (draw(2, tokens, 1_100, learned=learned) for learned in (True, False))
    mask = _padded(draw, tokens)
    function = plain_losses.matrix_mse_plain if plain else features.matrix_mse
    return [student], lambda: function(student, teacher, mask, normalize=True).sum


def _head(sizes: Sizes, terms: tuple[TokenTerm, ...], draw: Draw, plain: bool) -> tuple[list[Tensor], Call]:
    student, teacher = (
        HeadInputs(
            draw(sizes.rows, sizes.width, learned=learned),
            draw(sizes.vocabulary, sizes.width, learned=learned, scale=1.5 * sizes.width**-0.5),
            None,
        )
        for learned in (True, False)
    )
    labels_N = torch.randint(sizes.vocabulary, (sizes.rows,)).to(draw.device)
    factors = torch.tensor([0.7, 0.3], device=draw.device) / sizes.rows
    function = plain_losses.token_losses_plain if plain else head.token_losses
    return [student.rows, student.weight], lambda: function(student, teacher, labels_N, terms, factors).total
