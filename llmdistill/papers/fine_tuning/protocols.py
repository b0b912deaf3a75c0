"""The settings that are tried on a benchmark, and the fine-tuned teachers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml

from llmdistill.config import RunConfig
from llmdistill.config.command_line import parse_run
from llmdistill.config.tasks import GridConfig, ProtocolName
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.papers.fine_tuning.averages import CONVENTIONS, Convention
from llmdistill.tasks import task_key
from llmdistill.tasks.glue import GLUE_TASKS, column_of

BEST = "best"
"""The folder of a task's best model, inside the task's folder."""


@dataclass(frozen=True, kw_only=True)
class FineTuningProtocol:
    """The settings that are tried, and the settings that all runs share."""

    learning_rates: Sequence[float]
    epochs: Sequence[int]
    seeds: Sequence[int]
    batch_size: int = 32
    max_length: int = 128
    warmup_ratio: float | None = 0.1
    """Share of the steps that are warm-up; None for the warm-up steps of the task's recipe (`recipe_of`)."""
    weight_decay: float = 0.01

    @property
    def grid(self) -> dict[str, Sequence[float]]:
        """The values that are tried, by dotted key of a run."""
        return {"train.learning_rate": self.learning_rates, "train.epochs": self.epochs}

    @property
    def num_trials(self) -> int:
        return len(self.learning_rates) * len(self.epochs) * len(self.seeds)


_TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

SHARED = ("batch_size", "max_length", "warmup_ratio", "weight_decay")


def fine_tuning_values(run: RunConfig, tasks: Sequence[str]) -> dict[str, Any]:
    """Return what a fine-tuning of a run's student on tasks takes from the run, as values of `FineTuningConfig`."""
    grid = {setting.name: getattr(run.tasks, setting.name) for setting in fields(GridConfig)}
    return grid | {"tasks": list(tasks), "ds_config": run.ds_config, "dtype": run.train.dtype, "speed": False}


def protocol_of(config: GridConfig, task: str) -> FineTuningProtocol:
    """Return the protocol for a task; settings in the configuration replace those of the protocol."""
    given = {key: getattr(config, key) for key in ("learning_rates", "epochs", "seeds", *SHARED)}
    given = {key: value for key, value in given.items() if value is not None}
    tried, recipe = _TABLES["protocols"][config.protocol], recipe_of(task)
    of_recipe: dict[str, Any] = {}
    if recipe is not None:
        train = recipe.train
        of_recipe = {
            "learning_rates": [train.peak_learning_rate],
            "epochs": [train.epochs],
            "seeds": [1],
            "batch_size": train.global_batch_size,
            "max_length": recipe.data.max_length,
            "warmup_ratio": train.warmup_ratio,
            "weight_decay": train.weight_decay,
        }
    # The later ones win: the task's recipe, the paper's own settings for the task, and what the user gave.
    return FineTuningProtocol(**{**tried["all"], **of_recipe, **tried.get(task, {}), **given})


@cache
def recipe_of(task: str) -> RunConfig | None:
    """Return the shipped recipe of a task, by the task's title; None if it has none."""
    name = _TABLES["recipes"].get(task)
    return None if name is None else parse_run(["--recipe", name], METHODS)[0]


def metric_of(protocol: ProtocolName, task: str) -> str | None:
    """Return the metric by which settings are chosen, that of the paper's table; None for the task's own first one."""
    if task not in GLUE_TASKS:
        return None
    columns = CONVENTIONS.get(cast(Convention, "minilm" if protocol == "minilm_v1" else protocol), {})
    return columns.get(column_of(task, "dev"), GLUE_TASKS[task].metrics[0])


def teacher_of(teacher: str, task: str, tasks: Sequence[str], *, key: str) -> str:
    """Return the folder or hub name of a task's teacher, or of another model that is fine-tuned on the task.

    `teacher` is an earlier run's folder, a path that contains {task}, or a single model, which can teach only one task;
    UserError if the folder has no model for the task, or there are several tasks for a single model.
    """
    if "{task}" in teacher:
        spellings = [task, task.lower(), task_key(task)]
        paths = [teacher.replace("{task}", spelling) for spelling in spellings]
        return next((path for path in paths if Path(path).is_dir()), paths[-1])  # a name on the hub: in lower case
    folder = Path(teacher)
    best = folder / task / BEST
    if (best / "config.json").is_file():
        return str(best)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(
            f"{key} {teacher}: it holds no model for {task} (no {best / 'config.json'}); "
            "fine-tune one on it first, or name a path with {task} in it"
        )
    if len(tasks) > 1:
        raise UserError(
            f"{key} {teacher}: one model, but {len(tasks)} tasks; a model is fine-tuned on one: give a path with "
            "{task} in it or an earlier run's folder, or name one task"
        )
    return teacher


def short_names(paths: Sequence[str]) -> list[str]:
    """Return a name for each path: as many of its last parts as are needed to make the names unique."""
    parts = [Path(path).parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(of_path[-count:]) for of_path in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)
