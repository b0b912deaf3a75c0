"""The dry run of the main job: what a run would do and cost, and with ``--check`` whether a batch goes through it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from llmdistill.config import RunConfig
from llmdistill.config.command_line import about_recipe, to_dict
from llmdistill.files import byte_size
from llmdistill.messages import print_result
from llmdistill.runtime.devices import default_device
from llmdistill.runtime.environment import print_finding
from llmdistill.training.cost import describe_times, estimate_cost, start_flops, times_here
from llmdistill.training.disk import DiskNeed
from llmdistill.training.headline import headline
from llmdistill.training.plan import Plan
from llmdistill.training.written_data import describe_writing, names_teacher


def describe_cost(plan: Plan) -> str:
    """Describe the estimate of the cost, and the room that the run takes on the disk, in one line."""
    estimated = estimate_cost(plan)
    room = f"up to {byte_size(DiskNeed.of(plan).total)} on the disk"
    if estimated is None:
        return f"known once the training set is read (train.epochs {plan.config.train.epochs}); {room}"
    times = times_here(plan, estimated["flops"], start_flops(plan), default_device())
    here = describe_times(times) or f", {estimated['flops']:.2g} FLOP"
    return f"{estimated['tokens']:,} tokens at most{here}; {room}"


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain JSON values."""
    config = {**to_dict(plan.config), "output_dir": str(plan.folder)}
    batch = {
        "global_batch_size": plan.config.train.global_batch_size,
        "ranks": plan.world_size,
        "micro_batch_size": plan.split.micro_batch_size,
        "accumulation_steps": plan.split.accumulation_steps,
    }
    notes, epochs = list(plan.notes), plan.config.train.epochs
    if epochs is not None:
        config["train"]["steps"] = None
        notes.append(f"the steps of train.epochs {epochs}, and so the cost, are known once the training set is read")
    return {
        **plan.models.sizes,
        "batch": batch,
        "terms": dict(plan.method.weights),
        "estimate": estimate_cost(plan),
        "disk_bytes": DiskNeed.of(plan).total,
        "notes": notes,
        "config": config,
        "ds_config": plan.ds_config,
    }


def show_plans(
    config: RunConfig, plans: Sequence[Plan], tasks: Mapping[str, Any] | None, flags: argparse.Namespace
) -> int:
    """Print what a command would run, and return 1 if a check fails, else 0.

    The last of the plans is the run's own; `tasks` is the second stage as plain JSON values, and `flags` are those of
    `parse_run`.
    """
    findings = []
    if not flags.json:
        plan = plans[-1]
        lines = [
            about_recipe(flags),
            headline(plan, "not read (--check reads it)"),
            f"Cost        {describe_cost(plan)}",
        ]
        if names_teacher(config):
            lines.append(f"Before      {describe_writing(config)}")
        if len(plans) > 1:
            lines.append(f"Before      the assistants {', '.join(plan.config.student.assistants)}")
        if plan.config.tasks.names:
            lines.append(f"After       fine-tuning on {', '.join(plan.config.tasks.names)}")
        print_result("\n".join(lines))
    if flags.check:
        from llmdistill.planning.checkup import check_run
        from llmdistill.runtime.terminal import quiet_transformers

        quiet_transformers()
        for finding in check_run(config):
            findings.append(finding)
            if not flags.json:
                print_finding(finding)
    if flags.json:
        values = describe_plan(plans[-1])
        values["notes"] = [*flags.notes, *values["notes"]]
        values |= {"assistants": [describe_plan(plan) for plan in plans[:-1]]} if len(plans) > 1 else {}
        values |= {} if tasks is None else {"tasks": tasks}
        values |= {"check": [asdict(finding) for finding in findings]} if flags.check else {}
        print_result(values)
    return int(any(finding.state == "failure" for finding in findings))
