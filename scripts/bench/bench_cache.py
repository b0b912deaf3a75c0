"""Training from a teacher's cache beside training with the live teacher: time of an epoch, time to make, bytes a token.

    python scripts/bench/bench_cache.py           # the embedded teacher and the data of the quick start, minutes
    python scripts/bench/bench_cache.py --quick   # one step a round, and the validation set

A call is some steps of the quick start (32 examples each) by the package's own trainer, with its batches and torch's
fused AdamW in place of DeepSpeed's engine; the student has 34 % of the teacher's parameters. The time of an epoch is
the median time of a step times the number of steps of an epoch. A cache is made in a process of its own; its time has
the loading of the teacher in it and the checksums. `pays off after` is the time to make a cache over the time that an
epoch saves. Bytes a token count the prompts' tokens too, of which kd keeps nothing.
"""

from __future__ import annotations

import math
import tempfile
import time
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from benching import Line, Settings, Table, Work, bench_parser, facts_of, measure, parse, run, time_ratio
from step_rows import plain_engine, trainer_of

import llmdistill
from llmdistill.config.command_line import parse_run
from llmdistill.config.teacher import CacheConfig
from llmdistill.data.sampler import Share
from llmdistill.methods import METHODS
from llmdistill.models.load import load_model
from llmdistill.step.tap_models import tap_student, tap_teacher
from llmdistill.step.teacher import Teacher
from llmdistill.teachers.cache.folder import CacheFolder
from llmdistill.teachers.cache.making import make_cache
from llmdistill.teachers.cache.teacher import CachedTeacher
from llmdistill.teachers.live import make_teacher
from llmdistill.teachers.output_rows import Request
from llmdistill.training.plan import make_plan

KEPT = {"kd": ("hidden_states", "top_k"), "makd": ("hidden_states",)}
"""Contents of the caches that are measured, by method."""
STEPS = 4
"""Of a call."""


def planned(row: dict[str, Any]) -> tuple[Any, Any]:
    """The plan of a quick start with this method and a student that is there, and its data."""
    words = ["--recipe", "quickstart", "--method", row["method"], "--student.model", row["student"]]
    words += ["--student.factorize.weighting", "none", "--student.factorize.allocation", "uniform"]
    words += ["--data.train", row["data"], "--data.valid", "null", "--data.tests", "{}"]
    plan = make_plan(parse_run(words, METHODS)[0])
    return plan, plan.task.read(plan.models).prepare()


def build(row: dict[str, Any], device: torch.device) -> Work:
    """One row: {"work": make or train, "method": ..., "content": ..., "student": DIR, "data": FILE, "cache": DIR}."""
    plan, data = planned(row)
    method = plan.method
    if row["work"] == "make":
        begun = time.perf_counter()
        record = make_cache(plan, data, CacheConfig(content=row["content"]), Path(row["cache"]))
        seconds = time.perf_counter() - begun
        size = sum(entry["bytes"] for entry in record["files"].values())
        return Work(None, {"seconds": seconds, "bytes": size, "tokens": record["tokens"]})
    teacher: Teacher
    if row["cache"] is None:
        live = make_teacher(plan)
        teacher = tap_teacher(method, live.model, forward=live.forward)
    else:
        folder = CacheFolder(Path(row["cache"]))
        teacher = CachedTeacher(folder, Request.of(method), shift=method.shift, device=device)
    engine = plain_engine(load_model(row["student"], dtype=plan.models.dtype, device=device).train())
    size = plan.config.train.global_batch_size
    loader = data.loader(Share(seed=0, global_batch_size=size, micro_batch_size=size))
    student = tap_student(method, engine.module, forward=engine, vocabulary=plan.models.vocabulary)
    trainer, turn = trainer_of(engine, student, teacher, method), count()

    def steps() -> None:
        for step in islice(turn, row["steps"]):
            trainer.train_step(loader.micro_batches(step))

    return Work(steps, {"steps": len(loader.items) / size})


def bench(settings: Settings, table: Table, folder: Path) -> None:
    llmdistill.compress("embedded:teacher", output=folder / "student", target_params="34%")
    steps = 1 if settings.quick else STEPS
    data = f"embedded:{'valid' if settings.quick else 'train'}"
    for method, contents in KEPT.items():
        row = {"method": method, "student": str(folder / "student"), "data": data, "steps": steps, "cache": None}
        rows, sizes = {"live": {"work": "train", **row}}, {}
        for content in contents:
            cached = {**row, "content": content, "cache": str(folder / f"{method}-{content}")}
            sizes[content] = facts_of(build, {"work": "make", **cached}, settings)
            rows[content] = {"work": "train", **cached}
        found = measure(build, rows, settings, memory=False)
        live = found["live"].median / steps * found["live"].facts["steps"]
        for content, facts in sizes.items():
            ratio, made = time_ratio(found[content], found["live"]), facts["seconds"]
            saved, size = live * (1 - ratio), f"{facts['bytes'] / 1e6:.1f} MB, {facts['tokens']:,} tokens"
            name = f"{method} from {content}"
            table.add(Line(f"{name}: epoch / live epoch", ratio, None, f"{live * ratio:.1f} s / {live:.1f} s an epoch"))
            table.add(Line(f"{name}: made / live epoch", made / live, None, f"{made:.1f} s"))
            table.add(Line(f"{name}: pays off after", made / saved if saved > 0 else math.nan, None, "epochs"))
            table.add(Line(f"{name}: bytes a token", facts["bytes"] / facts["tokens"], None, size))


def main() -> None:
    settings, table, _ = parse(bench_parser(__doc__))
    with tempfile.TemporaryDirectory() as folder:
        bench(settings, table, Path(folder))
    table.finish()


if __name__ == "__main__":
    run(main)
