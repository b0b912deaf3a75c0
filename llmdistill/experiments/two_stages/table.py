"""Writes the table of the second stage (KroneckerBERT Table 6): on the terminal, as report.md and as report.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from llmdistill.experiments.fine_tuning.results import shown_metrics
from llmdistill.files import write_json
from llmdistill.report.pages import write_page
from llmdistill.report.spread import count_seeds, over_seeds, show_seeds
from llmdistill.report.tables import TitledTable, print_table

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
    """Return the rows of the results and the t-SNE figure of each task as plain JSON values; `run` is a folder."""
    found = {
        row: {
            **ROWS[row]._asdict(),
            "params": each["params"]["model"]["total"],
            "dev": {column: metrics for task in each["tasks"].values() for column, metrics in task["dev"].items()},
            "average": each["averages"]["model"]["plain"],
        }
        for row, each in results.items()
    }
    with_teacher = next((each for each in results.values() if each["teacher"] is not None), None)
    if TEACHER not in found and with_teacher is not None:
        found[TEACHER] = _given_teacher(with_teacher)
    last = list(results.values())[-1]
    columns = [
        {"task": name, "column": column, "metric": metric, "train": task["examples"]["train"]}
        for name, task in last["tasks"].items()
        for column in task["dev"]
        for metric in shown_metrics(task, column)
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


def stages_table(table: Mapping[str, Any]) -> TitledTable:
    """Return the rows as texts."""
    columns = table["columns"]
    averaged = len({column["task"] for column in columns}) > 1
    header = ["", "stage 1", "stage 2", "params"]
    header += [f"{column['column']} {column['metric']} ({column['train']:,})" for column in columns]
    rows = []
    for row in table["rows"].values():
        cells = [row["title"], row["pretraining"], row["finetuning"], f"{row['params']:,}"]
        cells += [show_seeds(row["dev"][column["column"]][column["metric"]]) for column in columns]
        rows.append([*cells, f"{row['average']:.1f}"] if averaged else cells)
    title = f"Dev sets x 100, {count_seeds(table['seeds'])}"
    return TitledTable(title, [*header, "average"] if averaged else header, rows)


def show_rows(folder: Path, table: Mapping[str, Any]) -> None:
    """Write report.md and report.json, and print the table."""
    write_json(folder / "report.json", table)
    shown = stages_table(table)
    write_page(
        folder / "report.md",
        "two_stages.md.j2",
        **table,
        title=f"Two stages: {table['name']}",
        legend=shown.title,
        table=shown,
        record=table["run"],
    )
    print_table(*shown, left=range(3))
