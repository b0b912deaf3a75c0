"""Writes the table at the end of a run: on the terminal, as report.md, report.html and metrics.json."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmdistill.files import write_json
from llmdistill.messages import fold, print_result
from llmdistill.report.drawings import save_drawings
from llmdistill.report.metrics_log import Log, read_metrics_log, term_names
from llmdistill.report.nearness import NATS, Measured, nearness_bars, nearness_scores, nearness_sentence
from llmdistill.report.pages import write_page
from llmdistill.report.panels import plot_terms
from llmdistill.report.plots import Drawing, is_line, mean_curve, method_styles
from llmdistill.report.record import make_record
from llmdistill.report.samples import read_samples
from llmdistill.report.tables import TitledTable, print_table
from llmdistill.report.weighting import draw_weighting, read_weighting
from llmdistill.runtime.distributed import World
from llmdistill.tasks.base import VALID, ScoreTable

MODELS = {"teacher": "teacher", "untrained": "untrained", "student": "trained"}
"""Rows of the table: key in metrics.json -> the name in the table."""


def execution_record(decoding: str, log: Log, teacher_params: int) -> dict[str, Any]:
    """Return how a run went: command, hardware, versions, time, decoding, teacher size and training cost."""
    world = World.current()
    own = {"decoding": decoding, "teacher_params": teacher_params, "training": training_cost(log)}
    return {**make_record(world.command, world.size), **own}


def training_cost(log: Log) -> dict[str, float] | None:
    """Return the tokens, the median tokens per second and the peak memory of the training; None without training."""
    rows = [row for row in log if "tokens" in row]  # others have a validation alone
    if not rows:
        return None
    return {
        "tokens": sum(row["tokens"] for row in rows),
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in rows),
        "peak_memory_bytes": max(row["peak_memory_bytes"] for row in rows),
    }


def describe_best(record: Mapping[str, Any]) -> str:
    """Return which student a run with `train.keep_best` kept, from the record of its best validation."""
    return f"of step {record['step']:,}, the best validation ({record['metric']} {record['value']:.4g})"


def draw_training(log: Log) -> list[Drawing]:
    """Return the plot of the loss and its terms over the steps; none without two steps."""
    names = term_names(log)
    keys = ["loss", *(["valid_loss"] if log and "valid_loss" in log[-1] else []), *(names if len(names) > 1 else [])]
    curves = {key: curve for key in keys if is_line(curve := mean_curve([log], key))}
    if not curves:
        return []
    caption = "The loss of the training, its terms, and valid_loss, the loss on the validation set, if there is one."
    figure = plot_terms(curves, method_styles(["run"])["run"])
    return [Drawing("curves", "Loss over the steps", caption, figure)]


def fill_scores(scores: ScoreTable, nearness: Measured, log: Log) -> ScoreTable:
    """Return the table; if there was no set to score models on, their distance from the teacher or the last loss."""
    if scores.columns:
        return scores
    distance = nearness_scores(nearness)
    if distance is not None:
        return replace(
            distance, rows={key: distance.rows.get(key, [""] * len(distance.columns)) for key in scores.rows}
        )
    loss = _find_last_loss(log)
    if loss is None:
        return scores
    rows = {key: [loss[1] if key == "student" else ""] for key in scores.rows}
    return replace(scores, columns=[loss[0]], rows=rows, legend=f"No set to score on; the {loss[0]} is the last.")


def _find_last_loss(log: Log) -> tuple[str, str] | None:
    """Return the name and the last value of the validation loss, or else of the training loss; None without both."""
    for key, name in (("valid_loss", "validation loss"), ("loss", "training loss")):
        values = [row[key] for row in log if key in row and row["step"] > 0]
        if values:
            return name, f"{values[-1]:.4g}"
    return None


def model_table(metrics: Mapping[str, Any], scores: ScoreTable) -> TitledTable:
    scored = {key: metrics[key] for key in MODELS if key in metrics}
    training = metrics["run"]["training"]
    generates = any("generation_tokens_per_second" in model for model in scored.values())
    rows = []
    for key, model in scored.items():
        speed = f"{training['tokens_per_second']:,.0f}" if training is not None and key == "student" else ""
        sizes = [f"{model['params']:,}", f"{model['params'] / metrics['run']['teacher_params']:.0%}"]
        generation = [f"{model['generation_tokens_per_second']:,.0f}"] if generates else []
        rows.append([MODELS[key], *sizes, *scores.rows[key], speed, *generation])
    header = ["model", "params", "size", *scores.columns, "train tok/s", *(["gen tok/s"] if generates else [])]
    return TitledTable(scores.title, header, rows)


def mean_scores(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean ROUGE-L of each scored model over its sets; empty where models have other scores."""
    scores = {key: (metrics.get(key) or {}).get("rougeL") for key in MODELS}
    return {key: statistics.fmean(by_set.values()) for key, by_set in scores.items() if by_set}


