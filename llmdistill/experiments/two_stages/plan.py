"""The second stage, which is planned and checked before the first stage begins and run after the first stage."""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from llmdistill.config.glue import GlueConfig
from llmdistill.errors import UserError
from llmdistill.experiments.glue.grid import grid_of
from llmdistill.experiments.glue.run import check_layer, evaluate
from llmdistill.experiments.glue.study import TaskStudy
from llmdistill.experiments.glue.teachers import BEST, teacher_of
from llmdistill.experiments.two_stages.settings import TEACHER, row_configs, tasks_folder
from llmdistill.experiments.two_stages.table import ROWS, collect, print_rows, write_rows
from llmdistill.models.configs import load_config
from llmdistill.models.tokenizer import check_tokens
from llmdistill.run.plan import Plan
from llmdistill.runtime.distributed import World, on_main
from llmdistill.runtime.terminal import print_main
from llmdistill.tasks.glue import check_classes
from llmdistill.tasks.glue_files import TASKS, check_data_dir, find_tasks, read_task


@dataclass(frozen=True, kw_only=True)
class TasksPlan:
    """The plan of a run's second stage."""

    first: Plan
    """The first run of the first stage; its teacher is the teacher of the whole command."""
    last: Plan
    """The last run of the first stage; its student is fine-tuned."""
    tasks: list[str]
    """The names of the tasks in GLUE."""
    configs: Mapping[str, GlueConfig]
    """The fine-tuning settings of each row, in order."""
    plans: Mapping[str, Mapping[str, Plan]]
    """The plan of the first trial of each row and task."""
    given: Mapping[str, str]
    """Folder or hub name of each task's teacher; empty if the user named no teacher."""

    def describe(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        rows = {
            row: {
                "model": config.model,
                "teacher": config.teacher,
                "terms": dict(next(iter(self.plans[row].values())).method.weights),
                "runs": sum(len(grid_of(config, task).trials()) for task in self.tasks),
            }
            for row, config in self.configs.items()
        }
        copied = any(plan.copies_classifier for plans in self.plans.values() for plan in plans.values())
        folder = str(tasks_folder(self.last))
        return {"names": self.tasks, "folder": folder, "copy_classifier": copied, "rows": rows}

    def check_data(self) -> None:
        """Read all data of the second stage, so that a mistake is reported before the hours of the first stage.

        Raises:
            UserError: a data set is missing or malformed, or examples or tokens do not fit the models.
        """
        student = self.last.tokenizer_path
        for path in set(self.given.values()):
            check_tokens(path, student)
        if TEACHER in self.configs:
            check_tokens(self.first.teacher_path, student)
        for plans in self.plans.values():
            for plan in plans.values():
                plan.task.read(replace(plan.models, tokenizer_path=student, teacher_path=student))

    def run(self, world: World) -> None:
        """Fine-tune every row on every task, and write and print the table; every rank must call this method.

        Finished runs are not repeated.

        Raises:
            UserError: the folder contains finished runs with other settings, or a run fails.
        """
        gc.collect()  # the engine of the first stage has reference cycles
        results = {}
        for row, config in self.configs.items():
            print_main(f"\nTasks       {ROWS[row].title}", world)
            results[row] = evaluate(config, world, command=world.command, prefix=self.last.config.tasks.prefix)
        figures = self._draw(world) if self.last.config.tasks.tsne else {}
        if world.is_main:
            table = collect(results, figures, run=str(self.last.folder))
            write_rows(tasks_folder(self.last), table)
            print_rows(table)
            print(
                f"The table is in {tasks_folder(self.last) / 'report.md'}, each row's own report in its folder there."
            )

    def _draw(self, world: World) -> dict[str, Any]:
        """Draw one t-SNE figure per task with the teacher and each row's best model; the last row has both stages."""
        from llmdistill.experiments.glue.tsne import draw  # scikit-learn's manifolds take a second to import

        config, folder = next(iter(self.configs.values())), tasks_folder(self.last)
        figures = {}
        for task in self.tasks:
            models = {ROWS[TEACHER].title: self.given[task]} if task in self.given else {}
            rows = sorted(self.configs, key=list(ROWS).index)
            models |= {ROWS[row].title: str(folder / row / task / BEST) for row in rows}
            figure = partial(
                draw,
                models,
                read_task(task, config.data_dir, config.limit),
                folder=folder / "tsne",
                name=task,
                layer=config.tsne_layer,
                max_length=grid_of(config, task).max_length,
                dtype=next(iter(self.plans.values()))[task].dtype,
                device=world.device,
            )
            figures[task] = {"file": f"tsne/{task}.png", **on_main(figure, world)}
        return figures


def plan_tasks(plans: Sequence[Plan]) -> TasksPlan:
    """Plan the second stage of a run from configurations alone.

    Args:
        plans: the plans of the first stage, as `make_plans` returns them.

    Raises:
        UserError: the settings are invalid.
    """
    first, last = plans[0], plans[-1]
    settings = last.config.tasks
    if not last.trains:
        raise UserError(
            f"tasks.names is {settings.names}, but method {last.config.method} trains no student for a second stage: "
            "take another method, or fine-tune a model by eval/glue.py"
        )
    tasks = find_tasks(settings.names, key="tasks.names")
    check_data_dir(settings.data_dir, tasks, key="tasks.data_dir")
    configs = row_configs(plans, tasks)
    taught = any(config.teacher is not None for config in configs.values())
    named = settings.teacher if taught else None
    given = {} if named is None else {task: teacher_of(named, task, tasks, key="tasks.teacher") for task in tasks}
    studies = {
        row: {task: _study(config, task, first, last, given) for task in tasks} for row, config in configs.items()
    }
    return TasksPlan(first=first, last=last, tasks=tasks, configs=configs, plans=studies, given=given)


def _study(config: GlueConfig, task: str, first: Plan, last: Plan, given: Mapping[str, str]) -> Plan:
    """Return the plan of a row's first trial on a task; its model and its teacher may not exist yet."""
    own = str(first.teacher_path)
    student = first.teacher_config if config.model == own else last.student_config
    if last.config.tasks.tsne:
        check_layer(config.tsne_layer, student, named=config.model, key="tasks.tsne_layer")
    pending = {config.model: student}
    teacher = None
    if config.teacher is not None:
        teacher = given.get(task, str(Path(config.teacher) / task / BEST))
        if task in given:
            check_classes(load_config(given[task]), task, named=f"tasks.teacher {given[task]}")
        else:
            pending[teacher] = _fine_tuned(first.teacher_config, task)
    study = TaskStudy(
        config=config, task=task, root=Path(str(config.output_dir)), teacher=teacher, drawn={}, world=World.alone()
    )
    return study.plan(pending)


def _fine_tuned(config: PreTrainedConfig, task: str) -> PreTrainedConfig:
    """Return the config of a teacher that is not fine-tuned on the task yet."""
    config = copy.deepcopy(config)
    config.num_labels = TASKS[task].num_outputs
    return config
