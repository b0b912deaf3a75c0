"""The losses alone, fused against plain: time, and memory above the inputs.

    python scripts/bench/bench_losses.py             # the sizes that the targets are set for, minutes
    python scripts/bench/bench_losses.py --quick     # smaller ones, under a minute

One call is forward and backward of one loss: attention KL of one layer (12 heads of 64, batch 1), the head and the KL
of the output together (768 wide, 50,257 words, gradients of rows and weight), the KL of one relation (48 relation
heads, V-V of 768), the squared error of queries (12 heads of 64, views of (B, T, H, D)). Naive is the same loss from
whole matrices, by autograd (tests/plain_losses.py). The bare products are the four that no head does without: both models'
logits, and the gradients of rows and weight. All is fp32; the squared error on a GPU is bf16.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

import loss_cases
import torch
from benching import Settings, Table, Work, bench_parser, measure, parse, run
from plain_losses import attention_kl_plain, relation_kl_plain, token_losses_plain
from torch import Tensor
from torch.nn import functional

from llmdistill.batch import LossSum
from llmdistill.losses.attention import side_by_side
from llmdistill.losses.divergence import FORWARD_KL
from llmdistill.losses.terms import TokenTerm

FULL = {"attention": (512, 1024, 2048), "rows": (1024, 4096), "vocabulary": 50257, "relation": 512, "matrix": 16384}
QUICK = {"attention": (512,), "rows": (512,), "vocabulary": 16384, "relation": 256, "matrix": 2048}

ATTENTION_TARGETS = {512: (1.0, 0.14), 1024: (0.35, 0.12), 2048: (0.35, 0.06)}
HEAD_TARGETS = {1024: (0.85, 0.26, 1.15), 4096: (0.78, 0.06, 1.09)}
"""By rows: time over naive, memory over naive, time over the products."""
RELATION_MEMORY = 0.12


def matrix_mse_plain(student: Tensor, teacher: Tensor, attention_mask: Tensor) -> LossSum:
    """Features in fp32 copies, without what is padding."""
    real_BT1 = attention_mask[..., None] != 0
    sides = (torch.where(real_BT1, side_by_side(side), 0.0).float() for side in (student, teacher))
    return LossSum(functional.mse_loss(*sides, reduction="none").mean(-1).sum(), real_BT1.sum())


NAIVE = {
    "attention_kl": attention_kl_plain,
    "relation_kl": relation_kl_plain,
    "head_losses": token_losses_plain,
    "matrix_mse": matrix_mse_plain,
}


def build(row: dict[str, Any], device: torch.device) -> Work:
    """One row: {"loss": a case of loss_cases, "way": fused, naive or products, "sizes": of the case}."""
    draw = loss_cases.Draw(device, torch.bfloat16 if row.get("bf16") else torch.float32)
    if row["way"] == "products":
        student, teacher = loss_cases.head_inputs(draw, **row["sizes"])
        return Work(lambda: _products(student, teacher))
    more: dict[str, Any] = {"terms": [TokenTerm("kl", FORWARD_KL)]} if row["loss"] == "head_losses" else {"batch": 1}
    if row["way"] == "naive":
        more["loss"] = NAIVE[row["loss"]]
    leaves, call = getattr(loss_cases, row["loss"])(draw, **row["sizes"], **more)

    def both_ways() -> None:
        call().backward()
        for leaf in leaves:
            leaf.grad = None

    return Work(both_ways)


@torch.no_grad()
def _products(student: loss_cases.HeadInputs, teacher: loss_cases.HeadInputs) -> None:
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
