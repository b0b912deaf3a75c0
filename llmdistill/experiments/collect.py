"""Collects the data of a report from the folders of finished runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmdistill.embedded import locate
from llmdistill.experiments.comparison import Findings, Study
from llmdistill.experiments.launcher import shown_command
from llmdistill.experiments.trials import Result
from llmdistill.models.configs import load_config
from llmdistill.models.load import downloaded
from llmdistill.report.metrics_log import read_metrics_log, term_names
from llmdistill.report.record import describe_versions
from llmdistill.report.results import Comparison, Row, Run, Sample

SAMPLES = 10
"""Number of prompts whose answers the report shows side by side."""


def collect(study: Study, findings: Findings, *, title: str, paper: Mapping[str, Any], command: str) -> Comparison:
    """Return the whole comparison as plain data."""
    teacher = locate(str(study.recipe.teacher.model))
    untrained_params = findings.base["untrained"]["params"]
    base = Result(study.base(), findings.base)
    rows = [
        Row(
            name="teacher",
            label="teacher",
            params=findings.base["teacher"]["params"],
            checkpoint_bytes=_weight_bytes(downloaded(teacher)),
            runs=[_run(study, "teacher", base, "teacher")],
        ),
        Row(
            name="none",
            label="untrained student",
            params=untrained_params,
            checkpoint_bytes=_weight_bytes(downloaded(Path(study.untrained()))),
            runs=[_run(study, "none", base, "untrained")],
        ),
    ]
    for variant in study.trained():
        results = findings.runs[variant.name]
        runs = [_run(study, variant.name, each) for each in results]
        rows.append(
            Row(
                name=variant.name,
                label=variant.label,
                params=untrained_params,
                checkpoint_bytes=next(
                    (_weight_bytes(each.trial.folder / "student") for each in results if each.metrics), None
                ),
                runs=runs,
                trials=[_run(study, variant.name, each) for each in findings.trials[variant.name]],
                terms=next((names for run in runs if (names := term_names(run.history))), []),
            )
        )
    sets = list(study.recipe.data.tests)
    printed = paper.get(load_config(teacher).model_type)
    return Comparison(
        title=title,
        sets=sets,
        rows=rows,
        sizes=_sizes(study, findings, rows[1:]),
        samples=_samples(study, findings),
        warnings=_warnings(findings),
        facts=_facts(study, findings, command),
        paper=printed if printed is not None and set(printed["teacher"]) == set(sets) else None,
    )


def _sizes(study: Study, findings: Findings, table: Sequence[Row]) -> list[Row]:
    """Return the rows by size: those of the table, then those of the further sizes with one seed."""
    if not findings.sizes:
        return []
    rows = [replace(row, label="as in the table") for row in table]
    for size, results in findings.sizes.items():
        for name, result in results.items():
            model = "untrained" if name == "none" else "student"
            params = None if result.metrics is None else result.metrics[model]["params"]
            label = f"rank {size}" if size.isdigit() else size
            rows.append(Row(name=name, label=label, params=params, runs=[_run(study, name, result, model)]))
    return rows


def _run(study: Study, method: str, result: Result, model: str = "student") -> Run:
    """Return a run with the scores of one of its models."""
    trial, metrics = result.trial, result.metrics or {}
    scores = metrics.get(model, {})
    training = (metrics["run"]["training"] or {}) if metrics and model == "student" else {}
    return Run(
        method=method,
        seed=trial.seed,
        folder=os.path.relpath(trial.folder, study.root),
        command=shown_command(study.launcher.train_command(trial.recipe)),
        settings=dict(trial.settings),
        rouge_l=scores.get("rougeL"),
        valid_rouge_l=scores.get("valid", {}).get("rougeL"),
        costs={
            "training_tokens": training.get("tokens"),
            "training_tokens_per_second": training.get("tokens_per_second"),
            "peak_memory_bytes": training.get("peak_memory_bytes"),
            "generation_tokens_per_second": scores.get("generation_tokens_per_second"),
            "seconds": result.seconds,
        },
        history=read_metrics_log(trial.folder),
        error=result.error,
    )


def _weight_bytes(folder: Path) -> int | None:
    """Return the size of a model's weights on disk, in bytes."""
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return sum(sizes) if sizes else None


def _samples(study: Study, findings: Findings) -> list[Sample]:
    """Return prompts spread evenly over the test sets, with each model's answer (first seed, first pass)."""
    answered = study.base().folder / "predictions"
    folders = {"teacher": answered / "teacher", "none": answered / "untrained"}
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
