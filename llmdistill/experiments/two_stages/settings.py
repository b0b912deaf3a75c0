"""Converts the section `tasks` of a run to the settings of the fine-tuning runs (eval/glue.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from llmdistill.config import RunConfig, command_line
from llmdistill.config.glue import GlueConfig
from llmdistill.config.tasks import GridConfig
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.run.plan import Plan

TEACHER = "teacher"
"""The row of the run's own teacher, which is fine-tuned if no fine-tuned teacher is given."""


def tasks_folder(plan: Plan) -> Path:
    """Return the folder of all outputs of a run's second stage."""
    return plan.folder / "tasks"


def row_configs(plans: Sequence[Plan], tasks: list[str]) -> dict[str, GlueConfig]:
    """Return the fine-tuning settings of each row of Table 6 in order; the teacher is first if a row needs it.

    Args:
        plans: the runs of the first stage; the teacher of the first run and the student of the last run are fine-tuned.
        tasks: names in TASKS.

    Raises:
        UserError: the settings are invalid.
    """
    plan, config = plans[-1], plans[-1].config
    settings, folder = config.tasks, tasks_folder(plans[-1])
    shared: dict[str, Any] = {field.name: getattr(settings, field.name) for field in fields(GridConfig)}
    shared |= {"tasks": tasks, "ds_config": config.ds_config, "dtype": config.train.dtype, "speed": False}
    alone = {**shared, "method": "sft", "copy_classifier": None}
    teacher = str(folder / TEACHER) if settings.teacher is None else settings.teacher
    trained = str(plan.folder / "student")
    given = plan.config.student.model
    untrained = str(plan.folder / "untrained") if given is None else str(locate(given))
    learning = {**shared, "teacher": teacher, **_methods(config)}
    configs: dict[str, GlueConfig] = {}
    if settings.teacher is None and set(settings.rows) != {"no_kd"}:
        own = str(plans[0].teacher_path)
        configs[TEACHER] = command_line.checked(
            GlueConfig, {**alone, "model": own, "output_dir": str(folder / TEACHER)}, METHODS
        )
    for row in settings.rows:
        model = untrained if row == "no_pretraining" else trained
        values = alone if row == "no_kd" else learning
        configs[row] = command_line.checked(
            GlueConfig, {**values, "model": model, "output_dir": str(folder / row)}, METHODS
        )
    return configs


def _methods(config: RunConfig) -> dict[str, Any]:
    """Return the methods of the second stage with their settings; `tasks` overrides the settings of the run."""
    settings = config.tasks
    method = config.method if settings.method is None else settings.method
    if not METHODS[method].needs_teacher:
        raise UserError(
            f"tasks.method: the run's method {method} has no teacher; say by which one the student learns from its "
            "fine-tuned teachers, such as kroneckerbert or kd"
        )
    inherited = config.also if settings.method is None else []
    also = inherited if settings.also is None else settings.also
    unused = sorted(settings.settings.keys() - {method, *also})
    if unused:
        raise UserError(
            f"tasks.settings.{unused[0]}: that is no method of the second stage ({', '.join([method, *also])})"
        )
    sections: dict[str, Any] = {
        name: command_line.changed(part, settings.settings.get(name, {}), key=f"tasks.settings.{name}")
        for name, part in config.method_settings.items()
        if name in (method, *also)
    }
    return {"method": method, "also": also, "method_settings": sections}
