from __future__ import annotations

from typing import Any

import pytest

from llmdistill.config.tasks import FineTuningConfig
from llmdistill.experiments.fine_tuning.protocols import SHARED, Protocol, metric_of, protocol_of
from llmdistill.experiments.fine_tuning.study import TaskStudy


def protocol(task: str = "RTE", **settings) -> Protocol:
    return protocol_of(FineTuningConfig(model="m", **settings), task)


def test_makd_s_protocol() -> None:
    found = protocol(protocol="makd")
    assert found.learning_rates == [1.0e-5, 2.3e-5, 3.5e-5, 4.8e-5]
    assert found.num_trials == 20
    assert len(set(found.seeds)) == 5


def test_minilm_s_protocol() -> None:
    found = protocol("QNLI", protocol="minilm")
    assert found.learning_rates == [2e-5, 3e-5, 4e-5, 5e-5]
    assert (found.epochs, len(found.seeds), found.batch_size) == ([3, 4, 5], 4, 32)
    for task in ("CoLA", "RTE", "MRPC"):
        assert max(protocol(task, protocol="minilm").epochs) == 10


@pytest.mark.parametrize(
    ("name", "metric"),
    [("makd", "f1"), ("minilm", "accuracy"), ("minilmv2", "accuracy"), ("kroneckerbert", "accuracy"), ("custom", "f1")],
)
def test_settings_for_mrpc_are_chosen_by_the_metric_of_the_paper(name: Any, metric: str, tmp_path) -> None:
    study = TaskStudy(config=FineTuningConfig(model="m", protocol=name), task="MRPC", root=tmp_path, teacher=None)
    assert {trial.config.data.task.metric for trial in study.trials()} == {metric}
    assert metric_of(name, "WNLI") == "accuracy"
    assert metric_of(name, "MNLI") == "accuracy"


def test_minilmv2_s_protocol() -> None:
    found = protocol(protocol="minilmv2")
    assert found.learning_rates == [1e-5, 1.5e-5, 2e-5, 3e-5, 5e-5]
    assert (found.epochs, len(found.seeds)) == ([3, 5, 10], 4)
    assert [getattr(found, key) for key in SHARED] == [32, 128, 0.1, 0.01]
    assert protocol("CoLA", protocol="minilmv2").epochs == [25]
    assert protocol("CoLA", protocol="makd").epochs == [3]
    assert protocol("CoLA", protocol="minilmv2", epochs=[2]).epochs == [2]


def test_kroneckerbert_s_protocol() -> None:
    found = protocol(protocol="kroneckerbert")
    assert found.learning_rates == [5e-5, 1e-4, 5e-4]
    assert (found.epochs, found.seeds, found.batch_size) == ([5, 10, 15], [1], 32)
    assert protocol("CoLA", protocol="kroneckerbert").epochs == [15, 20, 30]


def test_given_settings_win_over_the_protocol() -> None:
    given = {"batch_size": 8, "max_length": 64, "warmup_ratio": 0.0, "weight_decay": 0.0}
    found = protocol(learning_rates=[1e-3], epochs=[1, 2], seeds=[0], **given)
    assert found == Protocol(learning_rates=[1e-3], epochs=[1, 2], seeds=[0], **given)


def test_each_trial_has_its_settings_and_a_folder_of_its_own(tmp_path) -> None:
    config = FineTuningConfig(model="m", protocol="minilmv2", run_settings={"train.compile": True})
    trials = TaskStudy(config=config, task="RTE", root=tmp_path, teacher=None).trials()
    assert len({trial.folder for trial in trials}) == len(trials) == 60
    assert [trial.seed for trial in trials[:5]] == [1, 2, 3, 4, 1]
    first = trials[0]
    assert first.folder == tmp_path / "RTE/lr-1e-05-epochs-3-seed-1"
    assert first.settings == {"train.learning_rate": 1e-5, "train.epochs": 3}
    train = first.config.train
    assert (train.learning_rate, train.epochs, train.global_batch_size, train.compile) == (1e-5, 3, 32, True)
    assert (first.config.method, first.config.seed, first.config.data.max_length) == ("sft", 1, 128)
