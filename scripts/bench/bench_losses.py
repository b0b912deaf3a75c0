"""The losses alone, fused against plain: time, memory above the inputs, and gradients.

    python scripts/bench/bench_losses.py             # the sizes that the targets are set for, minutes
    python scripts/bench/bench_losses.py --quick     # smaller ones, under a minute

One call is forward and backward of one loss: attention KL of one layer (12 heads of 64, batch 1), the head and the KL
of the output together (768 wide, 50,257 words, gradients of rows and weight), the KL of one relation (48 relation
heads, V-V of 768), the squared error of queries (12 heads of 64, views of (B, T, H, D)). Naive is the same loss from
whole matrices, by autograd (plain_losses.py). The bare products are the four that no head does without: both models'
logits, and the gradients of rows and weight, each in one piece. Inputs and gradients are fp32; those of the squared
error have the dtype that a run would take (bf16 on a GPU, where the plain version with the same gradient in closed form
is measured too). The last lines say how far the gradients are from the naive ones, as a share of the largest.

The last line is JSON: {"attention_kl": {"1024": {"time_over_naive": ..., "memory_over_naive": ...}}, "head_kl":
{"4096": ...}, "relation_kl": {"512": ...}, "matrix_mse": {"16384": ...}, "gradients": {"fp32": ..., "bf16": ...}}. The
attention's figures are the worse of causal and not; each of both is there too (--quick: not causal alone).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from benching import Settings, Work, bench_parser, facts_of, measure, parse
from benching_table import Line, Table
from torch import Tensor

Call = Callable[[], Tensor]
"""The loss, a scalar whose graph is there."""

FULL = {"attention": (512, 1024, 2048), "rows": (1024, 4096), "vocabulary": 50257, "relation": 512, "matrix": 16384}
QUICK = {"attention": (512,), "rows": (512,), "vocabulary": 16384, "relation": 256, "matrix": 2048}

ATTENTION_TARGETS = {512: (1.0, 0.14), 1024: (0.35, 0.12), 2048: (0.35, 0.06)}
HEAD_TARGETS = {1024: (0.85, 0.26, 1.15), 4096: (0.78, 0.06, 1.09)}
"""By rows: time over naive, memory over naive, time over the products."""
RELATION_MEMORY = 0.12
GRADIENTS = {"fp32": 1e-5, "bf16": 1e-2}


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


def build(row: dict[str, Any], device: torch.device) -> Work:
    """One row: {"loss": a key of LOSSES, "way": fused, naive or products, and sizes}; check takes all losses."""
    if row["way"] == "check":
        return Work(None, {loss: gradient_differences({**row, "loss": loss}, device) for loss in LOSSES})
    dtype = torch.bfloat16 if row.get("dtype") == "bf16" else torch.float32
    leaves, call = LOSSES[row["loss"]](row, Draw(device, dtype))
    if row["way"] == "products":
        return Work(lambda: call().is_sparse)

    def both_ways() -> None:
        call().backward()
        for leaf in leaves:
            leaf.grad = None

    return Work(both_ways)


def attention_kl(row: dict[str, Any], draw: Draw) -> tuple[list[Tensor], Call]:
    """Queries and keys of both models."""
    from plain_losses import attention_kl_plain as naive

    from llmdistill.losses.attention import AttentionInputs
    from llmdistill.losses.attention import attention_kl as fused

    tokens = row["tokens"]
    student, teacher = ([draw(1, 12, tokens, 64, learned=learned) for _ in range(2)] for learned in (True, False))
    mask = torch.ones(1, tokens, dtype=torch.int64, device=draw.device)
    function = {"fused": fused, "naive": naive}[row["way"]]
    sides = AttentionInputs(*student, 0.125), AttentionInputs(*teacher, 0.125)
    return student, lambda: function(*sides, mask, causal=row["causal"]).sum


def relation_kl(row: dict[str, Any], draw: Draw) -> tuple[list[Tensor], Call]:
    """Values of both models, 12 heads of 64 each, cut anew."""
    from plain_losses import relation_kl_plain as naive

    from llmdistill.losses.attention import RelationInputs
    from llmdistill.losses.attention import relation_kl as fused

    tokens = row["tokens"]
    student, teacher = (draw(1, 12, tokens, 64, learned=learned) for learned in (True, False))
    mask = torch.ones(1, tokens, dtype=torch.int64, device=draw.device)
    function = {"fused": fused, "naive": naive}[row["way"]]
    sides = RelationInputs(student, student), RelationInputs(teacher, teacher)
    return [student], lambda: function(*sides, mask, relation_heads=48, causal=False).sum


def matrix_mse(row: dict[str, Any], draw: Draw) -> tuple[list[Tensor], Call]:
    """Queries of both models, 12 heads of 64, as projections leave them."""
    from plain_losses import matrix_mse_plain as naive

    from llmdistill.losses.features import matrix_mse as fused

    tokens = row["tokens"]
    student, teacher = (draw(1, tokens, 12, 64, learned=learned) for learned in (True, False))
    mask = torch.ones(1, tokens, dtype=torch.int64, device=draw.device)
    function = {"fused": fused, "naive": naive, "plain": _without_kernel}[row["way"]]
    return [student], lambda: function(student.transpose(1, 2), teacher.transpose(1, 2), mask).sum


def _without_kernel(student: Tensor, teacher: Tensor, mask: Tensor) -> Any:
    from llmdistill.batch import LossSum
    from llmdistill.losses.features import squared_error
    from llmdistill.losses.gradient import with_gradient

    real_BT = mask != 0
    with torch.no_grad():
        total, gradient = squared_error(student, teacher, real_BT, min_square=None, with_gradient=True)
    return LossSum(with_gradient(total, (student, gradient)), real_BT.sum())


def head_kl(row: dict[str, Any], draw: Draw) -> tuple[list[Tensor], Call]:
    """What goes into both heads, and their weights."""
    from plain_losses import token_losses_plain

    from llmdistill.losses.divergence import FORWARD_KL
    from llmdistill.losses.head import HeadInputs, token_losses
    from llmdistill.losses.terms import TokenTerm

    rows, vocabulary, width = row["tokens"], row["vocabulary"], 768
    student, teacher = (
        HeadInputs(draw(rows, width, learned=learned), draw(vocabulary, width, learned=learned, scale=0.05), None)
        for learned in (True, False)
    )
    leaves = [student.rows, student.weight]
    if row["way"] == "products":
        return leaves, lambda: _products(student, teacher)
    labels_N = torch.randint(vocabulary, (rows,), device=draw.device)
    factors = torch.full((1,), 1 / rows, device=draw.device)
    terms = [TokenTerm("kl", FORWARD_KL)]
    function = {"fused": token_losses, "naive": token_losses_plain}[row["way"]]
    return leaves, lambda: function(student, teacher, labels_N, terms, factors).total


@torch.no_grad()
def _products(student: Any, teacher: Any) -> Tensor:
    """The four bare matrix products, with nothing in between; the last of them."""
    derivative_NV = student.rows @ student.weight.T
    teacher.rows @ teacher.weight.T
    derivative_NV @ student.weight
    gradient_VK: Tensor = derivative_NV.T @ student.rows
    return gradient_VK


LOSSES: dict[str, Callable[[dict[str, Any], Draw], tuple[list[Tensor], Call]]] = {
    "attention_kl": attention_kl,
    "head_kl": head_kl,
    "relation_kl": relation_kl,
    "matrix_mse": matrix_mse,
}
"""What is learned, and the loss, by the row's description and where its numbers come from."""


