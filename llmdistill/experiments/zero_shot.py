"""Zero-shot scores of several decoders side by side, such as those of a run: teacher, untrained student and student."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from llmdistill.artifacts import read_result, write_result
from llmdistill.config.zero_shot import ZeroShotConfig
from llmdistill.experiments.side_by_side import (
    check_kind,
    default_folder,
    model_entries,
    named_models,
    result_file,
    write_results,
)
from llmdistill.factorize.counting import count_parameters
from llmdistill.fingerprints import fingerprint
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.report.record import make_record
from llmdistill.report.tables import Texts, print_table
from llmdistill.runtime.devices import TORCH_DTYPES, chosen_dtype
from llmdistill.runtime.distributed import World
from llmdistill.tasks.zero_shot import ZeroShotTasks, find_zero_shot, is_share, main_metric, score_zero_shot

ASKED = ("tasks", "task_dir", "num_fewshot", "limit", "max_length", "dtype")
"""The settings on which scores depend."""


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The checked settings."""

    models: Mapping[str, Path]
    """Folder or hub name of each model, by the name of its row."""
    asked: Mapping[str, Mapping[str, Any]]
    """What the scores of each model depend on."""
    folder: Path
    tasks: ZeroShotTasks
    dtype: str


def evaluate(config: ZeroShotConfig, *, command: str) -> dict[str, Any]:
    """Score each model on the tasks, and return the results as plain JSON values.

    The score of each model is kept in the output folder as soon as it is there, so that the same command goes on with
    the next model. results.json and report.md are written at the end.

    Raises:
        UserError: a model is no decoder or cannot be read, a task does not exist, or its data cannot be loaded; all of
            it is told before a model is loaded.
    """
    world = World.alone()
    plan = _plan(config, world)
    kept = {name: read_result(result_file(plan.folder, name), asked) for name, asked in plan.asked.items()}
    if None in kept.values():
        plan.tasks.check_data()
    scores = {name: each or _score(name, config, plan, world) for name, each in kept.items()}
    results = {
        **{key: getattr(config, key) for key in ASKED},
        "dtype": plan.dtype,
        "models": model_entries(scores),
        "run": make_record(command, world.size),
    }
    return write_results(
        plan.folder,
        results,
        title="Zero-shot tasks",
        legend=_title(results) + ".",
        table=table_cells(results),
        template="zero_shot.md.j2",
        closing="The scores of each model are in a folder of its name, and all of them in results.json.",
    )


def _plan(config: ZeroShotConfig, world: World) -> _Plan:
    """Check all settings before a model is loaded; raise UserError for a mistake."""
    models = named_models(config.model)
    check_kind(models, causal=True, reason="the tasks of the harness need a decoder")
    dtype = chosen_dtype(config.dtype, world.device)
    tasks = find_zero_shot(config.tasks, config.task_dir)
    asked = {key: getattr(config, key) for key in ASKED} | {"dtype": dtype}
    if config.task_dir is not None:
        asked["content of task_dir"] = fingerprint(config.task_dir)
    return _Plan(
        models=models,
        asked={name: {**asked, "content of model": fingerprint(str(path))} for name, path in models.items()},
        folder=Path(config.output_dir or default_folder("zero_shot", config.model[0])),
        tasks=tasks,
        dtype=dtype,
    )


def _score(name: str, config: ZeroShotConfig, plan: _Plan, world: World) -> dict[str, Any]:
    """Score a model, and keep its scores."""
    path = plan.models[name]
    print(f"{name}: {path} on {', '.join(plan.tasks.names)} ...", flush=True)
    model = load_model(path, dtype=TORCH_DTYPES[plan.dtype], device=world.device)
    found = score_zero_shot(
        model,
        load_tokenizer(path),
        plan.tasks,
        num_fewshot=config.num_fewshot,
        limit=config.limit,
        batch_size=config.batch_size,
        max_length=config.max_length,
    )
    result = {"path": str(path), "params": count_parameters(model), "tasks": found}
    return write_result(result_file(plan.folder, name), plan.asked[name], result)


def table_cells(results: Mapping[str, Any]) -> Texts:
    """Return header and rows as text: each task by its main metric, and the mean of those that are shares."""
    models = results["models"]
    tasks = {name: main_metric(task["metrics"]) for name, task in next(iter(models.values()))["tasks"].items()}
    shares = [name for name, metric in tasks.items() if is_share(metric)]
    header = ["", "params", *(f"{name} {metric}" for name, metric in tasks.items())]
    rows = [
        [name, f"{each['params']:,}", *(_cell(each["tasks"][task], metric) for task, metric in tasks.items())]
        for name, each in models.items()
    ]
    if len(shares) > 1:
        header.append("average")
        for row, each in zip(rows, models.values(), strict=True):
            row.append(f"{100 * fmean(each['tasks'][name]['metrics'][tasks[name]] for name in shares):.1f}")
    return header, rows


def _cell(task: Mapping[str, Any], metric: str) -> str:
    value, error = task["metrics"][metric], task["stderr"].get(metric)
    scale, decimals = (100, 1) if is_share(metric) else (1, 3)
    text = f"{scale * value:.{decimals}f}"
    return text if error is None else f"{text} ± {scale * error:.{decimals}f}"


def print_results(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the table, one row per model."""
    print_table(_title(results), *table_cells(results), turned=True, console=console)


def _title(results: Mapping[str, Any]) -> str:
    shots = results["num_fewshot"]
    how = "as the tasks say" if shots is None else f"{shots} solved examples before each question"
    limit = "" if results["limit"] is None else f", only {results['limit']} examples of each"
    return f"Tasks of lm-evaluation-harness, shares x 100 ± standard error, {how}{limit}"
