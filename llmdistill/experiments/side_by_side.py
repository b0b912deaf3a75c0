"""Models that a suite runs side by side: what the user names, their kind, and the folder of the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmdistill.artifacts import RESULT_FILE, read_record
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.files import file_name, write_json
from llmdistill.models.configs import load_config
from llmdistill.models.families import is_causal
from llmdistill.report.pages import write_page
from llmdistill.report.plots import Drawing, save_plot
from llmdistill.report.table import MODELS
from llmdistill.report.tables import Texts
from llmdistill.run.artifacts import METRICS_FILE, RUN_FILE


def named_models(references: Sequence[str]) -> dict[str, Path]:
    """Return the folder or hub name of each model, by its name in reports.

    Args:
        references: models; the folder of a finished run stands for its teacher, its untrained student and its student,
            and NAME=REFERENCE for a model, or the student of a run, under that name.

    Raises:
        UserError: a run is not finished, or two models have the same name.
    """
    models: dict[str, Path] = {}
    for reference in references:
        for name, path in _models_of(reference).items():
            if name in models:
                raise UserError(
                    f"--model: {models[name]} and {path} would both be called {name}; write NAME=FOLDER for one of them"
                )
            models[name] = path
    return models


def _models_of(reference: str) -> dict[str, Path]:
    own, equals, named = reference.partition("=")
    if equals and own and named and not Path(reference).exists():
        found = _run_models(named)
        return {own: locate(named) if found is None else found[MODELS["student"]]}
    found = _run_models(reference)
    return {reference: locate(reference)} if found is None else found


def _run_models(reference: str) -> dict[str, Path] | None:
    """Return the models of a finished run by their names in reports; None if the reference is no run."""
    path = locate(reference)
    record = read_record(path / RUN_FILE, remedy="name a model's folder instead of the run's")
    if record is None:
        return None
    if not (path / METRICS_FILE).is_file():
        raise UserError(f"--model {reference}: the run in this folder is not finished; let it end, or name a model")
    config = record["config"]
    teacher = config["teacher"]["model"]
    untrained = path / "untrained" if (path / "untrained").is_dir() else config["student"]["model"]
    found = {"teacher": teacher, "untrained": untrained, "student": path / "student"}
    return {MODELS[role]: locate(str(each)) for role, each in found.items() if each is not None}


def check_kind(models: Mapping[str, Path], *, causal: bool, reason: str) -> None:
    """Raises UserError, which ends with the reason, for a model that is no decoder (causal) or no encoder."""
    for name, path in models.items():
        if is_causal(load_config(path)) != causal:
            raise UserError(f"--model: the {name} ({path}) is {'an encoder' if causal else 'a decoder'}, and {reason}")


def default_folder(kind: str, reference: str) -> Path:
    """Return where results go if the user does not say: into the run, or beside the results of other models."""
    if (Path(reference) / RUN_FILE).is_file():
        return Path(reference) / kind
    return Path("runs") / kind / file_name(reference)


def result_file(folder: Path, name: str) -> Path:
    """Return the file that keeps the results of a model."""
    return folder / file_name(name) / RESULT_FILE


def model_entries(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the kept results of each model as results.json has them, without what they were asked for."""
    return {name: {key: value for key, value in each.items() if key != "asked"} for name, each in scores.items()}


def write_results(
    folder: Path,
    results: Mapping[str, Any],
    *,
    title: str,
    legend: str,
    table: Texts,
    closing: str,
    template: str = "side_by_side.md.j2",
    drawings: Sequence[Drawing] = (),
    details: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write results.json, the drawings and report.md; return the results with their folder.

    `results` has `models`, `dtype` and `run`, and may have `warnings`; `details` are further facts of the report.
    """
    for drawing in drawings:
        save_plot(drawing.figure, folder, drawing.name)
    write_json(folder / "results.json", results)
    write_page(
        folder / "report.md",
        template,
        title=title,
        legend=legend,
        table=table,
        drawings=drawings,
        warnings=results.get("warnings", []),
        record=results["run"],
        models=results["models"],
        dtype=results["dtype"],
        details=details or {},
        closing=closing,
    )
    return {**results, "folder": str(folder)}