def gradient_differences(row: dict[str, Any], device: torch.device) -> dict[str, float]:
    """By number format: how far the fused gradients are from the naive ones in fp32 of the very same numbers."""
    found = {}
    # torch's very first exp in a process, if two threads share it, is now and then off by 1e-4; not one on few numbers.
    torch.exp(torch.zeros(64))
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        gradients = {}
        for way, draw in (("fused", Draw(device, dtype, dtype)), ("naive", Draw(device, rounded=dtype))):
            torch.manual_seed(0)
            leaves, call = LOSSES[row["loss"]]({**row, "way": way}, draw)
            call().backward()
            gradients[way] = [leaf.grad.float() for leaf in leaves if leaf.grad is not None]
        pairs = zip(gradients["fused"], gradients["naive"], strict=True)
        found[name] = max(relative_difference(*pair) for pair in pairs)
    return found


def relative_difference(fused: Tensor, naive: Tensor) -> float:
    """The largest difference, as a share of the largest number there should be."""
    return float((fused - naive).abs().max() / naive.abs().max())


def compared(
    settings: Settings,
    table: Table,
    name: str,
    row: dict[str, Any],
    beside: str = "",
    targets: tuple[float | None, ...] = (None, None),
) -> dict[str, Any]:
    """Fused over naive: a line of time and one of memory, and their figures; `beside` is a third way, with its time."""
    ways = ("fused", "naive", beside) if beside else ("fused", "naive")
    found = measure(__file__, {way: {**row, "way": way} for way in ways}, settings)
    fused, naive = found["fused"], found["naive"]
    figures = {
        "time_over_naive": table.time(f"{name}: time / naive", fused, naive, targets[0]),
        "memory_over_naive": table.memory(f"{name}: memory / naive", fused, naive, targets[1]),
    }
    if beside:
        against = f"{name}: time / {'four bare products' if beside == 'products' else beside}"
        figures[f"time_over_{beside}"] = table.time(against, fused, found[beside], *targets[2:])
    return figures


