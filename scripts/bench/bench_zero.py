"""What DeepSpeed does besides the model: bytes and operations of a step of its optimizer, at each ZeRO stage.

    python scripts/bench/bench_zero.py                    # ZeRO-1 to 3 on 1 and 2 ranks, a minute
    python scripts/bench/bench_zero.py --ds_config FILE

A stack of bf16 matrices learns under DeepSpeed with weights in fp32 beside it. Counted is what a rank's step reads and
writes, in bytes per parameter of the model, and the operations per matrix that it launches, without the matrices' own
forward and backward pass; what moves between ranks is not counted. "No DeepSpeed" is what one rank cannot do without:
the norm, clipping, and AdamW on the fp32 weights. "Ours" lets the norm say whether a gradient is finite, and on a GPU
sums it in fp32. Nothing is timed, so any machine counts the same.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as processes
from benching import run
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmdistill.config import TrainConfig
from llmdistill.files import read_json, write_json
from llmdistill.internals import deepspeed_names
from llmdistill.runtime.ds_config import read_ds_config
from llmdistill.runtime.engine import split_batch, student_ds_config
from llmdistill.runtime.launch import free_port

WIDTH, MATRICES = 256, 24
ONLY_WRITTEN = ("copy_", "zero_", "fill_")
WAYS = ("DeepSpeed alone", "ours on a CPU", "ours on a GPU")


class Figures(NamedTuple):
    bytes: float
    """Read and written, per parameter."""
    operations: float
    """Per matrix."""


class Traffic(TorchDispatchMode):
    """Counts the operations that make or change a tensor, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.operations = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        made = [] if func.is_view else [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if (not made and not name.endswith("_")) or "empty" in name or name.startswith("c10d::"):
            return result
        given = {id(each): each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        written = [
            each
            for argument, value in zip(func._schema.arguments, args, strict=False)
            # AdamW's gradients count as written in its schema, which they are with a scaler alone.
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads"
            for each in tree_leaves(value)
        ]
        fresh = [each for each in made if id(each) not in given]
        unread = {id(written[0])} if name.removeprefix("aten::") in ONLY_WRITTEN else set()
        read = [each for key, each in given.items() if key not in unread]
        self.bytes[name] += sum(each.numel() * each.element_size() for each in (*read, *written, *fresh))
        self.operations[name] += 1
        return result

    def above(self, other: Traffic | None, parameters: int) -> Figures:
        """Return what was counted beyond `other`."""
        less = other or Traffic()
        moved = sum(self.bytes.values()) - sum(less.bytes.values())
        launched = sum(self.operations.values()) - sum(less.operations.values())
        return Figures(moved / parameters, launched / MATRICES)


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(MATRICES))).to(torch.bfloat16)


def floor() -> Figures:
    """Return what a step needs on one rank: the norm, clipping, and AdamW on fp32 weights, copied back."""
    model = stack()
    parameters = [*model.parameters()]
    model(torch.randn(1, WIDTH, dtype=torch.bfloat16)).float().square().mean().backward()
    exact = torch.cat([each.detach().flatten().float() for each in parameters])
    exact.grad = torch.zeros_like(exact)
    optimizer = torch.optim.AdamW([exact], fused=True)
    optimizer.step()
    with Traffic() as counted:
        gradients = [each.grad for each in parameters if each.grad is not None]
        norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in gradients]
        scale = (1 / (torch.stack(norms).norm() + 1e-6)).clamp(max=1)
        for part, gradient in zip(exact.grad.split([each.numel() for each in gradients]), gradients, strict=True):
            part.copy_(gradient.view(-1))
        exact.grad.mul_(scale)
        optimizer.step()
        for part, parameter in zip(exact.split([each.numel() for each in parameters]), parameters, strict=True):
            parameter.detach().view(-1).copy_(part)
    return counted.above(None, exact.numel())


def count(rank: int, ranks: int, port: int, ds_config: dict[str, Any], result: Path) -> None:
    """Be a rank: train two steps in each way, and count the second."""
    for stream in (sys.stdout, sys.stderr):  # an exception goes to the parent by itself
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in places.items()}
    torch.set_num_threads(1)
    deepspeed_names.leave_out_shared_memory()
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    figures = {}
    for way in WAYS:
        model, x = stack(), torch.randn(1, WIDTH, dtype=torch.bfloat16)
        with Traffic() as own:
            model(x).float().square().mean().backward()
        model.zero_grad(set_to_none=True)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=[*model.parameters()], config=ds_config)
        if way != "DeepSpeed alone":
            deepspeed_names.judge_by_norm(engine, in_fp32=way == "ours on a GPU")
        for _ in range(2):
            with Traffic() as passes:
                engine.backward(engine(x).float().square().mean())
            with Traffic() as stepped:
                engine.step()
        parameters = WIDTH * WIDTH * MATRICES
        figures[way] = (passes.above(own, parameters), stepped.above(None, parameters))
    if rank == 0:
        write_json(result, figures)


def show(name: str, backward: Figures, step: Figures) -> None:
    cells = (backward.bytes, step.bytes, backward.operations, step.operations)
    print(f"{name:<34}" + "".join(f"{cell:>13.1f}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ds_config", nargs="+", default=["zero1", "zero2", "zero3"], help="files or shipped names")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    options = parser.parse_args()
    settings = TrainConfig(dtype="bf16")
    print(f"{'':<34}{'bytes per parameter':>26}{'operations per matrix':>26}")
    print(f"{'configuration, ranks, way':<34}" + 2 * f"{'backward':>13}{'step':>13}")
    show("no DeepSpeed, 1", Figures(0, 0), floor())
    for name in options.ds_config:
        for ranks in options.ranks:
            with TemporaryDirectory() as folder:
                split = split_batch(ranks, None, ranks)
                of_ranks = replace(settings, global_batch_size=ranks)
                ds_config = student_ds_config(read_ds_config(name), name, of_ranks, split, output_dir=folder)
                processes.spawn(count, (ranks, free_port(), ds_config, Path(folder) / "figures.json"), nprocs=ranks)
                for way, rows in read_json(Path(folder) / "figures.json").items():
                    show(f"{name}, {ranks}, {way}", *(Figures(*row) for row in rows))


if __name__ == "__main__":
    run(main)
