"""The table at the end of a run: on the terminal, as report.md and as metrics.json."""

from __future__ import annotations

import json
import platform
import statistics
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import llmdistill
from llmdistill.files import write_json, write_text

MODELS = {"teacher": "teacher", "untrained": "untrained", "student": "trained"}
"""Rows of the table: key in metrics.json, and what a reader sees."""


def describe_hardware(world_size: int) -> str:
    """This machine in a few words, as it stands beside results."""
    if torch.cuda.is_available():
        return f"{world_size} x {torch.cuda.get_device_name()}"
    threads = torch.get_num_threads() * world_size
    return f"{world_size} rank{'s' if world_size > 1 else ''} on {threads} CPU threads ({_cpu()})"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def run_record(decoding: str, world_size: int) -> dict[str, Any]:
    """What must stand beside a result: command, hardware, versions, time."""
    return {
        "command": _command(world_size),
        "hardware": describe_hardware(world_size),
        "versions": {
            "llmdistill": llmdistill.__version__,
            **{name: version(name) for name in ("torch", "deepspeed", "transformers")},
        },
        "decoding": decoding,
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _command(world_size: int) -> str:
    """What the user typed, as far as the launcher tells."""
    arguments = [word for word in sys.argv if not word.startswith("--local_rank")]
    return " ".join(["deepspeed", *(["--num_gpus", str(world_size)] if world_size > 1 else []), *arguments])


def training_speed(metrics_file: Path) -> float | None:
    """Tokens per second of training, the median over the rows of metrics.jsonl; None without any."""
    if not metrics_file.is_file():
        return None
    rows = [json.loads(line) for line in metrics_file.read_text(encoding="utf-8").splitlines()]
    return statistics.median(row["tokens_per_second"] for row in rows) if rows else None


def _cells(metrics: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The header and the rows, as text."""
    sets = list(metrics["teacher"]["rougeL"])
    header = ["model", "params", "size", *sets, "train tok/s", "gen tok/s"]
    rows = []
    for key, label in MODELS.items():
        model = metrics[key]
        training = model.get("training_tokens_per_second")
        rows.append(
            [
                label,
                f"{model['params']:,}",
                f"{model['params'] / metrics['teacher']['params']:.0%}",
                *(f"{model['rougeL'][name]:.1f}" for name in sets),
                "" if training is None else f"{training:,.0f}",
                f"{model['generation_tokens_per_second']:,.0f}",
            ]
        )
    return header, rows


def print_table(metrics: dict[str, Any], console: Console | None = None) -> None:
    """Print the table on the terminal."""
    header, rows = _cells(metrics)
    table = Table(
        title="Teacher, untrained student, trained student: ROUGE-L (0-100) on each set",
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
    """Write metrics.json and report.md into the run's folder."""
    write_json(folder / "metrics.json", metrics)
    header, rows = _cells(metrics)
    run = metrics["run"]
    lines = [
        f"# {folder.name}",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "|".join("---" if number == 0 else "---:" for number in range(len(header))) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        f"ROUGE-L on {', '.join(metrics['teacher']['rougeL']) or 'no test set'}: F1 with stemming, best of the "
        f"references, x 100; decoding: {run['decoding']}. Speeds are tokens per second of training and generation.",
        "",
        f"- Command: `{run['command']}`",
        f"- Hardware: {run['hardware']}",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in run['versions'].items())}",
        f"- Finished: {run['finished']}",
        "",
        "The settings are in `run.json`, the course of the training in `metrics.jsonl` and `tensorboard/`, "
        "every answer in `predictions/`.",
        "",
    ]
    write_text(folder / "report.md", "\n".join(lines))
