"""Scores of several encoders on MTEB side by side, such as those of a run: teacher, untrained student and student."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from llmdistill.artifacts import read_result, write_result
from llmdistill.config.mteb import MtebConfig
from llmdistill.experiments.side_by_side import check_kind, default_folder, named_models, result_file, write_results
from llmdistill.factorize.counting import count_parameters
from llmdistill.fingerprints import fingerprint
from llmdistill.models.configs import load_config
from llmdistill.models.families import max_positions
from llmdistill.models.load import load_model
from llmdistill.models.sentences import SentenceSettings, read_sentence_settings
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.objective import Pooling
from llmdistill.report.record import make_record
from llmdistill.report.tables import Texts, print_table
from llmdistill.runtime.devices import TORCH_DTYPES, chosen_dtype
from llmdistill.runtime.distributed import World
from llmdistill.tasks.mteb import MtebTask, SentenceEncoder, find_mteb

_TOKENS = 512
"""Largest number of tokens of a text where neither the user nor the files say one."""


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """The checked settings."""

    models: Mapping[str, Path]
    """Folder or hub name of each model, by the name of its row."""
    settings: Mapping[str, SentenceSettings]
    """How each model makes embeddings."""
    asked: Mapping[str, Sequence[Mapping[str, Any]]]
    """What the scores of each model depend on, one entry a task."""
    folder: Path
    tasks: Sequence[MtebTask]
    dtype: str

    def file(self, name: str, task: MtebTask) -> Path:
        """Return the file that keeps the score of a model on a task."""
        return result_file(result_file(self.folder, name).parent, task.name)


def evaluate(config: MtebConfig, *, command: str) -> dict[str, Any]:
    """Score each model on the tasks, and return the results as plain JSON values.

    The score of each model on each task is kept in the output folder as soon as it is there, so that the same command
    goes on with the next task. results.json and report.md are written at the end.

    Raises:
        UserError: a model is no encoder or cannot be read, a task does not exist, or its data cannot be loaded; all of
            it is told before a model is loaded.
    """
    world = World.alone()
    plan = _plan(config, world)
    kept = {
        name: [read_result(plan.file(name, task), asked) for task, asked in zip(plan.tasks, of_tasks, strict=True)]
        for name, of_tasks in plan.asked.items()
    }
    for task, results_of_task in zip(plan.tasks, zip(*kept.values(), strict=True), strict=True):
        if None in results_of_task:
            task.check_data()
    scores = {name: _score(name, each, config, plan, world) for name, each in kept.items()}
    results = {
        **{key: getattr(config, key) for key in ("tasks", "benchmark", "languages", "max_length")},
        "dtype": plan.dtype,
        "models": {name: _entry(name, each, plan) for name, each in scores.items()},
        "run": make_record(command, world.size),
    }
    return write_results(
        plan.folder,
        results,
        title="MTEB",
        legend=_title(results) + ".",
        table=table_cells(results),
        template="mteb.md.j2",
        details={f"Embeddings of {name}": each["embeddings"] for name, each in results["models"].items()},
        closing="The scores of each model on each task are in a folder of its name, and all of them in results.json.",
    )


def _plan(config: MtebConfig, world: World) -> _Plan:
    """Check all settings before a model is loaded; raise UserError for a mistake."""
    models = named_models(config.model)
    check_kind(models, causal=False, reason="embeddings of sentences are scored for encoders: give an encoder")
    settings = {name: _settings(path, config.max_length) for name, path in models.items()}
    dtype = chosen_dtype(config.dtype, world.device)
    tasks = find_mteb(config.tasks, config.benchmark, config.languages)
    decides = [task.decides() for task in tasks]
    asked = {
        name: {"dtype": dtype, "embeddings": asdict(settings[name]), "content of model": fingerprint(str(path))}
        for name, path in models.items()
    }
    return _Plan(
        models=models,
        settings=settings,
        asked={name: [{**each, **own} for each in decides] for name, own in asked.items()},
        folder=Path(config.output_dir or default_folder("mteb", config.model[0])),
        tasks=tasks,
        dtype=dtype,
    )


def _settings(path: Path, max_length: int | None) -> SentenceSettings:
    """Return how a model makes embeddings: as the files beside it say, else the mean of its outputs."""
    found = read_sentence_settings(path) or SentenceSettings(pooling=Pooling(), max_length=None)
    return replace(found, max_length=max_positions(load_config(path), max_length or found.max_length or _TOKENS))


def _score(
    name: str, kept: Sequence[dict[str, Any] | None], config: MtebConfig, plan: _Plan, world: World
) -> list[dict[str, Any]]:
    """Return the scores of a model on all tasks; those that are not kept are computed and kept then."""
    if None not in kept:
        return [each for each in kept if each is not None]
    path = plan.models[name]
    print(f"{name}: {path} ...", flush=True)
    model = load_model(path, dtype=TORCH_DTYPES[plan.dtype], device=world.device, head="none")
    encoder = SentenceEncoder(model, load_tokenizer(path), plan.settings[name])
    scores = []
    for task, asked, found in zip(plan.tasks, plan.asked[name], kept, strict=True):
        if found is None:
            print(f"{name}: {task.name} ...", flush=True)
            result = {"params": count_parameters(model), **task.score(encoder, batch_size=config.batch_size)}
            found = write_result(plan.file(name, task), asked, result)
        scores.append(found)
    return scores


def _entry(name: str, scores: Sequence[Mapping[str, Any]], plan: _Plan) -> dict[str, Any]:
    """Return the results of a model as results.json has them, without what they were asked for."""
    without = ("asked", "params")
    return {
        "path": str(plan.models[name]),
        "params": scores[0]["params"],
        "embeddings": _described(plan.settings[name]),
        "tasks": {
            task.name: {key: value for key, value in each.items() if key not in without}
            for task, each in zip(plan.tasks, scores, strict=True)
        },
    }


def _described(settings: SentenceSettings) -> str:
    normalised = ", normalised" if settings.pooling.normalize else ""
    return f"{' and '.join(settings.pooling.modes)} of at most {settings.max_length} tokens{normalised}"


def table_cells(results: Mapping[str, Any]) -> Texts:
    """Return header and rows as text: the mean of the tasks, and each task by its main score."""
    models = results["models"]
    tasks = next(iter(models.values()))["tasks"]
    header = ["", "params", *(f"{name} {task['metric']}" for name, task in tasks.items())]
    rows = [
        [name, f"{each['params']:,}", *(f"{100 * task['score']:.2f}" for task in each["tasks"].values())]
        for name, each in models.items()
    ]
    if len(tasks) > 1:
        header.insert(2, "average")
        for row, each in zip(rows, models.values(), strict=True):
            row.insert(2, f"{100 * fmean(task['score'] for task in each['tasks'].values()):.2f}")
    return header, rows


def print_results(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the table, one row per model."""
    print_table(_title(results), *table_cells(results), turned=True, console=console)


def _title(results: Mapping[str, Any]) -> str:
    what = "Tasks of MTEB" if results["benchmark"] is None else f"The benchmark {results['benchmark']} of MTEB"
    languages = "" if results["languages"] is None else f", in {', '.join(results['languages'])}"
    return f"{what}{languages}, main scores x 100, each the mean of its splits and subsets"
