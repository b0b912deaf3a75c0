"""Runs the GLUE study: checks all settings first, then runs the tasks one after the other and writes the report."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from llmdistill.config.glue import GlueConfig
from llmdistill.errors import UserError
from llmdistill.experiments.glue.measure import measure
from llmdistill.experiments.glue.results import averages, print_results, write_report
from llmdistill.experiments.glue.study import TaskStudy
from llmdistill.experiments.glue.teachers import BEST, short_names, teacher_of
from llmdistill.files import write_json
from llmdistill.models.configs import load_config
from llmdistill.models.families import shape_of
from llmdistill.report.record import make_record
from llmdistill.runtime.distributed import World, init_distributed, on_main, shut_down
from llmdistill.runtime.ds_config import read_ds_config
from llmdistill.runtime.terminal import print_main, quiet_libraries, quiet_transformers
from llmdistill.tasks.glue import check_classes
from llmdistill.tasks.glue_files import check_data_dir, find_tasks


def run(config: GlueConfig, *, command: str, as_json: bool) -> None:
    """Fine-tune, choose, measure and report; every rank of the launcher must call this function.

    Raises:
        UserError: bad input, or the folder belongs to a run with other settings.
    """
    quiet_transformers()
    read_ds_config(config.ds_config)  # reports a mistake before waiting for the other ranks
    # With --json, stdout contains only the result.
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


def evaluate(config: GlueConfig, world: World, *, command: str, prefix: str = "--") -> dict[str, Any]:
    """Check, fine-tune, choose, measure and write the report in an existing process group; every rank must call it.

    Args:
        config: the settings of the study.
        world: the rank and the number of ranks.
        command: the command as the user typed it, for the report.
        prefix: prefix of the settings' names in error messages.

    Raises:
        UserError: bad input, or the folder belongs to a run with other settings.
    """
    return conduct(config, prepare(config, world, prefix=prefix), world, command=command)


def output_dir(config: GlueConfig) -> Path:
    """Return the folder of all outputs."""
    if config.output_dir is not None:
        return Path(config.output_dir)
    name = re.sub(r"[^A-Za-z0-9._]+", "-", config.model).strip("-.")
    methods = config.methods()
    return Path("runs") / "glue" / "-".join([name, *(methods if methods != ["sft"] else [])])


def prepare(config: GlueConfig, world: World, *, prefix: str = "--") -> dict[str, TaskStudy]:
    """Return the study of each task; all studies are checked before the first one runs.

    Args:
        config: the settings of the study.
        world: the rank and the number of ranks.
        prefix: prefix of the settings' names in error messages.

    Raises:
        UserError: models, teachers, data or settings are missing, damaged or incompatible.
    """
    tasks = find_tasks(config.tasks, key=f"{prefix}tasks")
    check_data_dir(config.data_dir, tasks, key=f"{prefix}data_dir")
    studies = {
        task: TaskStudy(
            config=config,
            task=task,
            root=output_dir(config),
            teacher=None if config.teacher is None else teacher_of(config.teacher, task, tasks, key=f"{prefix}teacher"),
            drawn=_drawn(config, task, tasks, prefix),
            world=world,
        )
        for task in tasks
    }
    for study in studies.values():
        plan = study.plan()
        plan.task.read(plan.models)
    return studies


def _drawn(config: GlueConfig, task: str, tasks: list[str], prefix: str) -> dict[str, str]:
    """Return the models that t-SNE draws: the best models of the named earlier runs, then this run's best model."""
    if config.tsne is None:
        return {}
    root, key = output_dir(config), f"{prefix}tsne_layer"
    models = [teacher_of(folder, task, tasks, key=f"{prefix}tsne") for folder in config.tsne]
    for path in models:
        found = load_config(path)
        check_classes(found, task, named=f"{prefix}tsne {path}")
        check_layer(config.tsne_layer, found, named=path, key=key)
    check_layer(config.tsne_layer, load_config(config.model), named=config.model, key=key)
    return dict(zip(short_names([*config.tsne, str(root)]), [*models, str(root / task / BEST)], strict=True))


def check_layer(layer: int | None, config: PreTrainedConfig, *, named: str, key: str) -> None:
    """Raises UserError if a model does not have the layer for t-SNE."""
    num_layers = shape_of(config).num_layers
    if layer is not None and layer > num_layers:
        raise UserError(f"{key} {layer}: {named} has {num_layers} layers; give 1 to {num_layers}")


def conduct(config: GlueConfig, studies: dict[str, TaskStudy], world: World, *, command: str) -> dict[str, Any]:
    """Run all tasks and write results.json and report.md; every rank must call this function."""
    first = next(iter(studies.values()))
    print_main(_headline(config, studies), world)
    sizes = on_main(lambda: _measure(config, first), world)
    names = list(studies)
    # The study of a finished task is removed, which frees its examples.
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
    plan = next(iter(studies.values())).plan()
    teacher = "" if config.teacher is None else f" from {config.teacher}"
    terms = ", ".join(plan.method.weights)
    classifier = "; the classifier starts as the teacher's" if plan.copies_classifier else ""
    return (
        f"Model       {config.model}\n"
        f"Method      {' + '.join(config.methods())}{teacher} (terms: {terms}){classifier}\n"
        f"Runs        {sum(runs.values())} by the protocol {config.protocol}: {counted}\n"
        f"Output      {output_dir(config)}"
    )


def _measure(config: GlueConfig, study: TaskStudy) -> dict[str, Any]:
    models = {"baseline": config.baseline, "teacher": study.teacher, "model": config.model}
    return measure(
        {role: path for role, path in models.items() if path is not None},
        file=study.root / "sizes.json",
        speed=config.speed,
        batch_size=study.grid.batch_size,
        length=study.grid.max_length,
        dtype=study.plan().dtype,
        device=study.world.device,
    )
