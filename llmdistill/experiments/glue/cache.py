"""What a run has left: a finished one is not run again, and one of other settings is not mistaken for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmdistill.experiments.glue.grid import Grid, Trial, may_be_best
from llmdistill.files import new_folder, write_json

MODEL = "model"
CHOSEN = "glue.json"
"""In the folder of a task's best model: which run it is of."""


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