def verdict(metrics: Mapping[str, Any], scores: ScoreTable) -> str:
    """Say in one sentence how much of the teacher the student keeps."""
    student, teacher_params, means = metrics.get("student"), metrics["run"]["teacher_params"], mean_scores(metrics)
    if student is None:
        return ""
    text = f"With {student['params'] / teacher_params:.0%} of the teacher's parameters the student "
    if means.get("teacher") and "student" in means:
        text += f"keeps {means['student'] / means['teacher']:.0%} of its ROUGE-L: {means['student']:.1f} of "
        text += f"{means['teacher']:.1f}"
        return text + (f", and {means['untrained']:.1f} before training." if "untrained" in means else ".")
    if scores.columns[:1] == [NATS] and "student" in metrics["nearness"]:
        return text + nearness_sentence(metrics["nearness"])
    if scores.columns:
        values = {key: scores.rows[key][0] for key in ("student", "teacher", "untrained") if scores.rows.get(key)}
        told = [f"{MODELS[key]} {value}" for key, value in values.items() if value]
        return f"{text}has, in {scores.columns[0]}: {', '.join(told)}."
    return text + "was trained, and not scored."


def bars(metrics: Mapping[str, Any]) -> dict[str, list[tuple[str, float, str]]]:
    """Return the bars of the page's first picture: for each title the models, the share of the longest and a label."""
    means, distances = mean_scores(metrics), nearness_bars(metrics.get("nearness", {}), MODELS)
    if len(means) < 2 and not distances:
        return {}
    params = {key: metrics[key]["params"] for key in (means if len(means) > 1 else MODELS) if key in metrics}
    sizes = [(MODELS[key], count / max(params.values()), f"{count:,}") for key, count in params.items()]
    if len(means) < 2:
        return {"parameters": sizes, f"{NATS} from the teacher (less is better)": distances}
    rouge = [(MODELS[key], mean / 100, f"{mean:.1f}") for key, mean in means.items()]
    return {"parameters": sizes, "ROUGE-L, mean of the sets": rouge}


def finish_report(folder: Path, metrics: dict[str, Any], scores: ScoreTable) -> None:
    """Write report.md, report.html and metrics.json, and print the table of the scored models."""
    log = read_metrics_log(folder)
    if not any(key in metrics for key in MODELS):
        write_json(folder / "metrics.json", metrics)
        loss = _find_last_loss(log)
        ended = "" if loss is None else f" The {loss[0]} at the end is {loss[1]}."
        print_result(f"No model was to be scored; the run is in {folder}.{ended}")
        return
    table = model_table(metrics, scores)
    predictions = folder / "predictions"
    sets = list(metrics.get("asked", {}).get("tests") or []) or [VALID]
    # The second table of the page, with its legend: the distance from the teacher, where the first has scores.
    distance = nearness_scores(metrics.get("nearness", {})) if scores.columns[:1] != [NATS] else None
    distances: tuple[TitledTable, str] | None = None
    if distance is not None:
        rows = [[MODELS[key], *cells] for key, cells in distance.rows.items()]
        distances = TitledTable("Distance from the teacher", ["model", *distance.columns], rows), distance.legend
    context = {
        "title": folder.name,
        "verdict": verdict(metrics, scores),
        "bars": bars(metrics),
        "table": table,
        "legend": scores.legend,
        "distance": distances,
        "drawings": save_drawings(folder, [*draw_training(log), *draw_weighting(read_weighting(folder))]),
        "samples": [
            *read_samples({key: predictions / key for key in MODELS}, sets),
            *read_samples({key: folder / "answers" / key for key in MODELS}, ["held_out"]),
        ],
        "labels": MODELS,
        "has_answers": predictions.is_dir(),
        "warnings": metrics["warnings"],
        "kept": describe_best(metrics["kept"]) if "kept" in metrics else None,
        "record": metrics["run"],
    }
    for kind in ("md", "html"):
        write_page(folder / f"report.{kind}", f"run.{kind}.j2", **context)
    write_json(folder / "metrics.json", metrics)  # last: a folder with this file is finished
    print_table(*table)
    student = f"The student is in {folder / 'student'}, the" if (folder / "student").is_dir() else "The"
    pages = f"{student} table in {folder / 'report.md'}, and with curves and answers in report.html beside it."
    print_result(fold(pages))
