"""The main job: ``deepspeed llmdistill/train.py --ds_config ds_configs/zero2.json``.

A teacher is factorised into a student, the student learns from it, and a table shows by how much that helped.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if not __package__:
    # Run as a script, this folder is first on the path, and the repository is not on it at all.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    # Read when torch is loaded. Threads that spin while they wait make a run on busy cores several times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import json
from collections.abc import Sequence
from functools import cache

from llmdistill import assemble, parsing
from llmdistill.report.table import print_table, run_record, training_speed, write_report
from llmdistill.runtime.checkpoint import claim_folder, load_checkpoint
from llmdistill.runtime.distributed import World, init_distributed, shut_down
from llmdistill.runtime.engine import save_student
from llmdistill.runtime.exit import exit_code
from llmdistill.runtime.log import RunLog, print_main, quiet_libraries


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return exit_code(lambda: run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> None:
    """Resolve and check, then distil, unless a dry run is all that is wanted."""
    config, flags = parsing.parse_run(arguments)
    plan = assemble.make_plan(config)
    if flags.dry_run:
        print(json.dumps(plan.describe(), indent=None if flags.json else 2))
        return
    data = assemble.read_data(plan)
    world = init_distributed()
    try:
        quiet_libraries()
        distil(plan, data, world)
    finally:
        shut_down()


def distil(plan: assemble.Plan, data: assemble.RunData, world: World) -> None:
    """The run itself: score the teacher, factorise, train, score again, report."""
    claim_folder(plan.folder, plan.record(), resume=plan.config.resume, world=world)
    print_main(plan.headline(data), world)
    book = assemble.make_score_book(plan, data, world)
    # Loaded when it is first needed: a run that is scored and finished needs it no more.
    teacher = cache(lambda: assemble.make_teacher(plan, world))
    sharded = plan.config.teacher.sharding == "zero3"
    metrics = {"teacher": book.score("teacher", lambda: teacher().model, sharded=sharded, params=plan.teacher_params)}
    if not plan.method.needs_teacher:
        teacher.cache_clear()
    untrained = assemble.prepare_student(plan, world)
    metrics["untrained"] = book.score("untrained", lambda: assemble.load_scored(untrained, plan, world))

    trained = plan.folder / "student"
    if not (trained / "config.json").is_file():
        trainer = assemble.make_trainer(plan, untrained, teacher, data, world)
        start = load_checkpoint(trainer.engine, plan.folder)
        log = RunLog(
            plan.folder, start=start, steps=plan.config.train.steps, world=world, monitor=trainer.engine.monitor
        )
        trainer.run(start, log)
        log.close()
        save_student(trainer.engine, world, template=untrained, output=trained)
    metrics["student"] = book.score("student", lambda: assemble.load_scored(trained, plan, world))

    if world.is_main:
        metrics["student"]["training_tokens_per_second"] = training_speed(plan.folder / "metrics.jsonl")
        metrics["run"] = run_record(plan.config.scoring.decoding, world.size)
        write_report(plan.folder, metrics)
        print_table(metrics)
        print(f"The student is in {trained}, the table in {plan.folder / 'report.md'}.")


if __name__ == "__main__":
    sys.exit(main())
