"""One training step against its floor: teacher forward + student forward and backward on plain labels + optimizer.

    python scripts/bench/bench_step.py             # the sizes that the targets are set for, a quarter of an hour
    python scripts/bench/bench_step.py --quick     # small models, under a minute
    python scripts/bench/bench_step.py --peers     # TRL's GKD trainer beside ours, where trl is installed
    python scripts/bench/bench_step.py --peers --peers-python /path/to/a/venv/bin/python

Models have GPT-2's and BERT-base's shapes and random weights, fp32 on a CPU and on CUDA. Every row builds the same
models and the same batch; dropout is off. kd is the forward KL and the labels' cross-entropy together, makd its
defaults. The encoders stand under a classification head, so that nothing saved on a vocabulary hides what the losses of
the layers cost. What memory means here stands in benching.py.

The last line is JSON: {"kd_step": {"time_over_floor": ..., "memory_over_floor": ...}, "makd_step": ...,
"encoder_step": ..., "packed_step": ...}.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from importlib.util import find_spec
from typing import Any

from benching import Measured, RowFailed, Settings, measure, parse, time_ratio
from benching_table import Line, Table, in_megabytes, in_seconds
from step_rows import build

Rows = dict[str, dict[str, Any]]

GPT2 = {"width": 768, "heads": 12, "vocabulary": 50257, "layers": 12, "batch": 4, "tokens": 256}
BERT = {"width": 768, "heads": 12, "vocabulary": 30522, "layers": 12, "student_layers": 6}
SMALL_GPT2 = {"width": 192, "heads": 4, "vocabulary": 16384, "layers": 4, "batch": 2, "tokens": 128}
SMALL_BERT = {"width": 192, "heads": 4, "vocabulary": 8192, "layers": 4, "student_layers": 2}


def rows_of(task: str, ways: tuple[str, ...], sizes: dict[str, Any]) -> Rows:
    """The rows of one comparison, by the name of the way."""
    return {way: {"task": task, "way": way, **sizes} for way in ways}


def kd_step(settings: Settings, table: Table, peers_python: str | None) -> dict[str, Any]:
    """All tokens supervised, 40 % of them, and TRL's trainer."""
    small = settings.quick
    sizes = {**SMALL_GPT2, "student_layers": 2} if small else {**GPT2, "student_layers": 6}
    rows = rows_of("kd", ("floor", "ours"), sizes)
    rows["ours 40 %"] = {**rows["ours"], "labeled": 0.4}
    found: dict[str, Measured] = {}
    if peers_python is not None:
        try:
            found = measure(
                __file__, {**rows, **rows_of("kd", ("trl",), sizes)}, settings, pythons={"trl": peers_python}
            )
        except RowFailed as failure:
            table.say(f"TRL's row failed and is left out: {failure}")
    found = found or measure(__file__, rows, settings)
    name = f"KD step {sizes['batch']}×{sizes['tokens']}"
    figures = against_floor(table, name, found["ours"], found["floor"], time=1.03, memory=0.92)
    part = against_floor(table, f"{name}, 40 % supervised", found["ours 40 %"], found["floor"], time=0.85, memory=0.75)
    figures["supervised_40"] = part
    if "trl" in found:
        figures["time_over_trl"] = time_ratio(found["ours"], found["trl"])
        figures["memory_over_trl"] = found["ours"].bytes / found["trl"].bytes
        detail = in_seconds(found["ours"], found["trl"]), in_megabytes(found["ours"], found["trl"])
        table.add(
            Line(f"{name}: time / TRL's GKD trainer", figures["time_over_trl"], 0.95, detail[0]),
            Line(f"{name}: memory / TRL's GKD trainer", figures["memory_over_trl"], 0.65, detail[1]),
        )
    return figures


def makd_step(settings: Settings, table: Table) -> dict[str, Any]:
    """A factorized student of all the teacher's layers."""
    small = settings.quick
    sizes: dict[str, Any] = (
        {**SMALL_GPT2, "student_layers": 4, "rank": 64} if small else {**GPT2, "student_layers": 12, "rank": 256}
    )
    found = measure(__file__, rows_of("makd", ("floor", "ours", "naive"), sizes), settings)
    name = f"MaKD step {sizes['batch']}×{sizes['tokens']}"
    figures = against_floor(table, name, found["ours"], found["floor"], time=1.15, memory=None)
    figures["time_over_naive"] = time_ratio(found["ours"], found["naive"])
    figures["loss_difference_to_naive"] = abs(found["ours"].facts["first"] / found["naive"].facts["first"] - 1)
    table.add(
        Line(f"{name}: time / naive", figures["time_over_naive"], None, in_seconds(found["ours"], found["naive"])),
        Line(f"{name}: loss against naive, relative", figures["loss_difference_to_naive"], 1e-5, ""),
    )
    figures["memory_over_naive"] = memory_over_naive(table, name, found, 0.5)
    if not small:
        long = {**sizes, "batch": 1, "tokens": 1024}
        found = measure(__file__, rows_of("makd", ("ours", "naive"), long), settings, timed=())
        figures["1024"] = {"memory_over_naive": memory_over_naive(table, "MaKD step 1×1024", found, 0.25)}
    return figures


