"""What a run has left: a finished one is not run again, and one of other settings is not mistaken for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmdistill.errors import UserError
from llmdistill.experiments.glue.grid import Grid, Trial, may_be_best
from llmdistill.files import new_folder, write_json

RESULT = "result.json"
MODEL = "model"
CHOSEN = "glue.json"
"""In the folder of a task's best model: which run it is of."""


def read_result(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """A finished run's result; None where it is not finished.

    Raises:
        UserError: it was run with other settings, or its file is damaged.
    """
    file = folder / RESULT
    if not file.is_file():
        return None
    try:
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{file}: not valid JSON; remove the folder, and the run is done again") from error
    before, now = _flat(result["settings"]), _flat(json.loads(json.dumps(settings)))
    different = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if different:
        key = different[0]
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        raise UserError(
            f"{folder}: this run was done with other settings: {key} was {before.get(key)} and is now {now.get(key)}"
            f"{more}; give another --output_dir, or the same settings to go on"
        )
    return result


def write_result(folder: Path, settings: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Mark a run as finished."""
    write_json(folder / RESULT, {"settings": settings, **result})


def drop_models(folder: Path, scores: Mapping[Trial, float], grid: Grid) -> None:
    """Remove the models of a task's runs that can no longer be the best."""
    for trial in scores.keys() - may_be_best(scores, grid):
        shutil.rmtree(folder / trial.name / MODEL, ignore_errors=True)


def is_kept(best: Path, trial: Trial, settings: Mapping[str, Any]) -> bool:
    """Whether the best model's folder holds that of this run."""
    file = best / CHOSEN
    if not file.is_file():
        return False
    kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return kept == json.loads(json.dumps({"run": trial.name, "settings": settings}))


def keep_best(folder: Path, best: Path, trial: Trial, settings: Mapping[str, Any], *, keep_models: bool) -> None:
    """Take over a run's model as the task's best."""
    source = folder / trial.name / MODEL
    shutil.rmtree(best, ignore_errors=True)
    with new_folder(best) as partial:
        shutil.copytree(source, partial, dirs_exist_ok=True)
        write_json(partial / CHOSEN, {"run": trial.name, "settings": settings})
    if not keep_models:
        shutil.rmtree(source)


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {
        key: leaf
        for name, part in value.items()
        for key, leaf in _flat(part, f"{prefix}.{name}" if prefix else name).items()
    }
