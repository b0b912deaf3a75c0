"""One training step against its floor: teacher forward + student forward and backward on plain labels + optimizer.

    python scripts/bench/bench_step.py             # the sizes that the targets are set for, a quarter of an hour
    python scripts/bench/bench_step.py --quick     # small models, under a minute
    pip install --no-deps --target peers trl==1.16.0                # what it needs is installed here already
    PYTHONPATH=peers python scripts/bench/bench_step.py --peers     # TRL's trainers beside ours

Models have GPT-2's and BERT-base's shapes and random weights, fp32 on a CPU and on CUDA. Every row builds the same
models and the same batch; dropout is off. kd is the forward KL and the labels' cross-entropy together, makd its
defaults. The encoders stand under a classification head, so that nothing saved on a vocabulary hides what the losses of
the layers cost.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import step_rows
import torch
from benching import Line, Measured, Settings, Table, Work, bench_parser, measure, parse, run

GPT2 = {"width": 768, "heads": 12, "vocabulary": 50257, "layers": 12, "batch": 4, "tokens": 256}
BERT = {"width": 768, "heads": 12, "vocabulary": 30522, "layers": 12, "student_layers": 6}
SMALL_GPT2 = {"width": 192, "heads": 4, "vocabulary": 16384, "layers": 4, "batch": 2, "tokens": 128}
SMALL_BERT = {"width": 192, "heads": 4, "vocabulary": 8192, "layers": 4, "student_layers": 2}

PEERS = (("all tokens supervised", 1.0, False), ("40 % supervised", 0.4, False), ("on-policy", 0.4, True))
"""What, the share of the tokens that are the answer, and whether the student writes it."""
TRL = {"distillation": ("TRL's DistillationTrainer", 0.8, 0.5), "gkd": ("TRL's GKDTrainer", 0.95, 0.65)}
"""Each trainer, and the most of its time and memory that ours may take."""
INSTALL = "pip install --no-deps --target peers trl==1.16.0, and PYTHONPATH=peers"


def build(row: dict[str, Any], device: torch.device) -> Work:
    """One row of step_rows or, of TRL beside ours, of peer_rows."""
    if row["task"] != "kl":
        return step_rows.build(row, device)
    import peer_rows

    return peer_rows.build(row, device)


def rows_of(task: str, ways: tuple[str, ...], sizes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {way: {"task": task, "way": way, **sizes} for way in ways}


def kd_step(settings: Settings, table: Table) -> None:
    """All tokens supervised, and 40 % of them."""
    sizes = {**SMALL_GPT2, "student_layers": 2} if settings.quick else {**GPT2, "student_layers": 6}
    rows = rows_of("kd", ("floor", "ours"), sizes)
    rows["ours 40 %"] = {**rows["ours"], "labeled": 0.4}
    found = measure(build, rows, settings)
    name = f"KD step {sizes['batch']}×{sizes['tokens']}"
    against_floor(table, name, found["ours"], found["floor"], 1.03, 0.92)
    against_floor(table, f"{name}, 40 % supervised", found["ours 40 %"], found["floor"], 0.85, 0.75)


def peers_step(settings: Settings, table: Table) -> None:
    """KL beside TRL's trainers, on given answers and on those of the student."""
    if find_spec("trl") is None:
        table.say(f"trl is not installed, so that its trainers are left out: {INSTALL}")
        return
    sizes = {**SMALL_GPT2, "student_layers": 2} if settings.quick else {**GPT2, "student_layers": 6}
    for what, labeled, on_policy in PEERS:
        row = {**sizes, "labeled": labeled, "on_policy": on_policy}
        found = measure(build, rows_of("kl", ("ours", *TRL), row), settings)
        for way, (trainer, *targets) in TRL.items():
            ours, other = found["ours"], found[way]
            name = f"KL, {what}"
            table.time(f"{name}: time / {trainer}", ours, other, None if on_policy else targets[0])
            table.memory(f"{name}: memory / {trainer}", ours, other, targets[1])
            if not on_policy:
                loss_difference(table, f"{name}: loss against {trainer}", ours, other)


