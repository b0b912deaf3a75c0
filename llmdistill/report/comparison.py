"""Writes the report of a comparison of methods: results.json, costs.json, report.md, report.html and the plots."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from rich.console import Console

from llmdistill.files import write_json, write_text
from llmdistill.report import plots
from llmdistill.report.results import (
    COSTS,
    TEACHER,
    UNTRAINED,
    Comparison,
    Run,
    Scores,
    best_figures,
    describe_finding,
    difference_to_teacher,
    score_row,
)
from llmdistill.report.spread import plus_minus
from llmdistill.report.tables import print_table
from llmdistill.report.wording import (
    binary_size,
    commands,
    duration,
    figure,
    folder_link,
    markdown,
    markdown_code,
    settings_text,
    signed,
    thousands,
)


def write_comparison(folder: Path, comparison: Comparison) -> None:
    """Write results.json, costs.json, report.md, report.html and plots/ into a folder.

    results.json contains no time, date or absolute path, so two equal comparisons give the same file.
    """
    scores = [score_row(row, comparison.sets) for row in comparison.rows]
    write_json(folder / "results.json", _without_prefix(_results(comparison, scores), folder))
    write_json(folder / "costs.json", {each.row.name: _costs(each) for each in scores})
    drawn = _draw(folder / "plots", comparison, scores)
    context = _context(comparison, scores, drawn)
    environment = _environment()
    for name in ("report.html", "report.md"):
        template = environment.get_template(name.replace("report", "comparison") + ".j2")
        write_text(folder / name, template.render(context))


def _results(comparison: Comparison, scores: Sequence[Scores]) -> dict[str, Any]:
    teacher = _named(scores, TEACHER)
    methods = {each.row.name: _result(each, difference_to_teacher(each, teacher)) for each in scores}
    return {"methods": methods, "sets": list(comparison.sets), "warnings": list(comparison.warnings)}


def _result(scores: Scores, difference: float | None) -> dict[str, Any]:
    rouge_l: dict[str, Any] | None = None
    if scores.average is not None:
        rouge_l = {name: {"mean": each.mean, "std": each.std} for name, each in scores.sets.items()}
        rouge_l["average"] = scores.average.mean
    return {
        "params": scores.row.params,
        "rougeL": rouge_l,
        "average_std": None if scores.average is None else scores.average.std,
        "difference_to_teacher": difference,
        "seeds": [run.seed for run in scores.ended],
        "settings": None if scores.settings is None else dict(scores.settings),
        "valid_rougeL": None if scores.valid is None else scores.valid.mean,
        "runs": [run.folder for run in scores.ended],
        "failed": [{"seed": run.seed, "folder": run.folder, "error": reason(run)} for run in scores.failed],
    }


def _costs(scores: Scores) -> dict[str, Any]:
    sizes = {"params": scores.row.params, "checkpoint_bytes": scores.row.checkpoint_bytes}
    return {**sizes, **{key: scores.cost(key) for key in COSTS}}


def _without_prefix(value: Any, folder: Path) -> Any:
    """Return the value with every path below the folder made relative to the folder."""
    if isinstance(value, str):
        return value.replace(f"{folder.resolve()}/", "").replace(f"{folder}/", "")
    if isinstance(value, dict):
        return {key: _without_prefix(item, folder) for key, item in value.items()}
    return [_without_prefix(item, folder) for item in value] if isinstance(value, list) else value


def reason(run: Run) -> str:
    """Return the reason why a run has no scores."""
    return run.error if run.error is not None else "it ended without scores"


def _named(scores: Sequence[Scores], name: str) -> Scores | None:
    return next((each for each in scores if each.row.name == name), None)


def _context(comparison: Comparison, scores: Sequence[Scores], drawn: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return the variables of the templates."""
    teacher = _named(scores, TEACHER)
    sizes = [Run(method=p.method, seed=0, folder=p.folder, command=p.command) for p in comparison.sizes]
    labels = {row.name: row.label for row in comparison.rows}
    runs = [run for row in comparison.rows for run in (*row.runs, *row.trials)]
    failed = [run for run in runs if run.error is not None] + [
        run for each in scores for run in each.failed if run.error is None
    ]
    return {
        "comparison": comparison,
        "scores": scores,
        "finding": describe_finding(scores, comparison.sets),
        "best": best_figures(scores, comparison.sets),
        "differences": {each.row.name: difference_to_teacher(each, teacher) for each in scores},
        "best_difference": max(
            (
                round(d, 1)
                for each in scores
                if each.trained and (d := difference_to_teacher(each, teacher)) is not None
            ),
            default=None,
        ),
        "teacher_params": None if teacher is None else teacher.row.params,
        "plots": drawn,
        "labels": labels,
        "failed": _once([*failed, *comparison.failures]),
        "made": _once([*runs, *comparison.failures, *sizes]),
        "paper_sets": list(dict.fromkeys(name for row in (comparison.paper or {}).values() for name in row)),
    }


