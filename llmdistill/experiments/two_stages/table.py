"""Writes the table of the second stage (KroneckerBERT Table 6): on the terminal, as report.md and as report.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from llmdistill.files import write_json
from llmdistill.report.spread import count_seeds, over_seeds, show_seeds
from llmdistill.report.tables import Texts, print_table, write_page

TEACHER = "teacher"
"""The row of the run's own teacher, which is fine-tuned if no fine-tuned teacher is given."""


class Row(NamedTuple):
    """The texts of a row in the table."""

    title: str
    pretraining: str
    """The training in the first stage."""
    finetuning: str
    """The training in the second stage."""


ROWS: dict[str, Row] = {
    TEACHER: Row("teacher", "", "labels"),
    "no_kd": Row("no KD in stage 2", "distilled", "labels"),
    "no_pretraining": Row("no stage 1", "none", "distilled"),
    "two_stages": Row("both stages", "distilled", "distilled"),
}
"""The rows in the order of the table."""


def collect(results: Mapping[str, Mapping[str, Any]], figures: Mapping[str, Any], *, run: str) -> dict[str, Any]:
    """Return the rows as plain JSON values.

    Args:
        results: the results of eval/glue.py for each row.
        figures: the t-SNE figure of each task; empty without t-SNE.
        run: the run's folder.
    """
    found = {
        row: {
            **ROWS[row]._asdict(),
            "params": each["params"]["model"]["total"],
            "dev": {column: metrics for task in each["tasks"].values() for column, metrics in task["dev"].items()},
            "average": each["averages"]["model"]["plain"],
        }
        for row, each in results.items()
    }
    taught = next((each for each in results.values() if each["teacher"] is not None), None)
    if TEACHER not in found and taught is not None:
        found[TEACHER] = _given_teacher(taught)
    last = list(results.values())[-1]
    columns = [
        {"task": name, "column": column, "metric": task["metric"], "train": task["examples"]["train"]}
        for name, task in last["tasks"].items()
        for column in task["dev"]
    ]
    return {
        "name": run,
        "columns": columns,
        "rows": {row: found[row] for row in ROWS if row in found},
        "figures": dict(figures),
        "seeds": max(len(task["seeds"]) for task in last["tasks"].values()),
        "limit": last["limit"],
        "own_teacher": TEACHER in results,
        "warnings": list(dict.fromkeys(warning for each in results.values() for warning in each["warnings"])),
        "run": last["run"],
    }


def _given_teacher(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a teacher that was already fine-tuned: one model per task, with unknown seeds."""
    dev = {
        column: {metric: over_seeds([value]) for metric, value in metrics.items()}
        for task in results["tasks"].values()
        for column, metrics in task["teacher"]["dev"].items()
    }
    return {
        **ROWS[TEACHER]._asdict(),
        "params": results["params"]["teacher"]["total"],
        "dev": dev,
        "average": results["averages"]["teacher"]["plain"],
    }


def table_cells(table: Mapping[str, Any]) -> Texts:
    """Return the header and the rows as text."""
    columns = table["columns"]
    averaged = len({column["task"] for column in columns}) > 1
    header = ["", "stage 1", "stage 2", "params"]
    header += [f"{column['column']} {column['metric']} ({column['train']:,})" for column in columns]
    rows = []
    for row in table["rows"].values():
        cells = [row["title"], row["pretraining"], row["finetuning"], f"{row['params']:,}"]
        cells += [show_seeds(row["dev"][column["column"]][column["metric"]]) for column in columns]
        rows.append([*cells, f"{row['average']:.1f}"] if averaged else cells)
    return [*header, "average"] if averaged else header, rows


def print_rows(table: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the table on the terminal."""
    print_table(f"Dev sets x 100, {count_seeds(table['seeds'])}", *table_cells(table), left=range(3), console=console)


def write_rows(folder: Path, table: Mapping[str, Any]) -> None:
    """Write report.md and report.json."""
    write_json(folder / "report.json", table)
    teacher = ""
    if TEACHER in table["rows"]:
        teacher = (
            " The teacher was fine-tuned by the same settings, and of its seeds the best one taught."
            if table["own_teacher"]
            else " The teacher is the one that was given."
        )
    average = " The average is that of the tasks' first metrics." if "average" in table_cells(table)[0] else ""
    figures = [
        f"{task}: {figure['examples']} examples, {_layers(figure)}\n\n![t-SNE of {task}]({figure['file']})\n"
        for task, figure in table["figures"].items()
    ]
    write_page(
        folder / "report.md",
        f"Two stages: {table['name']}",
        table_cells(table),
        legend=f"Dev sets x 100, {count_seeds(table['seeds'])}; in brackets the number of training examples. "
        f"Distilled: the terms of the method, labels: these alone.{teacher}{average} The settings with the best mean "
        "over seeds were chosen on the same dev sets, as papers do. Params: without the classifier.",
        warnings=table["warnings"],
        sections=["## A layer's output by t-SNE", "", *figures] if figures else [],
        record=table["run"],
        closing="Each row has a folder with its own report, and the best model of each task in `TASK/best` there.",
    )


def _layers(figure: Mapping[str, Any]) -> str:
    """Describe the layer of each model in the plot and the silhouette of the classes in this layer."""
    said = []
    for title, model in figure["models"].items():
        apart = (
            ""
            if model["silhouette"] is None
            else f" (silhouette of the classes {round(model['silhouette'], 2) + 0.0:.2f})"
        )
        said.append(f"{title} layer {model['layer']}{apart}")
    return ", ".join(said)
