from __future__ import annotations

import statistics

import pytest

from llmdistill.config.glue import GlueConfig
from llmdistill.experiments.glue.grid import Grid, Point, choose, grid_of, may_be_best
from llmdistill.report.spread import spread

GRID = Grid(learning_rates=(1e-5, 2e-5), epochs=(3, 5), seeds=(1, 2))


def grid(task: str = "RTE", **settings) -> Grid:
    return grid_of(GlueConfig(model="m", **settings), task)


def test_makd_s_protocol() -> None:
    found = grid(protocol="makd")
    assert found.learning_rates == (1.0e-5, 2.3e-5, 3.5e-5, 4.8e-5)
    assert len(found.trials()) == 20
    assert len({trial.seed for trial in found.trials()}) == 5


def test_minilmv2_s_protocol() -> None:
    found = grid(protocol="minilmv2")
    assert found.learning_rates == (1e-5, 1.5e-5, 2e-5, 3e-5, 5e-5)
    assert (found.epochs, len(found.seeds)) == ((3, 5, 10), 4)
    assert found.shared() == {"batch_size": 32, "max_length": 128, "warmup_ratio": 0.1, "weight_decay": 0.01}
    assert grid("CoLA", protocol="minilmv2").epochs == (25,)
    assert grid("CoLA", protocol="makd").epochs == (3,)
    assert grid("CoLA", protocol="minilmv2", epochs=[2]).epochs == (2,)


def test_kroneckerbert_s_protocol() -> None:
    found = grid(protocol="kroneckerbert")
    assert found.learning_rates == (5e-5, 1e-4, 5e-4)
    assert (found.epochs, found.seeds, found.batch_size) == ((5, 10, 15), (1,), 32)
    assert grid("CoLA", protocol="kroneckerbert").epochs == (15, 20, 30)


def test_given_settings_win_over_the_protocol() -> None:
    given = {"batch_size": 8, "max_length": 64, "warmup_ratio": 0.0, "weight_decay": 0.0}
    found = grid(learning_rates=[1e-3], epochs=[1, 2], seeds=[0], **given)
    assert found == Grid(learning_rates=(1e-3,), epochs=(1, 2), seeds=(0,), **given)
    assert found.trials() == [Point(1e-3, 1, 0), Point(1e-3, 2, 0)]


def test_cells_have_folders_of_their_own() -> None:
    assert Point(2e-5, 3, 1).name == "lr-2e-05-epochs-3-seed-1"
    trials = grid(protocol="minilmv2").trials()
    assert len({trial.name for trial in trials}) == len(trials) == 60


def scores(*values: float) -> dict[Point, float]:
    return dict(zip(GRID.trials(), values, strict=False))


def test_the_best_mean_is_chosen_not_the_best_run() -> None:
    choice = choose(scores(90, 10, 60, 70, 1, 2, 64, 65), GRID)
    assert (choice.learning_rate, choice.epochs, choice.best) == (1e-5, 5, Point(1e-5, 5, 2))
    assert choice.trials() == [Point(1e-5, 5, 1), Point(1e-5, 5, 2)]


def test_of_equals_the_first_is_chosen() -> None:
    choice = choose(scores(*[50] * 8), GRID)
    assert choice.best == Point(1e-5, 3, 1)


def test_models_that_may_yet_be_the_best() -> None:
    first, second, third = Point(1e-5, 3, 1), Point(1e-5, 3, 2), Point(1e-5, 5, 1)
    assert may_be_best(scores(50), GRID) == {first}
    assert may_be_best(scores(50, 60), GRID) == {second}
    assert may_be_best(scores(50, 60, 1), GRID) == {second, third}
    assert may_be_best(scores(50, 60, 1, 2), GRID) == {second}
    assert may_be_best(scores(50, 60, 70, 1), GRID) == {second}
    assert may_be_best(scores(50, 60, 70, 80), GRID) == {Point(1e-5, 5, 2)}


def test_mean_and_sample_standard_deviation() -> None:
    values = [1.0, 2.0, 4.0]
    assert spread(values).to_dict() == {"mean": pytest.approx(7 / 3), "std": pytest.approx(statistics.stdev(values))}
    assert spread([5.0]).to_dict() == {"mean": 5.0, "std": 0.0}
