"""The points of a grid and the choice among them, against a naive count."""

import random
import statistics

import pytest

from llmdistill.config import RunConfig
from llmdistill.studies.trials import Result, Trial, choose, may_be_best

CONFIG = RunConfig(ds_config="zero2.json", output_dir="runs/x")


def result(name, seed, score):
    trial = Trial(name, {"name": name}, seed, CONFIG)
    return Result(trial, None, "failed") if score is None else Result(trial, {"score": score})


def score(each):
    return each.metrics["score"]


@pytest.mark.parametrize("seed", range(30))
def test_the_best_mean_over_seeds_is_chosen(seed):
    draw = random.Random(seed)
    names, seeds = ["p", "q", "r", "s"][: draw.randint(1, 4)], range(draw.randint(1, 3))
    # Few different scores, so that there are ties; some trials fail.
    table = {(name, number): draw.choice([None, 1.0, 2.0, 3.0]) for name in names for number in seeds}
    order = sorted(table, key=lambda _: draw.random())
    found = choose([result(*key, table[key]) for key in order], score)
    ended = {name: [table[key] for key in order if key[0] == name and table[key] is not None] for name in names}
    most = max(map(len, ended.values()))
    if most == 0:
        assert found is None
        return
    first = dict.fromkeys(name for name, number in order if table[name, number] is not None)
    whole = [name for name in first if len(ended[name]) == most]
    best = max(whole, key=lambda name: statistics.fmean(ended[name]))
    assert found.settings == {"name": best}
    assert [score(each) for each in found.results] == ended[best]
    assert found.best is next(each for each in found.results if score(each) == max(ended[best]))


@pytest.mark.parametrize(
    ("scores", "leaders"),
    [
        ([50.0, 60.0], [("p", 2)]),
        ([50.0, 60.0, 1.0], [("q", 1), ("p", 2)]),
        ([50.0, 60.0, 70.0, 1.0], [("p", 2)]),
        ([50.0, 60.0, 70.0, 80.0], [("q", 2)]),
        ([50.0, None, 70.0, 80.0], [("p", 1), ("q", 2)]),
    ],
)
def test_trials_that_may_yet_be_the_best(scores, leaders):
    keys = [(name, seed) for name in "pqrs" for seed in (1, 2)]
    results = [result(*key, value) for key, value in zip(keys, scores, strict=False)]
    found = may_be_best(results, score, 2)
    assert [(each.trial.title, each.trial.seed) for each in found] == leaders
