from __future__ import annotations

import pytest

from llmdistill.experiments.glue.cache import drop_models, is_kept, keep_best
from llmdistill.experiments.glue.grid import Grid, Trial

SETTINGS = {"seed": 1, "kd": {"ratio": 0.5}, "betas": (0.9, 0.999)}
GRID = Grid(learning_rates=(1e-5, 2e-5), epochs=(3,), seeds=(1, 2))


def make_models(folder) -> None:
    for trial in GRID.trials():
        (folder / trial.name / "model").mkdir(parents=True, exist_ok=True)
        (folder / trial.name / "model/weights").write_text(trial.name)


def models(folder) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("*/model"))


def test_models_that_cannot_be_the_best_are_dropped(tmp_path) -> None:
    make_models(tmp_path)
    trials = GRID.trials()
    drop_models(tmp_path, dict(zip(trials, (50, 60, 70), strict=False)), GRID)
    assert models(tmp_path) == sorted(trial.name for trial in trials[1:])
    drop_models(tmp_path, dict(zip(trials, (50, 60, 70, 10), strict=True)), GRID)
    assert models(tmp_path) == [trials[1].name]


@pytest.mark.parametrize("keep_models", [True, False])
def test_the_best_model_takes_the_former_one_s_place(tmp_path, keep_models) -> None:
    make_models(tmp_path)
    best, first, second = tmp_path / "best", Trial(1e-5, 3, 1), Trial(2e-5, 3, 2)
    assert not is_kept(best, first, SETTINGS)
    for trial in (first, second):
        keep_best(tmp_path, best, trial, SETTINGS, keep_models=keep_models)
        assert (best / "weights").read_text() == trial.name
        assert is_kept(best, trial, SETTINGS)
        assert (trial.name in models(tmp_path)) == keep_models
    assert not is_kept(best, first, SETTINGS)
    assert not is_kept(best, second, {**SETTINGS, "seed": 2})
