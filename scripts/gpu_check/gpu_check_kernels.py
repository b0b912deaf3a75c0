"""The parts of gpu_check that need no DeepSpeed: the fused losses, the tests, and the benches.

The losses (Triton's kernels on a GPU, blocks on a CPU) are compared with the blocks of a CPU in fp64, which the tests
hold against plain losses. The numbers of both are the same: drawn in fp32, rounded to the format that is checked.
Differences are norms, as a share of the norm that there should be.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import bench_llama
import bench_losses as cases
import torch
from bench_losses import Draw, Made
from benching import Line
from torch import Tensor

from llmdistill.losses import divergence
from llmdistill.losses.fused.triton import available
from llmdistill.losses.terms import TokenTerm
from llmdistill.runtime.distributed import World

ROOT = Path(__file__).resolve().parents[2]
HEAD_WIDTHS = (64, 80, 96, 128)
"""Of Llama, GPT-2 and Qwen; of phi-2; of Phi-3-mini; of Llama 3."""

FORMATS = {torch.bfloat16: ("bf16", 2e-2), torch.float32: ("fp32", 1e-5)}
"""Number format -> its name, and how far from fp64 it may be. The logits themselves are rounded to the 8 bits of bf16,
and the gradient of KL(S‖T) is made of their differences: 1.1e-2 in blocks on a CPU, the other losses 0.2e-2."""

TERMS = {
    "labels and KL(T‖S)": (TokenTerm("label", None), TokenTerm("kl", divergence.FORWARD_KL, 2.0, 4.0)),
    "KL(S‖T) and JSD": (TokenTerm("kl", divergence.REVERSE_KL), TokenTerm("jsd", divergence.jsd_with_derivative(0.3))),
    "smoothed labels and skew KL": (
        TokenTerm("label", None, smoothing=0.1),
        TokenTerm("kl", divergence.skew_reverse_kl_with_derivative(0.1)),
    ),
}

FULL = {"tokens": 512, "rows": 256, "vocabulary": 128_256, "width": 256}
SMALL = {"tokens": 40, "rows": 12, "vocabulary": 1_000, "width": 32}
"""The width is that of the model before its LM head."""


def kernels(world: World) -> Iterator[Line]:
    """Check each loss; the first line says if kernels are left out."""
    device = world.device
    sizes = SMALL if device.type == "cpu" else FULL
    by = "Triton" if available(device) else "blocks"
    if by == "blocks":
        why = "no GPU" if device.type == "cpu" else "no Triton 3.4, or a GPU older than the A100"
        yield Line(f"Triton's kernels: {why}; the losses in blocks stand for them", math.nan)
    tokens = {"tokens": sizes["tokens"]}
    of_head = {key: sizes[key] for key in ("rows", "vocabulary", "width")}
    checks: dict[str, Callable[[Draw], Made]] = {
        "attention KL(T‖S), heads of 64, GQA": partial(cases.attention_kl, **tokens, direction="teacher_student"),
        "attention scores, heads of 64, GQA": partial(cases.attention_score_mse, **tokens),
        "relation KL, 48 heads of 16": partial(cases.relation_kl, **tokens),
        "squared error over the mean square, 1,100 features": partial(cases.normalized_mse, **tokens),
    }
    for width in HEAD_WIDTHS:
        attention, error = (partial(each, **tokens, width=width) for each in (cases.attention_kl, cases.matrix_mse))
        checks[f"attention KL(S‖T), heads of {width}, GQA"] = attention
        checks[f"squared error of queries and keys, heads of {width}, GQA"] = error
    for name, terms in TERMS.items():
        checks[f"LM head, {name}, V = {sizes['vocabulary']:,}"] = partial(cases.head_losses, terms=terms, **of_head)
    for dtype, (short, limit) in FORMATS.items():
        for name, make in checks.items():
            loss, gradients = differences(make, dtype, device)
            worst = float(torch.tensor([loss, gradients]).max())  # NaN where either is
            yield Line(f"{name}, {short}", worst, limit, f"{by}: loss {loss:.1e}, gradients {gradients:.1e}")


def differences(make: Callable[[Draw], Made], dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    found: list[tuple[Tensor, list[Tensor]]] = []
    for draw in (Draw(device, dtype, dtype), Draw(torch.device("cpu"), torch.float64, dtype)):
        torch.manual_seed(0)
        leaves, call = make(draw)
        loss = call()
        loss.backward()
        found.append((loss.detach().cpu(), [leaf.grad.cpu() for leaf in leaves if leaf.grad is not None]))
    (loss, gradients), (exact_loss, exact_gradients) = found
    pairs = zip(gradients, exact_gradients, strict=True)
    return difference(loss, exact_loss), float(torch.tensor([difference(*pair) for pair in pairs]).max())


def difference(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


# What the tests and the benches say


def tests(_: World) -> Iterator[Line]:
    import pytest

    unit = ROOT / "tests" / "unit"
    files = [file for file in unit.rglob("test_*.py") if 'reason="needs a GPU"' in file.read_text(encoding="utf-8")]
    words = ["-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    code = pytest.main([*words, *map(str, sorted(files)), str(unit / "losses" / "fused")])
    yield Line("exit code of pytest", float(code), 0, f"{len(files)} files, and those of the kernels")


def llama(world: World) -> Iterator[Line]:
    """Steps of KD and MaKD, with ZeRO-2 and without, as ratios to their floor."""
    on_gpu = world.device.type == "cuda"
    plain, factorized = ("3b-1b", "1b-rank-640") if on_gpu else bench_llama.TINY
    cases = {plain: ("floor", "ours", "zero2"), factorized: ("floor", "zero2")}
    for name, wanted in cases.items():
        lines = {}
        for way in wanted:
            case = (bench_llama.CASES | bench_llama.TINY)[name]
            lines[way] = line = bench_llama.line_of(case, way, world.device.type, 10 if on_gpu else 1)
            if "error" in line:
                raise RuntimeError(f"{name}, {way}: {line['error']}")
            figures = [f"{key} {line[key]:,}" for key in ("tokens_per_second", "peak_gb", "tflops") if line[key]]
            ratio = line["ms"] / lines["floor"]["ms"]
            yield Line(f"{name}, {way}: time / floor", ratio, detail=f"{line['ms']} ms; {', '.join(figures)}")


def steps(world: World) -> Iterator[Line]:
    for step in ("kd", "makd", "encoder", "packed"):  # one after the other, so that a limit leaves what is done
        yield from bench("bench_step.py", world, "--only", step)
    yield from bench("bench_step.py", world, "--peers")


def losses(world: World) -> Iterator[Line]:
    yield from bench("bench_losses.py", world)


def bench(script: str, world: World, *arguments: str) -> Iterator[Line]:
    """Run a bench, and yield its figures. They have no limits here: its targets are for CPUs."""
    device = world.device.type
    small = ("--quick", "--repeats", "1") if device == "cpu" else ()
    command = [sys.executable, str(ROOT / "scripts" / "bench" / script), "--device", device, *small, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    if done.returncode != 0:
        raise RuntimeError(f"{script} ended with {done.returncode}")
    found = json.loads(done.stdout.splitlines()[-1])
    yield from (Line(name, math.nan if value is None else value) for name, value in found.items())
