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
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmdistill.config import command_line
from llmdistill.methods import METHODS
from llmdistill.runtime.exit import exit_code

# Everything else is imported where it is used: --help and mistyped arguments must not wait for torch, nor a dry run for
# DeepSpeed and what a report needs.
if TYPE_CHECKING:
    from llmdistill.config import RunConfig
    from llmdistill.experiments.two_stages import TasksPlan
    from llmdistill.run.plan import Plan


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
    train(plans, tasks, command_line.typed_command(script, arguments))


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
    from llmdistill.experiments.two_stages import plan_tasks  # other runs need not wait for it

    return plan_tasks(plans)


def describe(plans: Sequence[Plan], tasks: TasksPlan | None) -> dict[str, Any]:
    """What a dry run prints: the run, the assistants before it, and the tasks after it."""
    from llmdistill.run.describe import describe as describe_plan

    assistants = [describe_plan(plan) for plan in plans[:-1]]
    described = {**describe_plan(plans[-1]), **({"assistants": assistants} if assistants else {})}
    return described if tasks is None else {**described, "tasks": tasks.describe()}


def train(plans: Sequence[Plan], tasks: TasksPlan | None, command: str) -> None:
    """Do what is planned, in a process group of its own; `command` is what the user typed."""
    from llmdistill.experiments.distillation import distil
    from llmdistill.runtime.distributed import init_distributed, shut_down
    from llmdistill.runtime.terminal import quiet_libraries

    data = plans[0].task.read(plans[0].models)
    if tasks is not None:
        tasks.check_data()
    world = init_distributed(command)
    try:
        quiet_libraries()
        distil(plans, data, world, then=None if tasks is None else tasks.run)
    finally:
        shut_down()


if __name__ == "__main__":
    sys.exit(main())
