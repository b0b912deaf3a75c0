from typing import get_args

from llmdistill.config.tasks import FineTuningConfig, ProtocolName
from llmdistill.papers.fine_tuning.protocols import FineTuningProtocol, metric_of, protocol_of, teacher_of
from llmdistill.papers.fine_tuning.task_study import TaskStudy


def test_settings_for_mrpc_are_chosen_by_the_metric_of_the_paper(tmp_path) -> None:
    for name in get_args(ProtocolName):
        study = TaskStudy(
            config=FineTuningConfig(model="m", protocol=name), task="MRPC", folder=tmp_path / "MRPC", teacher=None
        )
        metric = "f1" if name in ("makd", "custom") else "accuracy"
        assert {trial.config.data.task.metric for trial in study.trials()} == {metric}
        assert metric_of(name, "WNLI") == metric_of(name, "MNLI") == "accuracy"


def test_given_settings_win_over_the_protocol() -> None:
    given = {"batch_size": 8, "max_length": 64, "warmup_ratio": 0.0, "weight_decay": 0.0}
    given |= {"learning_rates": [1e-3], "epochs": [1, 2], "seeds": [0]}
    assert protocol_of(FineTuningConfig(model="m", **given), "RTE") == FineTuningProtocol(**given)


def test_given_settings_win_over_a_recipe(tmp_path) -> None:
    """XSum's recipe has 500 steps of warm-up, which a share replaces."""
    config = FineTuningConfig(model="m", protocol="minilm", warmup_ratio=0.2, epochs=[1], batch_size=8)
    (trial,) = TaskStudy(config=config, task="XSum", folder=tmp_path / "XSum", teacher=None).trials()
    train = trial.config.train
    assert (train.epochs, train.global_batch_size, train.warmup_ratio, train.warmup_steps) == (1, 8, 0.2, 0)
    assert trial.config.data.task.writing.no_repeat_ngram_size == 3


def test_the_teacher_of_a_task(tmp_path) -> None:
    for name in ("run/SST-2/best", "bert-sst2", "bert-RTE"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    for path, task, tasks, found in (
        (tmp_path / "run", "SST-2", ["SST-2", "RTE"], tmp_path / "run/SST-2/best"),
        (tmp_path / "bert-{task}", "SST-2", ["SST-2", "RTE"], tmp_path / "bert-sst2"),
        (tmp_path / "bert-{task}", "RTE", ["SST-2", "RTE"], tmp_path / "bert-RTE"),
        ("somebody/bert-{task}", "SST-2", ["SST-2"], "somebody/bert-sst2"),
    ):
        assert teacher_of(str(path), task, tasks, key="--teacher") == str(found)
