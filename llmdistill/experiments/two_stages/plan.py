"""The second stage: planned and checked before the first one begins, run after it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedConfig

from llmdistill.config.glue import GlueConfig
from llmdistill.errors import UserError
from llmdistill.experiments.glue.check import check_engine, check_examples, check_layer, starts_as_teachers, task_method
from llmdistill.experiments.glue.finetune import num_classes
from llmdistill.experiments.glue.grid import grid_of
from llmdistill.experiments.glue.run import evaluate
from llmdistill.experiments.glue.teachers import BEST, check_classes, check_tokens, teacher_of
from llmdistill.experiments.two_stages.settings import TEACHER, named_as_settings, row_configs, tasks_folder
from llmdistill.experiments.two_stages.table import ROWS, collect, print_rows, write_rows
from llmdistill.methods import Method
from llmdistill.models.load import load_config, load_tokenizer
from llmdistill.run.plan import Plan
from llmdistill.runtime.distributed import World, on_main
from llmdistill.runtime.ds_config import read_ds_config
from llmdistill.runtime.engine import TORCH_DTYPES, resolve_dtype
from llmdistill.runtime.terminal import print_main
from llmdistill.tasks.glue_data import TaskData, check_data_dir, find_tasks, read_task
from llmdistill.tasks.glue_files import TASKS


@dataclass(frozen=True, kw_only=True)
class TasksPlan:
    """What the second stage of a run will do."""

    first: Plan
    """The run whose teacher is the whole command's."""
    last: Plan
    """The run whose student is fine-tuned."""
    tasks: list[str]
    """In TASKS."""
    configs: Mapping[str, GlueConfig]
    """The fine-tuning of each row, in order."""
    methods: Mapping[str, Mapping[str, Method]]
    """What each row learns by on each task."""
    given: Mapping[str, str]
    """The teacher of each task, as far as the user named them: folder or hub name."""
    copied: bool
    """Whether the students' classifiers start as their teachers'."""

    def describe(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        rows = {
            row: {
                "model": config.model,
                "teacher": config.teacher,
                "terms": dict(next(iter(self.methods[row].values())).weights),
                "runs": sum(len(grid_of(config, task).trials()) for task in self.tasks),
            }
            for row, config in self.configs.items()
        }
        folder = str(tasks_folder(self.last))
        return {"names": self.tasks, "folder": folder, "copy_classifier": self.copied, "rows": rows}

    def check_data(self) -> None:
        """Read all that the second stage will, so that it does not fail after hours of the first.

        Raises:
            UserError: a data set that is missing or malformed, or examples or tokens that do not fit the models.
        """
        config = next(iter(self.configs.values()))
        student = self.last.tokenizer_path
        tokenizer = load_tokenizer(student)
        with named_as_settings():
            for path in set(self.given.values()):
                check_tokens(path, student)
            if TEACHER in self.configs:
                check_tokens(self.first.teacher_path, student)
            check_data_dir(config.data_dir, self.tasks)
            for task in self.tasks:
                teacher = load_config(self.given[task]) if task in self.given else self.first.teacher_config
                data = read_task(task, config.data_dir, config.limit)
                check_examples(data, tokenizer, grid_of(config, task).max_length, [teacher, self.last.student_config])

    def run(self, world: World) -> None:
        """Fine-tune every row on every task, and write and print their table; every rank must call it.

        What is finished already is not run again.

        Raises:
            UserError: finished runs of other settings are in the folder, or a run fails.
        """
        gc.collect()  # the engine of the first stage is a knot of references
        results = {}
        with named_as_settings():
            for row, config in self.configs.items():
                print_main(f"\nTasks       {ROWS[row].title}", world)
                results[row] = evaluate(config, world, command=world.command)
        figures = self._draw(world) if self.last.config.tasks.tsne else {}
        if world.is_main:
            table = collect(results, figures, run=str(self.last.folder))
            write_rows(tasks_folder(self.last), table)
            print_rows(table)
            print(
                f"The table is in {tasks_folder(self.last) / 'report.md'}, each row's own report in its folder there."
            )

    def _draw(self, world: World) -> dict[str, Any]:
        """A t-SNE figure a task: the teacher and each row's best model, the two stages last."""
        from llmdistill.experiments.glue.tsne import draw  # scikit-learn's manifolds take a second to import

        config, folder = next(iter(self.configs.values())), tasks_folder(self.last)
        dtype = TORCH_DTYPES[resolve_dtype(config.dtype, read_ds_config(self.last.config.ds_config))]
        figures = {}
        for task in self.tasks:
            models = {ROWS[TEACHER].title: self.given[task]} if task in self.given else {}
            rows = sorted(self.configs, key=list(ROWS).index)
            models |= {ROWS[row].title: str(folder / row / task / BEST) for row in rows}
            data: TaskData = read_task(task, config.data_dir, config.limit)
            figure = partial(
                draw,
                models,
                data,
                folder=folder / "tsne",
                name=task,
                layer=config.tsne_layer,
                max_length=grid_of(config, task).max_length,
                dtype=dtype,
                device=world.device,
            )
            figures[task] = {"file": f"tsne/{task}.png", **on_main(figure, world)}
        return figures


def plan_tasks(plans: Sequence[Plan]) -> TasksPlan:
    """The second stage of a run that has one, resolved from configurations alone.

    Args:
        plans: of the first stage, as `make_plans` gives them.

    Raises:
        UserError: settings that cannot work.
    """
    first, last = plans[0], plans[-1]
    settings = last.config.tasks
    if not last.trains:
        raise UserError(
            f"tasks.names is {settings.names}, but method {last.config.method} trains no student for a second stage: "
            "take another method, or fine-tune a model by eval/glue.py"
        )
    with named_as_settings():
        tasks = find_tasks(settings.names)
        configs = row_configs(plans, tasks)
        taught = any(config.teacher is not None for config in configs.values())
        named = settings.teacher if taught else None
        given = {} if named is None else {task: teacher_of(named, task, tasks) for task in tasks}
        teachers = {task: _teacher_config(first, task, given.get(task)) for task in tasks}
        student = last.student_config
        methods = {
            row: _check_row(config, last, first.teacher_config if row == TEACHER else student, teachers)
            for row, config in configs.items()
        }
        copied = [
            starts_as_teachers(config, task, student, teachers[task])
            for config in configs.values()
            for task in tasks
            if config.teacher is not None
        ]
    return TasksPlan(
        first=first, last=last, tasks=tasks, configs=configs, methods=methods, given=given, copied=any(copied)
    )


def _teacher_config(first: Plan, task: str, given: str | None) -> PreTrainedConfig:
    """The config of a task's fine-tuned teacher, which is yet to be made where none is given."""
    if given is not None:
        found = load_config(given)
        check_classes(found, task, named=f"--teacher {given}")
        return found
    config = copy.deepcopy(first.teacher_config)
    config.num_labels = num_classes(TASKS[task])
    return config


def _check_row(
    config: GlueConfig, last: Plan, student: PreTrainedConfig, teachers: Mapping[str, PreTrainedConfig]
) -> dict[str, Method]:
    """The method of each task of a row, whose model need not exist yet."""
    ds_path = last.config.ds_config
    ds_config = read_ds_config(ds_path)
    if last.config.tasks.tsne:
        check_layer(config.tsne_layer, student, named=config.model)
    methods = {}
    for task, teacher in teachers.items():
        check_engine(config, task, ds_config, ds_path, last.world_size)
        methods[task] = task_method(config, task, student, None if config.teacher is None else teacher)
    return methods
