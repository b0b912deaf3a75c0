"""The report of a comparison of methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from llmdistill.files import byte_size
from llmdistill.report.drawings import draw_comparison
from llmdistill.report.pages import signed
from llmdistill.report.results import (
    CALIBRATION_COSTS,
    COSTS,
    TEACHER,
    Comparison,
    best_figures,
    describe_finding,
)
from llmdistill.report.score import PERPLEXITY, ROUGE_L, SCORES, Score
from llmdistill.report.study_report import StudyReport
from llmdistill.report.tables import TitledTable, count_seeds
from llmdistill.report.trials import TrialRow
from llmdistill.tasks.perplexity import show_perplexity


def comparison_report(folder: Path, comparison: Comparison) -> StudyReport:
    """Return the report of a comparison, in a folder: results.json, costs.json, report.md, report.html and plots/.

    results.json contains no time, date or absolute path, so two equal comparisons give the same file.
    """
    results: dict[str, Any] = _without_prefix(_make_results(comparison), folder)
    costs = {}
    for row in comparison.rows:
        checkpoint_costs: dict[str, Any] = {"params": row.params, "checkpoint_bytes": row.checkpoint_bytes}
        if row.checkpoint is not None:
            checkpoint_costs |= {
                "checkpoint_formats": dict(row.checkpoint.formats),
                "checkpoint_parts": dict(row.checkpoint.parts),
            }
        calibration = {} if row.calibration is None else {key: row.calibration[key] for key in CALIBRATION_COSTS}
        costs[row.key] = {**checkpoint_costs, **{key: row.cost(key) for key in COSTS}, **calibration}
    runs = [run for row in comparison.rows for run in (*row.runs, *row.trials)]
    failed = [run for run in runs if run.error is not None]
    failed += [run for row in comparison.rows for run in row.failed if run.error is None]
    failed_sizes = [run for row in comparison.sizes for run in row.failed]
    sizes = [row for row in comparison.sizes if row.ended]
    differences = {row.key: comparison.difference(row) for row in comparison.rows}
    trained = [differences[row.key] for row in comparison.rows if row.trained]
    titles_by_checkpoint: dict[str, list[str]] = {}
    for row in comparison.rows:
        if row.checkpoint is not None:
            text = f"{byte_size(row.checkpoint.size)} of {row.checkpoint.summary}"
            titles_by_checkpoint.setdefault(text, []).append(row.title)
    context = {
        "comparison": comparison,
        "finding": " ".join(filter(None, (describe_finding(comparison.rows, comparison.sets), comparison.limits))),
        "best": best_figures(comparison.rows, comparison.sets, comparison.texts),
        "columns": [*comparison.sets, *comparison.texts],
        "differences": differences,
        "best_difference": comparison.score.best(difference for difference in trained if difference is not None),
        "teacher_params": None if comparison.teacher is None else comparison.teacher.params,
        "labels": {
            **{row.name: row.label for row in comparison.rows},
            **{row.key: row.title for row in comparison.rows},
        },
        "failed": _unique([*failed, *failed_sizes]),
        "sizes": sizes,
        "checkpoints": {", ".join(titles): text for text, titles in titles_by_checkpoint.items()},
        "several_seeds": any(len(row.ended) > 1 for row in comparison.rows),
        "perplexity": any(row.perplexity is not None for row in comparison.rows),
        "generates": any(row.cost("generation_tokens_per_second") is not None for row in comparison.rows),
        "calibrated": any(row.calibration is not None for row in comparison.rows),
        "made": _unique([*runs, *failed_sizes, *(row.ended[0] for row in sizes)]),
        "paper_sets": list(dict.fromkeys(name for row in (comparison.paper or {}).values() for name in row)),
    }
    return StudyReport(
        folder=folder,
        results=results,
        further={"costs.json": costs},
        template="comparison",
        kinds=("html", "md"),
        values=context,
        drawings=draw_comparison(comparison),
        table=_table(results),
        notes=[Text(f"WARNING: {warning}", style="bold yellow") for warning in results["warnings"]],
        closing=f"The report is {folder / 'report.html'}, also report.md, results.json and costs.json beside it.",
        failed=bool(failed or failed_sizes),
    )


def _make_results(comparison: Comparison) -> dict[str, Any]:
    methods = {}
    for row in comparison.rows:
        scores: dict[str, Any] | None = None
        if row.average is not None:
            by_set = {name: spread.to_dict() for name, spread in row.by_set.items()}
            scores = {**by_set, "average": row.average.mean}
        methods[row.key] = {
            "params": row.params,
            row.score.key: scores,
            **({"perplexity": row.perplexity and row.perplexity.to_dict()} if row.score is ROUGE_L else {}),
            **({"texts": {name: spread.to_dict() for name, spread in row.by_text.items()}} if row.by_text else {}),
            "average_std": None if row.average is None else row.average.std,
            "difference_to_teacher": comparison.difference(row),
            "seeds": [run.seed for run in row.ended],
            "settings": None if row.settings is None else dict(row.settings),
            f"valid_{row.score.key}": None if row.valid is None else row.valid.mean,
            "runs": [run.folder for run in row.ended],
            "failed": [{"seed": run.seed, "folder": run.folder, "error": run.reason} for run in row.failed],
        }
    starts = [
        {
            **{
                "start": student.start,
                "size": student.size,
                "params": student.params,
                "untrained": student.average,
            },
            **{key: student.weighting.get(key) for key in ("tokens", "predicted_loss", "held_out")},
            "run": student.folder,
        }
        for student in comparison.untrained
    ]
    counted = {comparison.score.counted: comparison.examples, "texts": comparison.texts}
    counts = {
        key: {name: {"scored": scored, "total": total} for name, (scored, total) in by_name.items()}
        for key, by_name in counted.items()
        if by_name
    }
    sets = {"score": comparison.score.key, "sets": list(comparison.sets), **counts}
    return {"methods": methods, **({"starts": starts} if starts else {}), **sets, "warnings": list(comparison.warnings)}


def _without_prefix(value: Any, folder: Path) -> Any:
    """Return the value with every path below the folder made relative to the folder."""
    if isinstance(value, str):
        return value.replace(f"{folder.resolve()}/", "").replace(f"{folder}/", "")
    if isinstance(value, dict):
        return {key: _without_prefix(item, folder) for key, item in value.items()}
    return [_without_prefix(item, folder) for item in value] if isinstance(value, list) else value


def _unique(runs: Sequence[TrialRow]) -> list[TrialRow]:
    """Return the runs without duplicates; the chosen grid point's first seed may be both a trial and a run."""
    return list({(run.folder, run.command, run.error): run for run in reversed(runs)}.values())[::-1]


