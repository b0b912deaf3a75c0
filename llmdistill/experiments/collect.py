"""Collects the data of a report from the folders of finished runs."""

from __future__ import annotations

import json
import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmdistill.embedded import locate
from llmdistill.experiments.comparison import Findings, Study
from llmdistill.experiments.launcher import shown_command
from llmdistill.experiments.trials import Result, Trial
from llmdistill.models.configs import load_config
from llmdistill.models.load import downloaded
from llmdistill.report.metrics_log import read_metrics_log, term_names
from llmdistill.report.record import describe_versions
from llmdistill.report.results import Comparison, Row, Run, Sample, SizePoint

SAMPLES = 10
"""Number of prompts whose answers the report shows side by side."""


def collect(study: Study, findings: Findings, *, title: str, paper: Mapping[str, Any], command: str) -> Comparison:
    """Return the whole comparison as plain data."""
    base = study.base()
    rows = [
        _base_row(study, findings, "teacher", "teacher", locate(str(study.recipe.teacher.model))),
        _base_row(study, findings, "none", "untrained student", Path(study.untrained()), key="untrained"),
    ]
    for variant in study.trained():
        runs, trials = findings.runs[variant.name], findings.trials[variant.name]
        rows.append(
            Row(
                name=variant.name,
                label=variant.label,
                params=findings.base["untrained"]["params"],
                checkpoint_bytes=next(
                    (_weight_bytes(each.trial.folder / "student") for each in runs if each.metrics), None
                ),
                runs=[_run(study, variant.name, each) for each in runs],
                trials=[_run(study, variant.name, each) for each in trials],
                terms=_terms(runs),
            )
        )
    sets = list(study.recipe.data.tests)
    model_type = load_config(locate(str(study.recipe.teacher.model))).model_type
    printed = paper.get(model_type)
    return Comparison(
        title=title,
        sets=sets,
        rows=rows,
        sizes=_sizes(study, findings),
        samples=_samples(study, findings, base),
        warnings=_warnings(findings),
        facts=_facts(study, findings, command),
        failures=[
            _run(study, name, result)
            for results in findings.sizes.values()
            for name, result in results.items()
            if result.error is not None
        ],
        paper=printed if printed is not None and set(printed["teacher"]) == set(sets) else None,
    )


def _base_row(study: Study, findings: Findings, name: str, label: str, model: Path, key: str | None = None) -> Row:
    """Return the row of the teacher or of the untrained student: one run without training."""
    scores = findings.base[key or name]
    run = _run(study, name, Result(study.base(), {"student": scores, "run": {"training": None}}))
    return Row(
        name=name, label=label, params=scores["params"], checkpoint_bytes=_weight_bytes(downloaded(model)), runs=[run]
    )


def _run(study: Study, method: str, result: Result) -> Run:
    trial, metrics = result.trial, result.metrics or {"student": {}, "run": {"training": None}}
    student, training = metrics["student"], metrics["run"]["training"] or {}
    return Run(
        method=method,
        seed=trial.seed,
        folder=_relative(study, trial),
        command=_command(study, trial),
        settings=dict(trial.settings),
        rouge_l=student.get("rougeL"),
        valid_rouge_l=student.get("valid", {}).get("rougeL"),
        training_tokens=training.get("tokens"),
        training_tokens_per_second=training.get("tokens_per_second"),
        generation_tokens_per_second=student.get("generation_tokens_per_second"),
        peak_memory_bytes=training.get("peak_memory_bytes"),
        seconds=result.seconds,
        history=read_metrics_log(trial.folder),
        error=result.error,
    )


def _relative(study: Study, trial: Trial) -> str:
    return os.path.relpath(trial.folder, study.root)


def _command(study: Study, trial: Trial) -> str:
    return shown_command(study.launcher.train_command(trial.recipe))


def _terms(runs: Sequence[Result]) -> list[str]:
    """Return the names of the loss terms in the logs."""
    return next((names for each in runs if (names := term_names(read_metrics_log(each.trial.folder)))), [])


def _weight_bytes(folder: Path) -> int | None:
    """Return the size of a model's weights on disk, in bytes."""
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return sum(sizes) if sizes else None