def _once(runs: Sequence[Run]) -> list[Run]:
    """Return the runs without duplicates; the chosen grid point's first seed may be both a trial and a run."""
    return list({(run.folder, run.command, run.error): run for run in reversed(runs)}.values())[::-1]


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("llmdistill", "report/templates"),
        autoescape=select_autoescape(enabled_extensions=("html.j2",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: list[Callable[..., Any]] = [figure, signed, thousands, binary_size, duration, settings_text, reason]
    filters += [markdown, markdown_code, folder_link, commands]
    environment.filters.update({each.__name__: each for each in filters})
    return environment


def _draw(folder: Path, comparison: Comparison, scores: Sequence[Scores]) -> list[dict[str, str]]:
    """Draw every plot that has data, and remove the plots of an earlier report that are not drawn again."""
    styles = plots.method_styles([row.name for row in comparison.rows], plain=(TEACHER, UNTRAINED))
    drawn = []
    for name, title, caption, made in _figures(comparison, scores, styles):
        svg = plots.inline_svg(plots.save_plot(made, folder, name), html.escape(title, quote=True))
        drawn.append({"name": name, "title": title, "caption": caption, "svg": Markup(svg)})
    kept = {item["name"] for item in drawn}
    for file in folder.glob("*.*") if folder.is_dir() else ():
        ours = file.stem in ("scores", "learning_curves", "size") or file.stem.startswith("terms_")
        if ours and file.suffix in (".png", ".svg") and file.stem not in kept:
            file.unlink()
    return drawn


def _figures(
    comparison: Comparison, scores: Sequence[Scores], styles: Mapping[str, plots.Style]
) -> list[tuple[str, str, str, Any]]:
    """Return the name, title, caption and figure of every plot."""
    figures: list[tuple[str, str, str, Any]] = []
    teacher = _named(scores, TEACHER)
    level = None if teacher is None or teacher.average is None else teacher.average.mean
    dots = [
        plots.Dots(each.row.label, styles[each.row.name], each.average.mean, each.average.std, each.average.values)
        for each in scores
        if each.trained and each.average is not None
    ]
    untrained = _named(scores, UNTRAINED)
    start = untrained.average.mean if untrained is not None and untrained.average is not None else None
    # The untrained student scores far lower; on a common scale, the differences between methods would not be visible.
    left_out = "" if start is None else f" The untrained student, at {start:.1f}, is left out."
    if dots:
        caption = f"Mean over seeds, with its standard deviation; the small strokes are the seeds.{left_out}"
        figures.append(("scores", "Scores", caption, plots.plot_scores(dots, level)))
    figures += _curve_figures(scores, styles)
    by_method: dict[str, list[tuple[int, float]]] = {}
    for point in (point for point in comparison.sizes if point.method != UNTRAINED):
        by_method.setdefault(point.method, []).append((point.params, point.average))
    if by_method:
        lines = [(row.label, styles[row.name], by_method[row.name]) for row in comparison.rows if row.name in by_method]
        caption = (
            "Students of several sizes, trained with the settings chosen for the main table; untrained ones left out."
        )
        figures.append(("size", "Quality against size", caption, plots.plot_size(lines, level)))
    return figures


def _curve_figures(scores: Sequence[Scores], styles: Mapping[str, plots.Style]) -> list[tuple[str, str, str, Any]]:
    """Return the plots of the learning curves, and of each method's loss terms if its loss has several terms."""
    figures: list[tuple[str, str, str, Any]] = []
    captions = {
        "valid_loss": (
            "validation loss",
            "Loss on the validation set, mean over seeds; the band goes from the lowest to the highest seed.",
        ),
        "loss": (
            "training loss",
            "There is no validation loss. The training losses of two methods are different sums, "
            "so that their heights cannot be compared. The band goes from the lowest to the highest seed.",
        ),
    }
    for key, (label, caption) in captions.items():
        found = [(each.row, plots.mean_curve([run.history for run in each.ended], key)) for each in scores]
        curves = [(row.label, styles[row.name], curve) for row, curve in found if curve is not None]
        if curves:
            figures.append(("learning_curves", "Learning curves", caption, plots.plot_curves(curves, label)))
            break
    for each in scores:
        histories = [run.history for run in each.ended]
        terms = {term: curve for term in each.row.terms if (curve := plots.mean_curve(histories, term)) is not None}
        if len(each.row.terms) > 1 and terms:
            name = f"terms_{re.sub(r'[^A-Za-z0-9_.-]', '_', each.row.name)}"
            caption = (
                "Each term of the training loss, mean over seeds, with a band from the lowest to the highest seed."
            )
            title = f"Terms of the loss: {each.row.label}"
            figures.append((name, title, caption, plots.plot_terms(terms, styles[each.row.name])))
    return figures


def print_comparison(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the results.json of a comparison on the terminal, as mean ± standard deviation over seeds."""
    sets, rows = results["sets"], []
    for name, method in results["methods"].items():
        scores = method["rougeL"]
        if scores is None:
            rows.append([name, "", *("failed" for _ in sets), ""])
            continue
        cells = [plus_minus(scores[each]["mean"], scores[each]["std"]) for each in sets]
        rows.append([name, f"{method['params']:,}", *cells, plus_minus(scores["average"], method["average_std"])])
    terminal = console or Console()
    title = "ROUGE-L (0-100), mean ± standard deviation over seeds"
    print_table(title, ["method", "params", *sets, "average"], rows, console=terminal)
    for warning in results["warnings"]:
        terminal.print(f"WARNING: {warning}", style="bold yellow")
