"""From the settings to the report: everything is checked first, then the tasks take their turns."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from transformers import PreTrainedConfig

from llmdistill.config.glue import GlueConfig
from llmdistill.experiments.glue.check import check_engine, check_examples, check_layer, starts_as_teachers, task_method
from llmdistill.experiments.glue.grid import grid_of
from llmdistill.experiments.glue.measure import measure
from llmdistill.experiments.glue.results import averages, print_results, write_report
from llmdistill.experiments.glue.study import TaskStudy
from llmdistill.experiments.glue.teachers import (
    BEST,
    check_classes,
    check_teacher,
    short_names,
    teacher_of,
)
from llmdistill.files import write_json
from llmdistill.fingerprints import fingerprint
from llmdistill.models.load import load_config, load_tokenizer
from llmdistill.report.record import make_record
from llmdistill.runtime.distributed import World, init_distributed, on_main, shut_down
from llmdistill.runtime.ds_config import read_ds_config
from llmdistill.runtime.engine import TORCH_DTYPES, resolve_dtype
from llmdistill.runtime.terminal import print_main, quiet_libraries, quiet_transformers
from llmdistill.tasks.glue_data import check_data_dir, find_tasks, read_task

DS_CONFIG = "ds_configs/zero1.json"
"""What fine-tuning takes that names none."""


def run(config: GlueConfig, *, command: str, as_json: bool) -> None:
    """Fine-tune, choose, measure, report; every rank that the launcher started must call it.

    Raises:
        UserError: bad input, or a run of other settings in the folder.
    """
    quiet_transformers()
    read_settings(config)  # a mistake in them need not wait for the other ranks
    # With --json nothing but the result may stand on stdout.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        world = init_distributed()
        try:
            quiet_libraries()
            results = evaluate(config, world, command=command)
        finally:
            shut_down()
    if not world.is_main:
        return
    if as_json:
        print(json.dumps(results))
        return
    print_results(results)
    root = output_dir(config)
    print(f"The report is {root / 'report.md'}, all figures are in {root / 'results.json'}.")


def evaluate(config: GlueConfig, world: World, *, command: str) -> dict[str, Any]:
    """Check, fine-tune, choose, measure, write the report, inside of a process group; every rank must call it.

    Args:
        config: the run.
        world: this process.
        command: what the user typed, for the report.

    Raises:
        UserError: bad input, or a run of other settings in the folder.
    """
    return conduct(config, prepare(config, world), world, command=command)


class Settings(NamedTuple):
    """What a configuration names, read."""

    tasks: list[str]
    """In TASKS."""
    ds_config: dict[str, Any]
    ds_path: str


def read_settings(config: GlueConfig) -> Settings:
    """The tasks of a run and its DeepSpeed configuration.

    Raises:
        UserError: no such task or file, or no folder for a task.
    """
    tasks = find_tasks(config.tasks)
    check_data_dir(config.data_dir, tasks)
    ds_path = config.ds_config or DS_CONFIG
    return Settings(tasks, read_ds_config(ds_path), ds_path)


def output_dir(config: GlueConfig) -> Path:
    """The folder of all that is written."""
    if config.output_dir is not None:
        return Path(config.output_dir)
    name = re.sub(r"[^A-Za-z0-9._]+", "-", config.model).strip("-.")
    methods = config.methods()
    return Path("runs") / "glue" / "-".join([name, *(methods if methods != ["sft"] else [])])


def prepare(config: GlueConfig, world: World) -> dict[str, TaskStudy]:
    """The tasks with their examples, teachers and methods, all checked before the first one is run.

    Raises:
        UserError: models, teachers, data or settings that are missing, broken or do not fit each other.
    """
    tasks, ds_config, ds_path = read_settings(config)
    student = load_config(config.model)
    teachers = {task: None if config.teacher is None else teacher_of(config.teacher, task, tasks) for task in tasks}
    configs: dict[str, PreTrainedConfig | None] = {}
    for task, teacher in teachers.items():
        configs[task] = None if teacher is None else check_teacher(teacher, config.model, task)
        check_engine(config, task, ds_config, ds_path, world.size)
    methods = {task: task_method(config, task, student, configs[task]) for task in tasks}
    drawn = {task: _drawn(config, task, tasks) for task in tasks}
    tokenizer = load_tokenizer(config.model)
    data = {task: read_task(task, config.data_dir, config.limit) for task in tasks}
    for task, each in data.items():
        seeing = [student, *(found for found in [configs[task]] if found is not None)]
        check_examples(each, tokenizer, grid_of(config, task).max_length, seeing)
    paths = {path for path in (config.model, config.baseline, *teachers.values()) if path is not None}
    fingerprints = on_main(lambda: {path: fingerprint(path) for path in paths}, world)
    return {
        task: TaskStudy(
            config=config,
            data=data[task],
            root=output_dir(config),
            method=methods[task],
            teacher=teachers[task],
            copies_classifier=starts_as_teachers(config, task, student, configs[task]),
            drawn=drawn[task],
            fingerprints=fingerprints,
            ds_config=ds_config,
            ds_path=ds_path,
            dtype=cast(Any, resolve_dtype(config.dtype, ds_config)),
            world=world,
        )
        for task in tasks
    }


def _drawn(config: GlueConfig, task: str, tasks: list[str]) -> dict[str, str]:
    """What t-SNE draws: this run's best model, and before it those of the earlier runs that are named."""
    if config.tsne is None:
        return {}
    root = output_dir(config)
    models = [teacher_of(folder, task, tasks, key="--tsne") for folder in config.tsne]
    for path in models:
        found = load_config(path)
        check_classes(found, task, named=f"--tsne {path}")
        check_layer(config.tsne_layer, found, named=path)
    check_layer(config.tsne_layer, load_config(config.model), named=config.model)
    return dict(zip(short_names([*config.tsne, str(root)]), [*models, str(root / task / BEST)], strict=True))


