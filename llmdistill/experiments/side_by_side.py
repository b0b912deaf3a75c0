"""The models of a command that puts several models side by side: folders, hub names, and the models of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmdistill.artifacts import read_record
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.files import file_name
from llmdistill.report.table import MODELS
from llmdistill.run.artifacts import METRICS_FILE, RUN_FILE


def named_models(references: Sequence[str]) -> dict[str, Path]:
    """Return the folder or hub name of each model, by the name of its row.

    The folder of a finished run stands for its teacher, its untrained student and its student; any other reference is a
    model, and its own name.

    Raises:
        UserError: two models would have the same name, or a run is not finished.
    """
    models: dict[str, Path] = {}
    for reference in references:
        for name, path in _models_of(reference).items():
            if name in models:
                raise UserError(f"--model: two models would both be called {name}; take two commands")
            models[name] = path
    return models


def _models_of(reference: str) -> dict[str, Path]:
    """Return the models that a reference stands for: those of a finished run, or the model itself."""
    path = locate(reference)
    record = read_record(path / RUN_FILE, remedy="name a model's folder instead of the run's")
    if record is None:
        return {reference: path}
    if not (path / METRICS_FILE).is_file():
        raise UserError(f"--model {reference}: the run in this folder is not finished; let it end, or name a model")
    config = record["config"]
    teacher = config["teacher"]["model"]
    untrained = path / "untrained" if (path / "untrained").is_dir() else config["student"]["model"]
    found = {"teacher": teacher, "untrained": untrained, "student": path / "student"}
    return {MODELS[role]: locate(str(each)) for role, each in found.items() if each is not None}


def default_folder(kind: str, reference: str) -> Path:
    """Return where results go if the user does not say: into the run, or beside the results of other models."""
    if (Path(reference) / RUN_FILE).is_file():
        return Path(reference) / kind
    return Path("runs") / kind / file_name(reference)
