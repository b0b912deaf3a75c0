"""The results of a study of benchmarks, and its report."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmdistill.papers.fine_tuning.averages import CONVENTIONS, SQUAD2, Convention, average_of
from llmdistill.report.study_report import StudyReport
from llmdistill.report.tables import TitledTable, count_seeds, over_seeds, show_seeds, spread
from llmdistill.report.trials import ModelEntry, entry_of
from llmdistill.studies.trials import Choice, Result, by_settings
from llmdistill.tasks.benchmark import BenchmarkData
from llmdistill.tasks.glue import GLUE

NAMES: dict[Convention, str] = {
    "makd": "MaKD's",
    "minilmv2": "MiniLMv2's",
    "minilm": "MiniLM's",
    "kroneckerbert": "KroneckerBERT's",
}
"""The averages that a table may show: the protocol's own, else the first, whose columns of GLUE all exist, and rather
one whose SQuAD 2.0 was run too."""


def summarize(data: BenchmarkData, choice: Choice, results: Sequence[Result]) -> dict[str, Any]:
    """Return a task's part of results.json, as plain JSON values."""
    students = [result.metrics["student"] for result in choice.results if result.metrics is not None]
    metrics = [student["dev"] for student in students]
    thresholds = [student["threshold"] for student in students if "threshold" in student]
    return {
        "metric": data.task.metrics[0],
        "shown": list(data.task.shown),
        "main_column": data.main_column,
        **_settings(choice.results),
        "seeds": [result.trial.seed for result in choice.results],
        "best_run": choice.best.trial.folder.name,
        "dev": {
            column: {metric: over_seeds([dev[column][metric] for dev in metrics]) for metric in metrics[0][column]}
            for column in metrics[0]
        },
        "threshold": over_seeds(thresholds) if thresholds else None,
        "chance": data.chance,
        "grid": [
            {
                **_settings(group),
                **spread([run.metrics["student"]["score"] for run in group if run.metrics is not None]).to_dict(),
            }
            for group in by_settings(results)
            if len(group) == len(choice.results)  # others lack seeds that failed, see `choose`
        ],
        "examples": dict(data.sizes),
        "seconds": sum(result.metrics["run"]["seconds"] for result in results if result.metrics is not None),
    }


def _settings(group: Sequence[Result]) -> dict[str, Any]:
    """Return the settings of a group of trials by the last part of their keys."""
    return {key.rpartition(".")[2]: value for key, value in group[0].trial.settings.items()}


def dev_columns(scored: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the columns on dev of several tasks with their metrics."""
    return {column: metrics for of_task in scored for column, metrics in of_task["dev"].items()}


def tuned_entries(results: Mapping[str, Any]) -> dict[str, ModelEntry]:
    """Return the models of a fine-tuning on tasks; a student's score is the mean over the seeds of its settings."""
    student = {
        (column, metric): value["mean"]
        for column, metrics in dev_columns(results["tasks"].values()).items()
        for metric, value in metrics.items()
    }
    entries = {"student": entry_of(student, params=results["params"]["model"]["total"])}
    if all(task["teacher"] is not None for task in results["tasks"].values()):
        columns = dev_columns(task["teacher"] for task in results["tasks"].values())
        teacher = {(column, metric): value for column, metrics in columns.items() for metric, value in metrics.items()}
        entries["teacher"] = entry_of(teacher, params=results["params"]["teacher"]["total"])
    return entries


def compute_averages(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return each paper's average and the plain average, for the model and for the teacher if there is one."""
    columns = dev_columns(tasks.values())
    means = {column: {key: value["mean"] for key, value in metrics.items()} for column, metrics in columns.items()}
    by_role = {"model": _averages(tasks, means)}
    if all(task["teacher"] is not None for task in tasks.values()):
        by_role["teacher"] = _averages(tasks, dev_columns(task["teacher"] for task in tasks.values()))
    return by_role


def _averages(tasks: Mapping[str, Any], scores: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    plain = statistics.fmean(scores[task["main_column"]][task["metric"]] for task in tasks.values())
    # The conventions for test sets do not apply to dev scores.
    dev = [name for name in CONVENTIONS if not name.endswith("_test")]
    return {"plain": plain, **{name: average_of(scores, name) for name in dev}}


def _shown_average(results: Mapping[str, Any], role: str) -> tuple[str, float]:
    of_role = results["averages"][role]
    own = results["protocol"]
    names = sorted(NAMES.items(), key=lambda item: item[0] != own)  # the protocol's own first
    for convention, name in names:
        if of_role[convention]["overall"] is not None and not of_role[convention]["missing"]:
            return f"average ({name})", of_role[convention]["overall"]
    for convention, name in names:
        if not set(of_role[convention]["missing"]) - {SQUAD2}:
            lacks = ", without SQuAD 2.0" if of_role[convention]["missing"] else ""
            return f"average ({name}{lacks})", of_role[convention]["glue"]
    count = len(results["tasks"])
    return (f"average of these {count}" if count > 1 else "average"), of_role["plain"]


def shown_metrics(task: Mapping[str, Any], column: str) -> list[str]:
    """Return the metrics of a column that tables show; a further set has the accuracy alone, whatever the task."""
    return [metric for metric in task["shown"] if metric in task["dev"][column]] or list(task["dev"][column])


def results_table(results: Mapping[str, Any]) -> TitledTable:
    """Return a row for each of the baseline and the teacher, if they exist, and the model."""
    columns = [
        (task, column, metric)
        for task in results["tasks"].values()
        for column in task["dev"]
        for metric in shown_metrics(task, column)
    ]
    has_average, has_speed = len(results["tasks"]) > 1, len(results["params"]) > 1 and results["speed"] is not None
    header = ["", "params", "embedding", "transformer", *(f"{column} {metric}" for _, column, metric in columns)]
    header += [_shown_average(results, "model")[0]] * has_average + ["speed-up"] * has_speed
    rows = []
    for role, sizes in results["params"].items():
        row = [role, *(f"{sizes[part]:,}" for part in ("total", "embedding", "transformer"))]
        row += [_score(task, column, metric, role) for task, column, metric in columns]
        if has_average:
            row.append("" if role == "baseline" else f"{_shown_average(results, role)[1]:.1f}")
        if has_speed:
            row.append(f"{results['speed'][role]['speedup']:.2f}x")
        rows.append(row)
    seeds = count_seeds(max(len(task["seeds"]) for task in results["tasks"].values()))
    limit = "" if results["limit"] is None else f", only {results['limit']} training examples"
    return TitledTable(f"{_named(results)} dev sets x 100, {seeds}{limit}", header, rows)


def _score(task: Mapping[str, Any], column: str, metric: str, role: str) -> str:
    if role == "model":
        return show_seeds(task["dev"][column][metric])
    return f"{task['teacher']['dev'][column][metric]:.1f}" if role == "teacher" else ""


def _named(results: Mapping[str, Any]) -> str:
    tasks = results["tasks"]
    return "GLUE" if set(tasks) <= set(GLUE) else ", ".join(tasks)


def fine_tuning_report(folder: Path, results: Mapping[str, Any]) -> StudyReport:
    table = results_table(results)
    return StudyReport(
        folder=folder,
        results=results,
        template="fine_tuning",
        values={
            **results,
            "title": f"{_named(results)}: {results['model']}",
            "legend": table.title,
            "table": table,
            "all_tasks": list(GLUE),
            "record": results["run"],
        },
        table=table,
        transposed=True,
        closing=f"The report is {folder / 'report.md'}, all figures are in {folder / 'results.json'}.",
    )