def makd_step(settings: Settings, table: Table) -> None:
    """A factorized student of all the teacher's layers."""
    full, small = {**GPT2, "student_layers": 12, "rank": 256}, {**SMALL_GPT2, "student_layers": 4, "rank": 64}
    sizes: dict[str, Any] = small if settings.quick else full
    found = measure(build, rows_of("makd", ("floor", "ours", "naive"), sizes), settings)
    ours, naive = found["ours"], found["naive"]
    name = f"MaKD step {sizes['batch']}×{sizes['tokens']}"
    against_floor(table, name, ours, found["floor"], 1.15)
    table.time(f"{name}: time / naive", ours, naive)
    loss_difference(table, f"{name}: loss against naive", ours, naive)
    table.memory(f"{name}: memory / naive", ours, naive, 0.5)
    if not settings.quick:
        long = {**sizes, "batch": 1, "tokens": 1024}
        found = measure(build, rows_of("makd", ("ours", "naive"), long), settings, times=False)
        table.memory("MaKD step 1×1024: memory / naive", found["ours"], found["naive"], 0.25)


def encoder_step(settings: Settings, table: Table) -> None:
    """Attention KL and hidden MSE on every layer of the student."""
    for batch, tokens in [(4, 64)] if settings.quick else [(8, 128), (2, 512)]:
        sizes = {**(SMALL_BERT if settings.quick else BERT), "batch": batch, "tokens": tokens}
        found = measure(build, rows_of("encoder", ("floor", "ours"), sizes), settings)
        ours, floor = found["ours"], found["floor"]
        name = f"encoder step {batch}×{tokens}"
        against_floor(table, name, ours, floor, 1.06)
        table.add(Line(f"{name}: memory - floor", (ours.bytes - floor.bytes) / 1e6, 100, unit=" MB"))


def packed_step(settings: Settings, table: Table) -> None:
    """KD on packed rows, beside the same with a mask of tokens x tokens."""
    small = settings.quick
    sizes = {**SMALL_GPT2, "student_layers": 2} if small else {**GPT2, "student_layers": 6}
    for tokens, lengths in [(128, [40, 60, 28])] if small else [(256, [60, 70, 80, 46]), (1024, [255, 150, 301, 318])]:
        batch = sizes["batch"] * sizes["tokens"] // tokens
        row = {**sizes, "batch": batch, "tokens": tokens, "lengths": lengths}
        found = measure(build, rows_of("kd", ("ours", "dense"), row), settings)
        ours, dense = found["ours"], found["dense"]
        name = f"KD step on packed rows {batch}×{tokens}, {len(lengths)} sequences each"
        table.time(f"{name}: time / dense mask", ours, dense, 1.0)
        table.memory(f"{name}: memory / dense mask", ours, dense)
        loss_difference(table, f"{name}: loss against dense mask", ours, dense)


def against_floor(
    table: Table, name: str, ours: Measured, floor: Measured, time: float, memory: float | None = None
) -> None:
    table.time(f"{name}: time / floor", ours, floor, time)
    table.memory(f"{name}: memory / floor", ours, floor, memory)


def loss_difference(table: Table, measure: str, ours: Measured, other: Measured) -> None:
    """How far the losses of the first calls are apart."""
    table.add(Line(f"{measure}, relative", abs(ours.facts["first"] / other.facts["first"] - 1), 1e-5))


def main() -> None:
    parser = bench_parser(__doc__)
    steps = {"kd": kd_step, "makd": makd_step, "encoder": encoder_step, "packed": packed_step}
    parser.add_argument("--only", choices=steps, action="append", help="one of the steps alone; may be repeated")
    parser.add_argument("--peers", action="store_true", help=f"TRL's trainers beside ours, alone ({INSTALL})")
    settings, table, arguments = parse(parser)
    if arguments.peers:
        peers_step(settings, table)
        return table.finish()
    for name in arguments.only or steps:
        steps[name](settings, table)
    table.finish()


if __name__ == "__main__":
    run(main)
