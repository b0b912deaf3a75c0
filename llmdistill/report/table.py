"""The table at the end of a run: on the terminal, as report.md and as metrics.json."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from llmdistill.files import write_json, write_text
from llmdistill.report.metrics_log import FIGURES
from llmdistill.report.plots import mean_curve, method_styles, plot_terms, save_plot
from llmdistill.report.record import make_record
from llmdistill.runtime.distributed import World

_TEXT_TITLE = "The method's loss on the validation text"

MODELS = {"teacher": "teacher", "untrained": "untrained", "student": "trained"}
"""Rows of the table: key in metrics.json, and what a reader sees."""


def run_record(decoding: str, world: World, metrics_file: Path, teacher_params: int) -> dict[str, Any]:
    """What must stand beside a result: command, hardware, versions, time, sizes, and what the training cost."""
    return {
        **make_record(world.command, world.size),
        "decoding": decoding,
        "teacher_params": teacher_params,
        "training": training_cost(metrics_file),
    }


def training_cost(metrics_file: Path) -> dict[str, float] | None:
    """Tokens, tokens per second (median over the log's rows) and peak memory of a training; None without one."""
    rows = [row for row in _rows(metrics_file) if row["step"] > 0]
    if not rows:
        return None
    return {
        "tokens": sum(row["tokens"] for row in rows),
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in rows),
        "peak_memory_bytes": max(row["peak_memory_bytes"] for row in rows),
    }


def _rows(metrics_file: Path) -> list[dict[str, float]]:
    """The rows of the log, none where nothing was trained."""
    if not metrics_file.is_file():
        return []
    return [json.loads(line) for line in metrics_file.read_text(encoding="utf-8").splitlines()]


def chance_warnings(teacher: dict[str, Any]) -> list[str]:
    """The warning that a teacher's scores deserve, if any."""
    valid = teacher.get("valid")
    if valid is None or valid["above_chance"]:
        return []
    return [
        f"the teacher scores at chance on the validation set: ROUGE-L {valid['rougeL']:.1f}, where its answers score "
        f"{valid['chance']:.1f} against the references of other questions. Nothing can be learnt from it, and every "
        "comparison with it is meaningless: fine-tune it first (method sft), or check the format of its prompts"
    ]


def text_scores(metrics_file: Path, sizes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of a run on text, what stands in place of scores: the validation loss before and after, None without a set."""
    rows = _rows(metrics_file)
    losses = [row["valid_loss"] for row in rows if "valid_loss" in row]
    params = sizes["student_params"]
    scores: dict[str, dict[str, Any]] = {"teacher": {"params": sizes["teacher_params"], "valid_loss": None}}
    started = bool(rows) and rows[0]["step"] == 0
    scores["untrained"] = {"params": params, "valid_loss": losses[0] if started else None}
    if rows:
        scores["student"] = {"params": params, "valid_loss": losses[-1] if losses else None}
    return scores


def plot_training(metrics_file: Path) -> None:
    """Draw the loss and each of its terms over the steps beside the log: curves.png and curves.svg."""
    rows = _rows(metrics_file)
    if not rows:
        return
    names = [name for name in rows[-1] if name not in FIGURES]
    keys = ["loss", *(["valid_loss"] if "valid_loss" in rows[-1] else []), *(names if len(names) > 1 else [])]
    curves = {key: curve for key in keys if (curve := mean_curve([rows], key)) is not None}
    save_plot(plot_terms(curves, method_styles(["run"])["run"]), metrics_file.parent, "curves")


def _cells(metrics: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the models that were scored, as text."""
    scored = {label: metrics[key] for key, label in MODELS.items() if key in metrics}
    training = metrics["run"]["training"]
    if _is_text(metrics):
        trained_at = "" if training is None else f"{training['tokens_per_second']:,.0f}"
        return ["model", "params", "size", "validation loss", "train tok/s"], [
            [
                label,
                f"{model['params']:,}",
                f"{model['params'] / metrics['run']['teacher_params']:.0%}",
                "" if model["valid_loss"] is None else f"{model['valid_loss']:.4f}",
                trained_at if label == MODELS["student"] else "",
            ]
            for label, model in scored.items()
        ]
    sets = list(next(iter(scored.values()))["rougeL"])
    header = ["model", "params", "size", *sets, "train tok/s", "gen tok/s"]
    rows = []
    for label, model in scored.items():
        speed = training["tokens_per_second"] if training is not None and label == MODELS["student"] else None
        rows.append(
            [
                label,
                f"{model['params']:,}",
                f"{model['params'] / metrics['run']['teacher_params']:.0%}",
                *(f"{model['rougeL'][name]:.1f}" for name in sets),
                "" if speed is None else f"{speed:,.0f}",
                f"{model['generation_tokens_per_second']:,.0f}",
            ]
        )
    return header, rows


def _is_text(metrics: dict[str, Any]) -> bool:
    return any("valid_loss" in metrics.get(key, {}) for key in MODELS)


def finish_report(folder: Path, metrics: dict[str, Any]) -> None:
    """Write metrics.json, and report.md and the terminal's table of the models that were scored."""
    write_json(folder / "metrics.json", metrics)
    if not any(key in metrics for key in MODELS):
        print(f"No model was to be scored; the run is in {folder}.")
        return
    write_report(folder, metrics)
    print_table(metrics)
    student = f"The student is in {folder / 'student'}, the" if (folder / "student").is_dir() else "The"
    print(f"{student} table in {folder / 'report.md'}.")


def print_table(metrics: dict[str, Any], console: Console | None = None) -> None:
    """Print the table on the terminal."""
    header, rows = _cells(metrics)
    table = Table(
        title=_TEXT_TITLE if _is_text(metrics) else "ROUGE-L (0-100) on each set",
        title_justify="left",
        box=box.HORIZONTALS,
        pad_edge=False,
    )
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    (console or Console()).print(table)


def write_report(folder: Path, metrics: dict[str, Any]) -> None:
    """Write report.md into the run's folder."""
    header, rows = _cells(metrics)
    run = metrics["run"]
    lines = [
        f"# {folder.name}",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "|".join("---" if number == 0 else "---:" for number in range(len(header))) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        *(f"**Warning: {warning}**\n" for warning in metrics["warnings"]),
        _legend(metrics, header),
        "",
        f"- Command: `{run['command']}`",
        f"- Hardware: {run['hardware']}",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in run['versions'].items())}",
        f"- Finished: {run['finished']}",
        "",
        "The settings are in `run.json`, the course of the training in `metrics.jsonl` and `tensorboard/`"
        + ("." if _is_text(metrics) else ", every answer in `predictions/`."),
        "",
    ]
    write_text(folder / "report.md", "\n".join(lines))


def _legend(metrics: dict[str, Any], header: list[str]) -> str:
    if _is_text(metrics):
        return (
            "The validation loss is the method's own, so it says how far the student came and nothing between methods."
            "\n\n![Loss over the steps](curves.png)"
        )
    return (
        f"ROUGE-L on {', '.join(header[3:-2]) or 'no test set'}: F1 with stemming, best of the references, x 100; "
        f"decoding: {metrics['run']['decoding']}. Speeds are tokens per second of training and generation."
    )