def _sizes(study: Study, findings: Findings) -> list[SizePoint]:
    """Return the scores by size: the table's size with the mean over seeds, the further sizes with one seed."""
    if not findings.sizes:
        return []
    base = Result(study.base(), {"student": findings.base["untrained"]})
    groups = [("as in the table", name, runs) for name, runs in {"none": [base], **findings.runs}.items()]
    for size, results in findings.sizes.items():
        setting = f"rank {size}" if size.isdigit() else size
        groups += [(setting, name, [result]) for name, result in results.items()]
    points = []
    for setting, name, runs in groups:
        ended = [run for run in runs if run.metrics is not None]
        scores = [(run.metrics or {}).get("student") or (run.metrics or {})["untrained"] for run in ended]
        if not scores or not all(each["rougeL"] for each in scores):
            continue
        points.append(
            SizePoint(
                method=name,
                params=scores[0]["params"],
                setting=setting,
                average=statistics.fmean(statistics.fmean(each["rougeL"].values()) for each in scores),
                folder=_relative(study, ended[0].trial),
                command=_command(study, ended[0].trial),
            )
        )
    return points


def _samples(study: Study, findings: Findings, base: Trial) -> list[Sample]:
    """Return prompts spread evenly over the test sets, with each model's answer (first seed, first pass)."""
    folders = {"teacher": base.folder / "predictions" / "teacher", "none": base.folder / "predictions" / "untrained"}
    for name, runs in findings.runs.items():
        first = next((run for run in runs if run.metrics is not None), None)
        if first is not None:
            folders[name] = first.trial.folder / "predictions" / "student"
    sets = list(study.recipe.data.tests)
    samples = []
    for number, set_name in enumerate(sets):
        answers = {name: _predictions(folder / f"{set_name}.jsonl") for name, folder in folders.items()}
        rows = answers["teacher"]
        wanted = SAMPLES // len(sets) + (number < SAMPLES % len(sets))
        for index in dict.fromkeys(len(rows) * k // wanted for k in range(min(wanted, len(rows)))):
            row = rows[index]
            samples.append(
                Sample(
                    set=set_name,
                    prompt=_prompt(row),
                    reference=row["references"][0],
                    answers={
                        name: next(iter(each[index]["predictions"].values()))
                        for name, each in answers.items()
                        if index < len(each)
                    },
                )
            )
    return samples


def _prompt(row: Mapping[str, Any]) -> str:
    """Return the prompt of a row as text; the row may have any of the supported forms."""
    messages = [f"{turn['role']}: {turn['content']}" for turn in row.get("messages", [])]
    parts = [row.get("instruction"), row.get("input"), row.get("prompt"), *messages]
    return "\n\n".join(part for part in parts if part)


def _predictions(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _warnings(findings: Findings) -> list[str]:
    """Return the warnings of all runs without duplicates."""
    results = [result for runs in findings.runs.values() for result in runs if result.metrics is not None]
    warnings = [
        *findings.base["warnings"],
        *(warning for each in results for warning in (each.metrics or {})["warnings"]),
    ]
    if findings.failed:
        warnings.append(f"{len(findings.failed)} run(s) failed; what they said stands below")
    return list(dict.fromkeys(warnings))


def _facts(study: Study, findings: Findings, command: str) -> dict[str, str]:
    """Return the facts that the report shows beside the scores."""
    recipe, run = study.recipe, findings.base["run"]
    data, train = recipe.data, recipe.train
    grid = "; ".join(f"{key}: {', '.join(f'{value:g}' for value in values)}" for key, values in study.grid.items())
    return {
        "Command": command,
        "Hardware": run["hardware"],
        "Versions": describe_versions(run),
        "Teacher": recipe.teacher.model,
        "Training data": f"{data.train}, {train.global_batch_size} examples a step, {train.steps} steps",
        "Same for all": "untrained student, order of the examples, global batch, number of training tokens",
        "Chosen": f"on {data.valid} by ROUGE-L with seed {study.seeds[0]}, never on a test set; all tried {grid}",
        "Decoding": f"{run['decoding']}, ROUGE-L F1 with stemming, best of the references, x 100",
        "Seeds": ", ".join(map(str, study.seeds)),
    }


def typed(arguments: Sequence[str]) -> str:
    """Return the command as the user typed it."""
    return shlex.join(["llmdistill", "compare", *arguments])
