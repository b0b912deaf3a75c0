"""The main job: ``deepspeed llmdistill/train.py --ds_config ds_configs/zero2.json``.

A smaller student is made of a teacher, learns from it, and a table shows by how much that helped.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    # Run as a script, this folder is first on the path, and the repository is not on it at all.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import gc
import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from llmdistill.artifacts import State
from llmdistill.config import command_line
from llmdistill.methods import METHODS
from llmdistill.runtime.exit import exit_code
from llmdistill.runtime.terminal import print_main, quiet_libraries, warn_main

# Everything else is imported where it is used: --help and mistyped arguments must not wait for torch, nor a dry run for
# DeepSpeed and what a report needs.
if TYPE_CHECKING:
    from llmdistill.config import RunConfig
    from llmdistill.experiments.two_stages import TasksPlan
    from llmdistill.run import assemble
    from llmdistill.run.plan import Plan
    from llmdistill.runtime.distributed import World
    from llmdistill.teacher.live import LiveTeacher


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    script, *typed = sys.argv
    return exit_code(lambda: run(typed, script=script) if arguments is None else run(arguments))


def run(arguments: Sequence[str], *, script: str = "llmdistill/train.py") -> None:
    """Resolve and check, then distil, unless a dry run is all that is wanted.

    Args:
        arguments: the command line.
        script: what they were given to, for the reports.
    """
    config, flags = command_line.parse_run(arguments, METHODS)
    plans = make_plans(config)
    tasks = second_stage(plans)
    if flags.dry_run:
        print(json.dumps(describe(plans, tasks), indent=None if flags.json else 2))
        return
    from llmdistill.run import assemble
    from llmdistill.run.artifacts import claim_folder
    from llmdistill.runtime.distributed import init_distributed, shut_down

    data = assemble.read_data(plans[0])
    if tasks is not None:
        tasks.check_data()
    world = init_distributed(command_line.typed_command(script, arguments))
    try:
        quiet_libraries()
        for plan in plans:
            assemble.check_machine(plan, world)
        data = assemble.tokenise_texts(plans[0], data, world)
        plans = [assemble.count_steps(plan, data, world) for plan in plans]
        with claim_folder(plans[-1].config, world):
            for plan in plans[:-1]:
                print_main(f"The assistant {plan.config.student.shape} learns from {plan.config.teacher.model}", world)
                part_of_run(plan, data, world)
            distil(plans[-1], data, world)
            if tasks is not None:
                tasks.run(world)
    finally:
        shut_down()


def make_plans(config: RunConfig) -> list[Plan]:
    """The runs that a configuration stands for, with all the modules loaded that planning needs."""
    # Modules by the thousand are loaded here, and none is garbage: looking for it takes a sixth of a dry run.
    collects = gc.isenabled()
    gc.disable()
    try:
        from llmdistill.run import plan

        return plan.make_plans(config)
    finally:
        if collects:
            gc.enable()


def second_stage(plans: Sequence[Plan]) -> TasksPlan | None:
    """What follows on tasks, if anything."""
    if not plans[-1].config.tasks.names:
        return None
    from llmdistill.experiments.two_stages import plan_tasks

    return plan_tasks(plans)


def describe(plans: Sequence[Plan], tasks: TasksPlan | None) -> dict[str, Any]:
    """What a dry run prints: the run, the assistants before it, and the tasks after it."""
    assistants = [plan.describe() for plan in plans[:-1]]
    described = {**plans[-1].describe(), **({"assistants": assistants} if assistants else {})}
    return described if tasks is None else {**described, "tasks": tasks.describe()}


def part_of_run(plan: Plan, data: assemble.RunData, world: World) -> None:
    """A run that another one needs, in a folder of its own; one that is finished is not done again."""
    from llmdistill.run.artifacts import claim_folder

    with claim_folder(plan.config, world) as state:
        if state is not State.FINISHED:
            distil(plan, data, world)


def distil(plan: Plan, data: assemble.RunData, world: World) -> None:
    """The run itself: score the teacher, make the student, train it, score again, report."""
    from llmdistill.experiments.layer_search import search_layer
    from llmdistill.report.table import chance_warnings, finish_report, plot_training, run_record, text_scores
    from llmdistill.run import assemble
    from llmdistill.runtime.distributed import on_main

    if plan.searched is not None:
        plan = search_layer(plan, lambda part: part_of_run(part, data, world), world)
    print_main(plan.headline(data.report), world)
    warnings = on_main(lambda: assemble.check_responses(plan), world)
    book = assemble.make_score_book(plan, data, world)
    scored, params, metrics = plan.scored, plan.sizes["student_params"], {}
    # Loaded when it is first needed: a run that is scored and finished needs it no more.
    teacher = cache(lambda: assemble.make_teacher(plan, world))
    if "teacher" in scored:
        sharded = plan.config.teacher.sharding == "zero3"
        metrics["teacher"] = book.score(
            "teacher",
            lambda: teacher().model,
            data.teacher_tokenizer,
            params=plan.sizes["teacher_params"],
            sharded=sharded,
        )
        warnings += chance_warnings(metrics["teacher"])
    for warning in warnings:
        warn_main(warning, world)
    if not plan.method.needs_teacher:
        teacher.cache_clear()
    untrained, trained = assemble.prepare_student(plan, world), plan.folder / "student"
    if "untrained" in scored:
        load = partial(assemble.load_scored, untrained, plan, world)
        metrics["untrained"] = book.score("untrained", load, data.tokenizer, params=params)
    if plan.trains:
        if not (trained / "config.json").is_file():
            train(plan, untrained, trained, teacher, data, world)
        if "student" in scored:
            load = partial(assemble.load_scored, trained, plan, world)
            metrics["student"] = book.score("student", load, data.tokenizer, params=params)
    if world.is_main:
        record = run_record(
            plan.config.scoring.decoding, world, plan.folder / "metrics.jsonl", plan.sizes["teacher_params"]
        )
        asked = command_line.scores_asked(plan.config)
        if plan.config.data.kind == "text":
            metrics = text_scores(plan.folder / "metrics.jsonl", plan.sizes)
            plot_training(plan.folder / "metrics.jsonl")
        finish_report(plan.folder, {**metrics, "asked": asked, "warnings": warnings, "run": record})


def train(
    plan: Plan,
    untrained: Path,
    trained: Path,
    teacher: Callable[[], LiveTeacher],
    data: assemble.RunData,
    world: World,
) -> None:
    """Train from the last checkpoint, or the start, to the end, and write the student."""
    from llmdistill.data.stream import StreamLoader
    from llmdistill.run import assemble
    from llmdistill.run.checkpoints import load_checkpoint
    from llmdistill.run.log import RunLog
    from llmdistill.runtime.engine import save_student

    loader = assemble.make_loader(plan, data, world)
    trainer = assemble.make_trainer(plan, untrained, teacher, data, loader, world)
    start = load_checkpoint(trainer.engine, plan.folder)
    log = RunLog(plan.folder, start=start, steps=plan.config.train.steps, world=world, monitor=trainer.engine.monitor)
    if start == 0 and plan.config.data.kind == "text" and trainer.validation:
        log.start(trainer.validation_loss())
    trainer.run(start, log)
    log.close()
    if isinstance(loader, StreamLoader):  # what it left out is known only now
        print_main(f"Data        {loader.report()}", world)
    save_student(
        trainer.engine,
        world,
        template=untrained,
        output=trained,
        lora=plan.config.student.lora,
        head=plan.student_head,
    )


if __name__ == "__main__":
    sys.exit(main())