def bench_attention(settings: Settings, table: Table, sizes: dict[str, Any]) -> dict[str, Any]:
    """By tokens; the worse of causal and not, and both."""
    figures = {}
    for tokens in sizes["attention"]:
        each = {}
        for kind in ("full",) if settings.quick else ("full", "causal"):
            row = {"loss": "attention_kl", "tokens": tokens, "causal": kind == "causal"}
            name, targets = f"attention KL {kind} T={tokens}", ATTENTION_TARGETS[tokens]
            each[kind] = compared(settings, table, name, row, targets=targets)
        worse = {key: max(one[key] for one in each.values()) for key in each["full"]}
        figures[str(tokens)] = {**worse, **each}
    return figures


def bench_head(settings: Settings, table: Table, sizes: dict[str, Any]) -> dict[str, Any]:
    figures = {}
    for rows in sizes["rows"]:
        row = {"loss": "head_kl", "tokens": rows, "vocabulary": sizes["vocabulary"]}
        targets = HEAD_TARGETS.get(rows, (None, None, None))
        figures[str(rows)] = compared(settings, table, f"head + KL N={rows}", row, "products", targets)
    return figures


def bench_relation(settings: Settings, table: Table, sizes: dict[str, Any]) -> dict[str, Any]:
    row = {"loss": "relation_kl", "tokens": sizes["relation"]}
    name, targets = f"relation KL, 48 heads T={row['tokens']}", (None, RELATION_MEMORY)
    return {str(row["tokens"]): compared(settings, table, name, row, targets=targets)}


def bench_matrix(settings: Settings, table: Table, sizes: dict[str, Any]) -> dict[str, Any]:
    """By tokens; on a GPU against the plain version too."""
    on_gpu = settings.device == "cuda"
    row = {"loss": "matrix_mse", "tokens": sizes["matrix"], "dtype": "bf16" if on_gpu else "fp32"}
    name = f"squared error T={row['tokens']}, {row['dtype']}"
    return {str(row["tokens"]): compared(settings, table, name, row, "plain" if on_gpu else "")}


def bench_gradients(settings: Settings, table: Table) -> dict[str, float]:
    """The largest over the losses, by number format; small sizes, as nothing is timed."""
    found = facts_of(__file__, {"way": "check", "tokens": 300, "causal": True, "vocabulary": 5000}, settings)
    for loss, of_loss in found.items():
        for kind, target in GRADIENTS.items():
            table.add(Line(f"{loss}: gradients against naive, {kind}", of_loss[kind], target))
    return {kind: max(of_loss[kind] for of_loss in found.values()) for kind in GRADIENTS}


def main() -> None:
    settings, arguments = parse(bench_parser(__doc__), build)
    table = Table(settings, silent=arguments.json)
    sizes = QUICK if settings.quick else FULL
    figures = {
        "attention_kl": bench_attention(settings, table, sizes),
        "head_kl": bench_head(settings, table, sizes),
        "relation_kl": bench_relation(settings, table, sizes),
        "matrix_mse": bench_matrix(settings, table, sizes),
        "gradients": bench_gradients(settings, table),
    }
    table.finish(figures)


if __name__ == "__main__":
    main()