def conduct(config: GlueConfig, studies: dict[str, TaskStudy], world: World, *, command: str) -> dict[str, Any]:
    """Run all tasks and write results.json and report.md; every rank must call it."""
    first = next(iter(studies.values()))
    print_main(_headline(config, studies), world)
    sizes = on_main(lambda: _measure(config, first), world)
    names = list(studies)
    # A task that is done gives its tokens and its teacher back.
    tasks = {name: studies.pop(name).conduct() for name in names}
    results = {
        "model": config.model,
        "teacher": config.teacher,
        "baseline": config.baseline,
        "methods": config.methods(),
        "protocol": config.protocol,
        "limit": config.limit,
        "params": sizes["params"],
        "speed": sizes.get("speed"),
        "speed_asked": sizes["asked"] if "speed" in sizes else None,
        "tasks": tasks,
        "averages": averages(tasks),
        "warnings": [warning for task in tasks.values() for warning in task["warnings"]],
        "run": make_record(command, world.size),
    }
    if world.is_main:
        write_json(first.root / "results.json", results)
        write_report(first.root, results)
    return results


def _headline(config: GlueConfig, studies: Mapping[str, TaskStudy]) -> str:
    runs = {name: len(study.grid.trials()) for name, study in studies.items()}
    counted = ", ".join(f"{name} {count}" for name, count in runs.items())
    first = next(iter(studies.values()))
    teacher = "" if config.teacher is None else f" from {config.teacher}"
    terms = ", ".join(first.method.weights)
    classifier = "; the classifier starts as the teacher's" if first.copies_classifier else ""
    return (
        f"Model       {config.model}\n"
        f"Method      {' + '.join(config.methods())}{teacher} (terms: {terms}){classifier}\n"
        f"Runs        {sum(runs.values())} by the protocol {config.protocol}: {counted}\n"
        f"Output      {output_dir(config)}"
    )


def _measure(config: GlueConfig, study: TaskStudy) -> dict[str, Any]:
    models = {"baseline": config.baseline, "teacher": study.teacher, "model": config.model}
    grid = grid_of(config, study.data.name)
    return measure(
        {role: path for role, path in models.items() if path is not None},
        study.fingerprints,
        file=study.root / "sizes.json",
        speed=config.speed,
        batch_size=grid.batch_size,
        length=grid.max_length,
        dtype=TORCH_DTYPES[study.dtype],
        device=study.world.device,
    )
