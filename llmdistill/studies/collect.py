"""Collects the data of a report from the folders of finished runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmdistill.embedded import locate
from llmdistill.models.companions import download
from llmdistill.models.configs import load_config
from llmdistill.report.metrics_log import read_metrics_log, term_names
from llmdistill.report.record import describe_versions
from llmdistill.report.results import TABLE_SIZE, Comparison, ComparisonRow, UntrainedStudent
from llmdistill.report.samples import read_samples
from llmdistill.report.score import PERPLEXITY, ROUGE_L
from llmdistill.report.trials import ModelEntry
from llmdistill.report.weighting import read_weighting
from llmdistill.report.weights_on_disk import read_checkpoint
from llmdistill.studies.comparison import Findings, MethodStudy
from llmdistill.studies.equal import size_label
from llmdistill.studies.variants import Start
from llmdistill.tasks.base import VALID
from llmdistill.tasks.words import describe_words


def collect_comparison(
    study: MethodStudy, findings: Findings, *, title: str, paper: Mapping[str, Any], command: str
) -> Comparison:
    teacher = locate(str(study.recipe.teacher.model))
    first = findings.rows[study.starts[0].key("none")].first
    rows = [
        ComparisonRow(
            name="teacher",
            label="teacher",
            score=study.score,
            params=findings.base["teacher"]["params"],
            checkpoint=read_checkpoint(download(teacher)),
            runs=[study.row_of(study.starts[0].key("none"), first)],
        ),
        *(row for start in study.starts for row in _rows(study, findings, start)),
    ]
    measured = findings.base["teacher"].get("texts", {})
    windows = {name: (text["windows"], text["total"]) for name, text in measured.items() if name != VALID}
    on_text = study.score is PERPLEXITY
    sets = [name for name in study.recipe.data.tests if on_text or name not in windows]
    counts = findings.base["teacher"].get("examples", {})
    examples = {name: (counts[name]["scored"], counts[name]["total"]) for name in sets if name in counts}
    printed = paper.get(load_config(teacher).model_type)
    metrics = [run.metrics for outcome in findings.rows.values() for run in outcome.runs if run.metrics is not None]
    warnings = [warning for of_run in metrics for warning in of_run["warnings"]]
    if findings.failed:
        warnings.append(f"{len(findings.failed)} run(s) failed; what they said stands below")
    # How the untrained students were made, where starts are compared or a student is weighted
    made = [(start, TABLE_SIZE, findings.rows[start.key("none")].first) for start in study.starts]
    for size, results in findings.sizes.items():
        made += [(start, size_label(size), results[start.key("none")].first) for start in study.starts]
    untrained_students = []
    for start, size, result in made:
        run, weighting = study.row_of(start.key("none"), result), read_weighting(result.trial.folder)
        untrained = run.models.get("untrained", ModelEntry())
        scores = untrained.by_set(study.score.key)
        if scores and (start.name or weighting):
            untrained_students.append(
                UntrainedStudent(
                    start=start.name,
                    label=start.label,
                    size=size,
                    folder=run.folder,
                    params=untrained.params,
                    average=study.score.mean(scores.values()),
                    weighting=weighting,
                )
            )
    # The answers of each model to prompts spread evenly over the test sets: those of the first seed, first pass.
    folders = {
        key: scored.trial.folder / "predictions"
        for key, outcome in findings.rows.items()
        if (scored := next((run for run in outcome.runs if run.metrics is not None), None)) is not None
    }
    untrained_keys = {start.key("none") for start in study.starts}
    answers = {"teacher": first.trial.folder / "predictions" / "teacher"}
    answers |= {key: folder / ("untrained" if key in untrained_keys else "student") for key, folder in folders.items()}
    return Comparison(
        title=title,
        sets=sets,
        examples=windows if on_text else examples,
        texts={} if on_text else windows,
        rows=rows,
        sizes=_sizes(study, findings, rows[1:]),
        untrained=untrained_students,
        samples=read_samples(answers, list(study.recipe.data.tests)),
        warnings=list(dict.fromkeys(warnings)),
        facts=_facts(study, findings, command),
        paper=printed if printed is not None and set(printed["teacher"]) == set(sets) else None,
    )


def _rows(study: MethodStudy, findings: Findings, start: Start) -> list[ComparisonRow]:
    """Return the rows of the untrained student of a start and of the methods that train it."""
    key = start.key("none")
    base = findings.rows[key].first
    assert base.metrics is not None
    weighting = read_weighting(base.trial.folder)
    costs = {f"calibration_{key}": weighting.get(key, 0) for key in ("tokens", "seconds")}
    shared: dict[str, Any] = {
        "score": study.score,
        "start": start.name,
        "params": base.metrics["untrained"]["params"],
        "calibration": costs if weighting or start.name else None,
    }
    checkpoint = read_checkpoint(download(Path(study.untrained(start))))
    runs = [study.row_of(key, base)]
    rows = [ComparisonRow(name="none", label="untrained student", checkpoint=checkpoint, runs=runs, **shared)]
    for variant in (variant for variant in study.trained() if variant.start.name == start.name):
        outcome = findings.rows[variant.key]
        runs = [study.row_of(variant.key, result) for result in outcome.runs]
        logs = {run.folder: read_metrics_log(study.folder / run.folder) for run in runs}
        ended = (result.trial.folder for result in outcome.runs if result.metrics)
        own: dict[str, Any] = {
            "checkpoint": next((read_checkpoint(folder / "student") for folder in ended), None),
            "runs": runs,
            "trials": [study.row_of(variant.key, result) for result in outcome.trials],
            "terms": next((names for log in logs.values() if (names := term_names(log))), []),
            "logs": logs,
        }
        rows.append(ComparisonRow(name=variant.name, label=variant.label, **own, **shared))
    return rows


def _sizes(study: MethodStudy, findings: Findings, table: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return the rows by size: those of the table, then those of the further sizes with one seed."""
    if not findings.sizes:
        return []
    rows = [replace(row, label=TABLE_SIZE) for row in table]
    for size, results in findings.sizes.items():
        for row in (row for row in table if row.key in results):
            run = study.row_of(row.key, results[row.key].first)
            rows.append(
                ComparisonRow(
                    name=row.name,
                    start=row.start,
                    score=row.score,
                    label=size_label(size),
                    params=row.entry(run).params,
                    runs=[run],
                )
            )
    return rows


