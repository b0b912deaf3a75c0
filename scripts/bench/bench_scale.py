"""How a training step grows: from one rank to two, and with length, vocabulary and layers.

    python scripts/bench/bench_scale.py           # minutes
    python scripts/bench/bench_scale.py --quick   # small models, under a minute

Ranks: the same micro batch on each of one or two ranks (weak scaling), by DeepSpeed's engine, with one thread a rank,
or one GPU. The efficiency is the time of a step on one rank over that on two, which take turns. A third row has two
ranks that do not talk to each other, and loses what the machine costs, whose cores share its memory.

Growth: the time of a MaKD step without DeepSpeed over that of the step it grew from, and this ratio over that of the
multiply-adds, which are counted: above 1 something grows faster than the products.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import step_rows
import torch
from benching import (
    Line,
    Measured,
    Row,
    Settings,
    Table,
    Work,
    bench_parser,
    in_seconds,
    measure,
    parse,
    run,
    time_ratio,
)

from llmdistill.config import TrainConfig
from llmdistill.runtime.distributed import init_distributed
from llmdistill.runtime.engine import build_engine
from llmdistill.runtime.launch import free_port
from llmdistill.runtime.terminal import quiet_libraries
from llmdistill.runtime.tracing import Tracer

EFFICIENCY = 0.85
STAGES = ("zero2", "zero1", "zero3")
RANKED = {"task": "kd", "way": "ours", "width": 384, "heads": 6, "vocabulary": 8192, "layers": 6, "student_layers": 3}
RANKED |= {"batch": 4, "tokens": 256}
SMALL_RANKED = {**RANKED, "width": 128, "heads": 2, "tokens": 64}

GROWN = {"task": "makd", "way": "ours", "width": 256, "heads": 4, "vocabulary": 8192, "layers": 4, "student_layers": 4}
GROWN |= {"rank": 64, "batch": 2, "tokens": 256}
SMALL_GROWN = {**GROWN, "width": 128, "vocabulary": 2048, "rank": 32, "tokens": 64}


def build(row: dict[str, Any], device: torch.device) -> Work:
    """One row: a step of bench_step, or with {"ranks": ..., "ds_config": ..., "apart": ...} one of several ranks."""
    if "ranks" in row:
        return ranked(row, device)
    work = step_rows.build(row, device)
    assert work.call is not None
    tracer = Tracer()
    with tracer:
        work.call()
    return Work(work.call, {"multiply_adds": tracer.work.flops / 2})


def ranked(row: dict[str, Any], device: torch.device) -> Work:
    """A step on all ranks; the process of rank 0 starts the others, which step when it orders it."""
    rank, port = row.get("place", 0), row.get("port") or free_port()
    alone = Settings(quick=False, device=device.type, threads=torch.get_num_threads(), repeats=0)
    others = [
        Row(build, {**row, "place": other, "port": free_port() if row["apart"] else port}, alone)
        for other in range(1, row["ranks"] if rank == 0 else 1)
    ]
    place = {"RANK": 0 if row["apart"] else rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place |= dict.fromkeys(("WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"), 1 if row["apart"] else row["ranks"])
    os.environ |= {name: str(value) for name, value in place.items()}
    step = engine_step(row, device)
    if others:
        step()  # with the one by which the others warm up
    for other in others:
        other.answer()

    def on_all_ranks() -> float:
        for other in others:
            other.order("time")
        loss = step()
        for other in others:
            other.answer()
        return loss

    return Work(on_all_ranks)


def engine_step(row: dict[str, Any], device: torch.device) -> Callable[[], float]:
    world, batch = init_distributed(), row["batch"]
    quiet_libraries()
    train = TrainConfig(global_batch_size=batch * world.size, micro_batch_size=batch, learning_rate=1e-8, dtype="fp32")
    ds_config = step_rows.ds_config(row["ds_config"], train, world.size)
    setting = step_rows.make_setting(row, world.device)
    return step_rows.ours(setting, row, lambda student: build_engine(student, ds_config, train))


def ranks(settings: Settings, table: Table) -> None:
    """One rank beside two, for each stage of ZeRO."""
    row = SMALL_RANKED if settings.quick else RANKED
    settings = replace(settings, threads=1)
    for ds_config in STAGES[:1] if settings.quick else STAGES:
        row = {**row, "ds_config": ds_config, "apart": False}
        rows = {"one": {**row, "ranks": 1}, "two": {**row, "ranks": 2}, "apart": {**row, "ranks": 2, "apart": True}}
        found = measure(build, rows, settings, memory=False)
        one, two, apart = (found[name] for name in ("one", "two", "apart"))
        name = f"{ds_config}, {row['batch']}×{row['tokens']} a rank"
        efficiency = time_ratio(one, two), EFFICIENCY, in_seconds(one, two)
        table.add(Line(f"{name}: 1 → 2 ranks", *efficiency, at_least=True))
        table.time(f"{name}: two that do not talk", one, apart)
        table.time(f"{name}: two over two that do not talk", apart, two)


def growth(settings: Settings, table: Table) -> None:
    """Steps that have more of one thing, beside the one that they grew from."""
    base: dict[str, Any] = SMALL_GROWN if settings.quick else GROWN
    layers = 2 * base["layers"]
    rows = {
        "base": base,
        **{f"length {base['tokens'] * times}": {**base, "tokens": base["tokens"] * times} for times in (2, 4)},
        f"vocabulary {base['vocabulary'] * 4}": {**base, "vocabulary": base["vocabulary"] * 4},
        f"layers {layers}": {**base, "layers": layers, "student_layers": layers},
    }
    found = measure(build, rows, settings, memory=False)
    start = found.pop("base")
    for name, larger in found.items():
        table.add(grew(name, start, larger))


def grew(name: str, start: Measured, larger: Measured) -> Line:
    """How much more time than multiply-adds a larger step takes."""
    time = time_ratio(larger, start)
    products = larger.facts["multiply_adds"] / start.facts["multiply_adds"]
    detail = f"{time:.3g} × the time; {products:.3g} × the multiply-adds; {in_seconds(larger, start)}"
    return Line(f"MaKD step, {name}: time / multiply-adds", time / products, None, detail)


def main() -> None:
    settings, table, _ = parse(bench_parser(__doc__))
    if settings.device == "cuda" and torch.cuda.device_count() < 2:
        table.say("two ranks need two GPUs, so that they are left out")
    else:
        ranks(settings, table)
    growth(settings, table)
    table.finish()


if __name__ == "__main__":
    run(main)
