"""Tells the model cards of students how they were made: by a run or by compress."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.artifacts import as_json
from llmdistill.config import FactorizeConfig, RunConfig, StudentConfig
from llmdistill.config.command_line import build, to_dict
from llmdistill.config.strict import flatten
from llmdistill.data.sources import hub_name
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.models.configs import load_config
from llmdistill.report.card import StudentFacts, TeacherFacts, without_paths, write_card
from llmdistill.report.record import describe_versions, make_record
from llmdistill.report.table import describe_best, model_table
from llmdistill.students.counting import build_reference, count_parameters
from llmdistill.tasks.base import ScoreTable
from llmdistill.training.inputs import Model, save_with_tokenizer
from llmdistill.training.plan import Plan


def write_run_card(plan: Plan, metrics: Mapping[str, Any], table: ScoreTable, data_report: str) -> None:
    """Write the card of a run's student from what the run has put into metrics.json; rank 0 only."""
    student, config = plan.folder / "student", plan.config
    if not (student / "config.json").is_file():
        return
    teacher_name = config.teacher.model or config.student.model
    teacher = TeacherFacts.of(str(teacher_name), plan.models.teacher, plan.models.sizes["teacher_params"])
    methods, train, record = " + ".join(config.methods()), config.train, metrics["run"]
    share = metrics["student"]["params"] / teacher.params if "student" in metrics else plan.models.sizes["ratio"]
    defaults = build({"ds_config": ""}, RunConfig, METHODS)  # a parser would take longer than a short run's steps
    places = ("output_dir", "resume", "ds_config")
    given = {key: value for key, value in to_dict(plan.recorded).items() if key not in places}
    data, is_task = config.data, config.data.kind == "task"
    data_name = str(data.task.name) if is_task else without_paths(str(data.train))
    hub = (plan.task.hub if data.task.dir is None else None) if is_task else hub_name(data.train)
    # The metrics of each column of tasks, and the scores of each set; those on a part of a set go on no card.
    scored = metrics.get("student", {}) if config.scoring.limit is None else {}
    scores: dict[str, dict[str, float]] = {name: dict(values) for name, values in scored.get("dev", {}).items()}
    for metric in ("rougeL", "perplexity"):
        for name, value in scored.get(metric, {}).items():
            scores.setdefault(name, {})[metric] = value
    learned = f"A student with {share:.0%} of the parameters of {teacher.name}, distilled from it"
    story = StudentFacts(
        intro=f"{learned} by {methods}." if plan.method.needs_teacher else f"{teacher.name}, trained by {methods}.",
        tags=[
            "distillation",
            *config.methods(),
            *([] if config.student.shape or config.student.model else [config.student.method]),
        ],
        made=[
            ("Method", f"{methods}, with the terms {', '.join(plan.method.weights)}"),
            ("Start of the student", str(plan.models.sizes["method"])),
            ("Data", f"{data_name}, {data_report.rstrip('.')}"),
            ("Steps", f"{train.steps:,} of {train.global_batch_size} sequences"),
            *([("Kept", f"the student {describe_best(metrics['kept'])}")] if "kept" in metrics else []),
            ("Seed", str(config.seed)),
            ("Command", record["command"]),
            ("Hardware", record["hardware"]),
            ("Versions", describe_versions(record)),
        ],
        datasets=[] if hub is None else [hub],
        settings={"method": config.method, **_find_changes(as_json(given), as_json(to_dict(defaults)))},
        scores=scores,
        table=model_table(metrics, table) if table.rows else None,
        legend=table.legend,
        warnings=metrics["warnings"],
    )
    write_card(student, plan.folder.name, teacher, story)


def _find_changes(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that differ from the defaults, nested as they are."""
    settings: dict[str, Any] = {}
    for key, value in values.items():
        default = defaults.get(key)
        if isinstance(value, dict) and isinstance(default, dict) and default:
            inner = _find_changes(value, default)
            settings |= {key: inner} if inner else {}
        elif value != default:
            settings[key] = value
    return settings


def save_compressed(
    student: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    model: Model,
    made_by: StudentConfig,
    title: str,
) -> None:
    """Save the result of `compress` with tokenizer and card; `model` is the dense one, `title` the name in the card."""
    source = None if isinstance(model, PreTrainedModel) else locate(str(model))
    settings, method = made_by.factorize, made_by.method
    save_with_tokenizer(student, tokenizer, folder, source=None if source is None else str(source))
    config = model.config if isinstance(model, PreTrainedModel) else load_config(str(source))
    params = count_parameters(build_reference(config))
    name = str(model.name_or_path or "") if isinstance(model, PreTrainedModel) else str(model)
    try:
        teacher = TeacherFacts.of(name, config, params)
    except UserError:  # a model that was never saved, or whose folder is gone
        teacher = TeacherFacts(name=f"a {type(student).__name__} in memory", params=params)
    given = flatten(_find_changes(asdict(settings), asdict(FactorizeConfig())))
    flags = shlex.join(word for key, value in given.items() for word in (f"--{key}", str(value)))
    command = f"llmdistill compress --model {shlex.quote(teacher.name)} --method {method} {flags}"
    share = count_parameters(build_reference(student.config)) / params
    story = StudentFacts(
        intro=f"{teacher.name}, factorized to {share:.0%} of its parameters and not trained after that.",
        tags=["compression", method],
        made=[
            ("Method", f"factorization by {method}, weighting {settings.weighting}, allocation {settings.allocation}"),
            ("Command", command),
            ("Versions", describe_versions(make_record(command, 1))),
        ],
    )
    write_card(folder, title, teacher, story)