def memory_over_naive(table: Table, name: str, found: dict[str, Measured], target: float) -> float:
    """One line, and its figure."""
    value = found["ours"].bytes / found["naive"].bytes
    table.add(Line(f"{name}: memory / naive", value, target, in_megabytes(found["ours"], found["naive"])))
    return value


def encoder_step(settings: Settings, table: Table) -> dict[str, Any]:
    """Attention KL and hidden MSE on every layer of the student. The figures at the top are the worse of the sizes."""
    small = settings.quick
    sizes = SMALL_BERT if small else BERT
    figures: dict[str, Any] = {}
    for batch, tokens in [(4, 64)] if small else [(8, 128), (2, 512)]:
        rows = rows_of("encoder", ("floor", "ours"), {**sizes, "batch": batch, "tokens": tokens})
        found = measure(__file__, rows, settings)
        name = f"encoder step {batch}×{tokens}"
        of_size = against_floor(table, name, found["ours"], found["floor"], time=1.06, memory=None)
        of_size["megabytes_over_floor"] = (found["ours"].bytes - found["floor"].bytes) / 1e6
        table.add(Line(f"{name}: memory - floor", of_size["megabytes_over_floor"], 100, "", unit=" MB"))
        figures[f"{batch}x{tokens}"] = of_size
    keys = ("time_over_floor", "memory_over_floor", "megabytes_over_floor")
    worst = {key: max(of_size[key] for of_size in figures.values()) for key in keys}
    return {**worst, **figures}


def packed_step(settings: Settings, table: Table) -> dict[str, Any]:
    """KD on packed rows, beside the same with a mask of tokens x tokens. The figures at the top are the worse ones."""
    small = settings.quick
    sizes = {**SMALL_GPT2, "student_layers": 2} if small else {**GPT2, "student_layers": 6}
    figures: dict[str, Any] = {}
    for tokens, lengths in [(128, [40, 60, 28])] if small else [(256, [60, 70, 80, 46]), (1024, [255, 150, 301, 318])]:
        batch = sizes["batch"] * sizes["tokens"] // tokens
        row = {**sizes, "batch": batch, "tokens": tokens, "lengths": lengths}
        found = measure(__file__, rows_of("kd", ("ours", "dense"), row), settings)
        ours, dense = found["ours"], found["dense"]
        name = f"KD step on packed rows {batch}×{tokens}, {len(lengths)} sequences each"
        ratios = {"time_over_dense": time_ratio(ours, dense), "memory_over_dense": ours.bytes / dense.bytes}
        ratios["loss_difference_to_dense"] = abs(ours.facts["first"] / dense.facts["first"] - 1)
        table.add(
            Line(f"{name}: time / dense mask", ratios["time_over_dense"], 1.0, in_seconds(ours, dense)),
            Line(f"{name}: memory / dense mask", ratios["memory_over_dense"], None, in_megabytes(ours, dense)),
            Line(f"{name}: loss against dense mask, relative", ratios["loss_difference_to_dense"], 1e-5, ""),
        )
        figures[f"{batch}x{tokens}"] = ratios
    return {key: max(each[key] for each in figures.values()) for key in ratios} | figures


def against_floor(
    table: Table, name: str, ours: Measured, floor: Measured, *, time: float, memory: float | None
) -> dict[str, Any]:
    """Two lines with their targets, and their figures."""
    figures = {"time_over_floor": time_ratio(ours, floor), "memory_over_floor": ours.bytes / floor.bytes}
    table.add(
        Line(f"{name}: time / floor", figures["time_over_floor"], time, in_seconds(ours, floor)),
        Line(f"{name}: memory / floor", figures["memory_over_floor"], memory, in_megabytes(ours, floor)),
    )
    return figures


STEPS = ("kd", "makd", "encoder", "packed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this bench has beside the others."""
    parser.add_argument("--only", choices=STEPS, action="append", help="one of the steps alone; may be repeated")
    parser.add_argument("--peers", action="store_true", help="TRL's GKD trainer too, where trl is installed")
    parser.add_argument("--peers-python", default=sys.executable, help="the interpreter that has trl; this one's")


def main() -> None:
    settings, arguments = parse(__doc__, build, add=add_arguments)
    table = Table(settings, silent=arguments.json)
    peers_python = arguments.peers_python if arguments.peers else None
    if peers_python == sys.executable and find_spec("trl") is None:
        table.say("trl is not installed, so that TRL's GKD trainer is left out (--peers-python names another venv)")
        peers_python = None
    steps = {
        "kd": partial(kd_step, peers_python=peers_python),
        "makd": makd_step,
        "encoder": encoder_step,
        "packed": packed_step,
    }
    figures = {f"{name}_step": steps[name](settings, table) for name in arguments.only or STEPS}
    table.finish(figures)


if __name__ == "__main__":
    main()
