"""The dry run of the main job: what would run, in a few lines or as JSON, and with ``--check`` a check on its data."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from llmdistill.config import RunConfig
from llmdistill.config.command_line import about_recipe
from llmdistill.messages import print_result
from llmdistill.run.describe import cost, describe, headline
from llmdistill.run.plan import Plan
from llmdistill.runtime.environment import print_finding


def show(config: RunConfig, plans: Sequence[Plan], tasks: Mapping[str, Any] | None, flags: argparse.Namespace) -> int:
    """Print what a command would run, and return 1 if a check fails, else 0.

    Args:
        config: the configuration.
        plans: the plans of its runs; the last one is the run's own.
        tasks: the second stage as plain JSON values; None if there is none.
        flags: those of `parse_run`.
    """
    found = []
    if not flags.json:
        print_result("\n".join([about_recipe(flags.recipe), *lines(plans)]))
    if flags.check:
        from llmdistill.run.checkup import check_run
        from llmdistill.runtime.terminal import quiet_transformers

        quiet_transformers()
        for finding in check_run(config):
            found.append(finding)
            if not flags.json:
                print_finding(finding)
    if flags.json:
        checked = {"check": [asdict(finding) for finding in found]} if flags.check else {}
        print_result({**described(plans, tasks), **checked})
    return int(any(finding.state == "failure" for finding in found))


def described(plans: Sequence[Plan], tasks: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the run, the assistants before it, and the tasks after it as plain JSON values."""
    assistants = [describe(plan) for plan in plans[:-1]]
    values = {**describe(plans[-1]), **({"assistants": assistants} if assistants else {})}
    return values if tasks is None else {**values, "tasks": tasks}


def lines(plans: Sequence[Plan]) -> list[str]:
    """Return the run in a few lines for the terminal."""
    plan = plans[-1]
    told = [headline(plan, "not read (--check reads it)"), f"Cost        {cost(plan)}"]
    if len(plans) > 1:
        told.append(f"Before      the assistants {', '.join(plan.config.student.assistants)}")
    if plan.config.tasks.names:
        told.append(f"After       fine-tuning on {', '.join(plan.config.tasks.names)}")
    return told