def _facts(study: MethodStudy, findings: Findings, command: str) -> dict[str, str]:
    recipe, run = study.recipe, findings.base["run"]
    data, train = recipe.data, recipe.train
    grid = "; ".join(f"{key}: {', '.join(f'{value:g}' for value in values)}" for key, values in study.grid.items())
    starts = [f"{start.name} ({start.label})" for start in study.starts if start.name]
    same = "order of the examples, global batch, number of training tokens"
    chosen = f"on {data.valid} by {study.score.name} with seed {study.seeds[0]}, never on a test set; all tried {grid}"
    examples = f"sequences of {data.max_length} tokens" if study.score is PERPLEXITY else "examples"
    if study.score is ROUGE_L:
        words = describe_words(findings.base["teacher"].get("rouge_words", {}))
        scoring = {"Decoding": f"{run['decoding']}, ROUGE-L {words}, best of the references, x 100"}
    else:
        text = next(iter(findings.base["teacher"]["texts"].values()))
        begin = f", each begins with {text['begin']}" if text.get("begin") else ""
        scoring = {"Windows": f"{text['window']:,} tokens, {text['stride']:,} from one to the next{begin}"}
    return {
        "Command": command,
        "Hardware": run["hardware"],
        "Versions": describe_versions(run),
        "Teacher": recipe.teacher.model,
        "Training data": f"{data.train}, {train.global_batch_size} {examples} a step, {train.steps} steps",
        **({"Starts": f"{', '.join(starts)}; equal in parameters"} if starts else {}),
        "Same for all": f"{same}; of a start: untrained student" if starts else f"untrained student, {same}",
        "Chosen": f"nothing; all have {grid}" if data.valid is None else chosen,
        **scoring,
        "Seeds": ", ".join(map(str, study.seeds)),
    }
