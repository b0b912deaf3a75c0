"""The results of a GLUE study: results.json, the table on the terminal, and report.md."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from llmdistill.experiments.glue.grid import Choice, Grid, Point, complete
from llmdistill.files import write_text
from llmdistill.report.record import record_lines
from llmdistill.report.spread import plus_minus
from llmdistill.report.spread import spread as spread_of
from llmdistill.report.tables import markdown_table, print_table
from llmdistill.tasks.classification import CONVENTIONS, SQUAD2, Convention, average_of, chance_score
from llmdistill.tasks.glue_files import TASKS, TaskFiles, column_of

NAMES: dict[Convention, str] = {
    "makd": "average (MaKD's)",
    "minilmv2": "average (MiniLMv2's, without SQuAD 2.0)",
}
"""The averages that a table may show; the table shows the first average whose columns all exist."""


def summarise(
    data: TaskFiles, grid: Grid, results: Mapping[Point, Mapping[str, Any]], choice: Choice
) -> dict[str, Any]:
    """Return a task's part of results.json, as plain JSON values."""
    chosen = [results[trial]["dev"] for trial in choice.trials()]
    values = {
        column: {metric: [dev[column][metric] for dev in chosen] for metric in data.task.metrics}
        for column in chosen[0]
    }
    dev = {
        column: {metric: {**spread_of(seeds).to_dict(), "seeds": seeds} for metric, seeds in metrics.items()}
        for column, metrics in values.items()
    }
    tried = [
        {
            "learning_rate": group[0].learning_rate,
            "epochs": group[0].epochs,
            **spread_of([results[trial]["score"] for trial in group]).to_dict(),
        }
        for group in complete(results, grid)
    ]
    return {
        "metric": data.task.metrics[0],
        "learning_rate": choice.learning_rate,
        "epochs": choice.epochs,
        "seeds": list(choice.seeds),
        "best_run": choice.best.name,
        "dev": dev,
        "chance": chance_score(data.name, data.dev["dev"]),
        "grid": tried,
        **grid.shared(),
        "examples": {"train": len(data.train), **{split: len(rows) for split, rows in data.dev.items()}},
        "seconds": sum(result["seconds"] for result in results.values()),
    }


