"""The losses alone, fused against plain: time, and memory above the inputs.

    python scripts/bench/bench_losses.py             # the sizes that the targets are set for, minutes
    python scripts/bench/bench_losses.py --quick     # smaller ones, under a minute

One call is forward and backward of one loss: attention KL of one layer (12 heads of 64, batch 1), the head and the KL
of the output together (768 wide, 50,257 words, gradients of rows and weight), the KL of one relation (48 relation
heads, V-V of 768), the squared error of queries (12 heads of 64, views of (B, T, H, D)). Naive is the same loss from
whole matrices, by autograd (tests/plain_losses.py). The bare products are the four that no head does without: logits of
both models, and gradients of rows and weight. All is fp32; the squared error on a GPU is bf16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from benching import Settings, Table, Work, bench_parser, measure, parse, run
from plain_losses import attention_kl_plain, relation_kl_plain, token_losses_plain
from torch import Tensor
from torch.nn import functional

from llmdistill.attention_mask import AttentionMask
from llmdistill.batch import LossSum
from llmdistill.losses import attention, features, head
from llmdistill.losses.attention import AttentionInputs, Direction, RelationInputs, side_by_side
from llmdistill.losses.divergence import FORWARD_KL
from llmdistill.losses.head import HeadInputs
from llmdistill.losses.terms import TokenTerm

FULL = {"attention": (512, 1024, 2048), "rows": (1024, 4096), "vocabulary": 50257, "relation": 512, "matrix": 16384}
QUICK = {"attention": (512,), "rows": (512,), "vocabulary": 16384, "relation": 256, "matrix": 2048}

ATTENTION_TARGETS = {512: (1.0, 0.14), 1024: (0.35, 0.12), 2048: (0.35, 0.06)}
HEAD_TARGETS = {1024: (0.85, 0.26, 1.15), 4096: (0.78, 0.06, 1.09)}
"""By rows: time over naive, memory over naive, time over the products."""
RELATION_MEMORY = 0.12


# Cases of random numbers, which gpu_check compares too. The second row of a batch has padding

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
    *,
    tokens: int,
    causal: bool = True,
    direction: Direction = "student_teacher",
    batch: int = 2,
    loss: Any = attention.attention_kl,
    **sizes: Any,
) -> Made:
    student, teacher = _sides(draw, tokens, batch=batch, **sizes)
    mask = AttentionMask(draw.mask(batch, tokens), causal=causal)
    return [*student[:2]], lambda: loss(student, teacher, mask, direction=direction).sum


def attention_score_mse(draw: Draw, *, tokens: int) -> Made:
    (student, teacher), mask = _sides(draw, tokens), AttentionMask(draw.mask(2, tokens))
    return [*student[:2]], lambda: attention.attention_score_mse(student, teacher, mask).sum


def relation_kl(draw: Draw, *, tokens: int, batch: int = 2, loss: Any = attention.relation_kl) -> Made:
    """Values of both models, 12 heads of 64 each, cut anew into 48."""
    student, teacher = (draw(batch, 12, tokens, 64, learned=learned) for learned in (True, False))
    mask, sides = AttentionMask(draw.mask(batch, tokens)), [RelationInputs(side, side) for side in (student, teacher)]
    return [student], lambda: loss(*sides, mask, relation_heads=48).sum


def matrix_mse(
    draw: Draw,
    *,
    tokens: int,
    width: int = 64,
    heads: Sequence[int] = (8, 2),
    batch: int = 2,
    loss: Any = features.matrix_mse,
) -> Made:
    """Heads as projections leave them, views of (B, T, H, D); each number of heads is a matrix of its own."""
    mask = draw.mask(batch, tokens)
    pairs = [[draw(batch, tokens, each, width, learned=learned) for learned in (True, False)] for each in heads]

    def call() -> Tensor:
        return torch.stack([loss(*(side.transpose(1, 2) for side in pair), mask).sum for pair in pairs]).sum()

    return [learned for learned, _ in pairs], call


def normalized_mse(draw: Draw, *, tokens: int) -> Made:
    student, teacher = (draw(2, tokens, 1_100, learned=learned) for learned in (True, False))
    mask = draw.mask(2, tokens)
    return [student], lambda: features.matrix_mse(student, teacher, mask, normalize=True).sum


def head_inputs(draw: Draw, *, rows: int, width: int, vocabulary: int) -> tuple[HeadInputs, HeadInputs]:
    """What goes into the LM heads of student and teacher, and their weights."""

    def side(learned: bool) -> HeadInputs:
        weight_scale = 1.5 * width**-0.5
        inputs = draw(rows, width, learned=learned)
        return HeadInputs(inputs, draw(vocabulary, width, learned=learned, scale=weight_scale), None)

    return side(True), side(False)


def head_losses(draw: Draw, *, terms: Sequence[TokenTerm], loss: Any = head.token_losses, **sizes: int) -> Made:
    student, teacher = head_inputs(draw, **sizes)
    labels_N = torch.randint(sizes["vocabulary"], (sizes["rows"],)).to(draw.device)
    factors = torch.tensor([0.7, 0.3][: len(terms)], device=draw.device) / sizes["rows"]
    return [student.rows, student.weight], lambda: loss(student, teacher, labels_N, terms, factors).total


# The bench


def matrix_mse_plain(student: Tensor, teacher: Tensor, attention_mask: Tensor) -> LossSum:
    """Features in fp32 copies, without what is padding."""
    real_BT1 = attention_mask[..., None] != 0
    sides = (torch.where(real_BT1, side_by_side(side), 0.0).float() for side in (student, teacher))
    return LossSum(functional.mse_loss(*sides, reduction="none").mean(-1).sum(), real_BT1.sum())


CASES: dict[str, tuple[Any, Any]] = {
    "attention_kl": (attention_kl, attention_kl_plain),
    "relation_kl": (relation_kl, relation_kl_plain),
    "head_losses": (head_losses, token_losses_plain),
    "matrix_mse": (matrix_mse, matrix_mse_plain),
}
"""And the naive losses."""


def build(row: dict[str, Any], device: torch.device) -> Work:
    """One row: {"loss": a case, "way": fused, naive or products, "sizes": of the case}."""
    draw = Draw(device, torch.bfloat16 if row.get("bf16") else torch.float32)
    if row["way"] == "products":
        student, teacher = head_inputs(draw, **row["sizes"])
        return Work(lambda: _products(student, teacher))
    more: dict[str, Any] = {"terms": [TokenTerm("kl", FORWARD_KL)]} if row["loss"] == "head_losses" else {"batch": 1}
    case, naive = CASES[row["loss"]]
    if row["way"] == "naive":
        more["loss"] = naive
    leaves, call = case(draw, **row["sizes"], **more)

    def both_ways() -> None:
        call().backward()
        for leaf in leaves:
            leaf.grad = None

    return Work(both_ways)


@torch.no_grad()
def _products(student: HeadInputs, teacher: HeadInputs) -> None:
    """The four bare matrix products, with nothing in between."""
    derivative_NV = student.rows @ student.weight.T
    teacher.rows @ teacher.weight.T
    derivative_NV @ student.weight
    derivative_NV.T @ student.rows


def compared(
    settings: Settings, table: Table, name: str, row: dict[str, Any], targets: tuple[float | None, ...] = (None, None)
) -> None:
    """Fused over naive: a line of time and one of memory; a third target is beside the products."""
    ways = ("fused", "naive", "products")[: 3 if row["loss"] == "head_losses" else 2]
    found = measure(build, {way: {**row, "way": way} for way in ways}, settings)
    fused, naive = found["fused"], found["naive"]
    table.time(f"{name}: time / naive", fused, naive, targets[0])
    table.memory(f"{name}: memory / naive", fused, naive, targets[1])
    if "products" in found:
        table.time(f"{name}: time / four bare products", fused, found["products"], *targets[2:])


def main() -> None:
    settings, table, _ = parse(bench_parser(__doc__))
    sizes = QUICK if settings.quick else FULL
    for tokens in sizes["attention"]:
        for kind in ("full",) if settings.quick else ("full", "causal"):
            heads = {"heads": 12, "groups": (12, 12), "causal": kind == "causal"}
            row = {"loss": "attention_kl", "sizes": {"tokens": tokens, **heads}}
            compared(settings, table, f"attention KL {kind} T={tokens}", row, ATTENTION_TARGETS[tokens])
    for rows in sizes["rows"]:
        row = {"loss": "head_losses", "sizes": {"rows": rows, "width": 768, "vocabulary": sizes["vocabulary"]}}
        targets = HEAD_TARGETS.get(rows, (None, None, None))
        compared(settings, table, f"head + KL N={rows}", row, targets)
    tokens = sizes["relation"]
    row = {"loss": "relation_kl", "sizes": {"tokens": tokens}}
    compared(settings, table, f"relation KL, 48 heads T={tokens}", row, (None, RELATION_MEMORY))
    tokens, bf16 = sizes["matrix"], settings.device == "cuda"
    row = {"loss": "matrix_mse", "sizes": {"tokens": tokens, "heads": (12,)}, "bf16": bf16}
    compared(settings, table, f"squared error T={tokens}, {'bf16' if bf16 else 'fp32'}", row)
    table.finish()


if __name__ == "__main__":
    run(main)