def _format_spread(spread: Mapping[str, Any], score: Score, several: bool) -> str:
    return score.show(spread["mean"]) + (f" ± {score.show(spread['std'])}" if several else "")


def _table(results: Mapping[str, Any]) -> TitledTable:
    """Return the table of the terminal, with the standard deviation of several seeds."""
    score = SCORES[results["score"]]
    sets, texts, rows, most = results["sets"], results.get("texts", {}), [], 0
    references = ["perplexity"] if score is ROUGE_L else []
    for method_name, method in results["methods"].items():
        scores = method[score.key]
        if scores is None:
            rows.append([method_name, "failed", *("" for _ in ("to teacher", *references, *sets, *texts, "params"))])
            continue
        most, several = max(most, len(method["seeds"])), len(method["seeds"]) > 1
        average = _format_spread({"mean": scores["average"], "std": method["average_std"]}, score, several)
        to_teacher = "–" if method_name == TEACHER else signed(method["difference_to_teacher"], score.show)
        measured = [show_perplexity((method[name] or {}).get("mean")) for name in references]
        rest = [_format_spread(scores[name], score, several) for name in sets]
        rest += [_format_spread(method["texts"][name], PERPLEXITY, several) for name in texts]
        rows.append([method_name, average, to_teacher, *measured, *rest, f"{method['params']:,}"])
    counts = results.get("examples", {})
    heads = [f"{name} (n = {counts[name]['scored']})" if name in counts else name for name in sets]
    heads += [f"{name} (perplexity)" for name in texts]
    header = ["method", "average", "to teacher", *references, *heads, "params"]
    return TitledTable(f"{score.title}, {count_seeds(most)}", header, rows)