def averages(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return each paper's average and the plain average, for the model and for the teacher if there is one."""
    means = {
        column: {metric: value["mean"] for metric, value in metrics.items()}
        for task in tasks.values()
        for column, metrics in task["dev"].items()
    }
    found = {"model": _averages(tasks, means)}
    if all(task["teacher"] is not None for task in tasks.values()):
        scores = {column: metrics for task in tasks.values() for column, metrics in task["teacher"]["dev"].items()}
        found["teacher"] = _averages(tasks, scores)
    return found


def _averages(tasks: Mapping[str, Any], scores: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    plain = statistics.fmean(scores[column_of(name, "dev")][task["metric"]] for name, task in tasks.items())
    # The conventions for test sets do not apply to dev scores.
    dev = [name for name in CONVENTIONS if not name.endswith("_test")]
    return {"plain": plain, **{name: asdict(average_of(scores, name)) for name in dev}}


def _shown_average(results: Mapping[str, Any], role: str) -> tuple[str, float]:
    """Return the name and the value of the average that the table shows."""
    found = results["averages"][role]
    for convention, name in NAMES.items():
        if not set(found[convention]["missing"]) - {SQUAD2}:
            return name, found[convention]["glue"]
    count = len(results["tasks"])
    return (f"average of these {count}" if count > 1 else "average"), found["plain"]


def table_cells(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows as text: the baseline and the teacher, if they exist, and the model."""
    columns = [
        (task, column, results["tasks"][task]["metric"])
        for task in results["tasks"]
        for column in results["tasks"][task]["dev"]
    ]
    has_average, has_speed = len(results["tasks"]) > 1, len(results["params"]) > 1 and results["speed"] is not None
    header = ["", "params", "embedding", "transformer", *(f"{column} {metric}" for _, column, metric in columns)]
    header += [_shown_average(results, "model")[0]] * has_average + ["speed-up"] * has_speed
    rows = []
    for role, sizes in results["params"].items():
        row = [role, *(f"{sizes[part]:,}" for part in ("total", "embedding", "transformer"))]
        row += [_score(results["tasks"][task], column, metric, role) for task, column, metric in columns]
        if has_average:
            row.append("" if role == "baseline" else f"{_shown_average(results, role)[1]:.1f}")
        if has_speed:
            row.append(f"{results['speed'][role]['speedup']:.2f}x")
        rows.append(row)
    return header, rows


def _score(task: Mapping[str, Any], column: str, metric: str, role: str) -> str:
    if role == "model":
        return spread(task["dev"][column][metric], 1)
    return f"{task['teacher']['dev'][column][metric]:.1f}" if role == "teacher" else ""


def spread(value: Mapping[str, Any], decimals: int) -> str:
    """Format the mean, with the standard deviation if there are several seeds."""
    return plus_minus(value["mean"], value["std"] if len(value["seeds"]) > 1 else None, decimals)


def print_results(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the table with one row per model, or with one column per model if the terminal is too narrow."""
    print_table(_title(results), *table_cells(results), turned=True, console=console)


def _title(results: Mapping[str, Any]) -> str:
    counts = {len(task["seeds"]) for task in results["tasks"].values()}
    seeds = f"mean ± standard deviation over {max(counts)} seeds" if max(counts) > 1 else "one seed"
    limit = "" if results["limit"] is None else f", only {results['limit']} training examples"
    return f"GLUE dev sets x 100, {seeds}{limit}"


def write_report(folder: Path, results: Mapping[str, Any]) -> None:
    """Write report.md."""
    header, rows = table_cells(results)
    run = results["run"]
    lines = [
        f"# GLUE: {results['model']}",
        "",
        *markdown_table(header, rows),
        "",
        f"{_title(results)}. {_explained(results)}",
        "",
        *(f"**Warning: {warning}**\n" for warning in results["warnings"]),
        "## What was chosen on dev",
        "",
        *markdown_table(*_choices(results)),
        "",
        "Train: examples to learn from; chance: what the best single answer to everything would get.",
        "",
        *_tsne_lines(results),
        *(_speed_lines(results) if results["speed"] is not None else []),
        *_submission_lines(results),
        "",
        f"- Method: {', '.join(results['methods'])}; protocol: {results['protocol']}",
        *([] if results["teacher"] is None else [f"- Teacher: {results['teacher']}"]),
        *record_lines(run),
        "",
        "Each run's course (metrics.jsonl), answers on dev (predictions/) and settings (run.json) are in its folder "
        "`TASK/lr-...-epochs-...-seed-...`, each task's best model in `TASK/best`.",
        "",
    ]
    write_text(folder / "report.md", "\n".join(lines))


def _explained(results: Mapping[str, Any]) -> str:
    return (
        "The settings with the best mean over seeds were chosen on the same dev sets, as papers do, so the scores are "
        "somewhat too high for unseen examples. Embedding: the token embedding; transformer: the layers; params: these "
        "and positions, norms and pooler, without the classifier."
    )


def _choices(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    header = ["task", "learning rate", "epochs", "seeds", "best run", "metrics over the seeds", "train", "chance"]
    rows = [
        [
            name,
            f"{task['learning_rate']:g}",
            str(task["epochs"]),
            ", ".join(map(str, task["seeds"])),
            task["best_run"],
            "; ".join(
                f"{column} {metric} {spread(value, 2)}"
                for column, metrics in task["dev"].items()
                for metric, value in metrics.items()
            ),
            f"{task['examples']['train']:,}",
            f"{task['chance']:.1f}",
        ]
        for name, task in results["tasks"].items()
    ]
    return header, rows


def _speed_lines(results: Mapping[str, Any]) -> list[str]:
    header = ["", "latency, one sequence", "batch", "sequences/s", "speed-up"]
    rows = [
        [
            role,
            *(
                f"{1000 * speed[kind]['median']:.1f} ms ({1000 * speed[kind]['iqr']:.1f})"
                for kind in ("latency", "batch")
            ),
            f"{speed['throughput']:,.1f}",
            f"{speed['speedup']:.2f}x",
        ]
        for role, speed in results["speed"].items()
    ]
    asked = results["speed_asked"]
    said = (
        f"Batches of {asked['batch_size']} x {asked['length']} tokens on {asked['hardware']}; "
        "medians, and in brackets their interquartile ranges."
    )
    return ["## Speed", "", *markdown_table(header, rows), "", said, ""]


def _tsne_lines(results: Mapping[str, Any]) -> list[str]:
    figures = {name: task["tsne"] for name, task in results["tasks"].items() if task.get("tsne") is not None}
    if not figures:
        return []
    said = [
        f"{name}, {figure['examples']} examples:\n\n![t-SNE of {name}]({figure['file']})\n"
        for name, figure in figures.items()
    ]
    return ["## A layer's output by t-SNE (KroneckerBERT Figure 4)", "", *said]


def _submission_lines(results: Mapping[str, Any]) -> list[str]:
    files = [file for task in results["tasks"].values() for file in task["predictions"]]
    without = [name for name in results["tasks"] if not results["tasks"][name]["predictions"]]
    lines = [f"For the GLUE server (zip them together): {', '.join(f'`{file}`' for file in files)}."] if files else []
    if without:
        lines.append(f"No test file was there for {', '.join(without)}, so nothing to send to the GLUE server.")
    missing = [name for name in TASKS if name not in results["tasks"]]
    if files and missing:
        lines.append(f"It wants all tasks at once; not run: {', '.join(missing)}.")
    return lines
