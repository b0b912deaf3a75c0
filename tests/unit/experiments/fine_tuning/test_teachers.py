from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from llmdistill.errors import UserError
from llmdistill.experiments.fine_tuning.protocols import teacher_of as find_teacher
from llmdistill.models.configs import load_config
from llmdistill.tasks.benchmark import named_benchmark

teacher_of = partial(find_teacher, key="--teacher")


def make(folder: Path, **config) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_teacher_of_a_task(tmp_path) -> None:
    make(tmp_path / "run/SST-2/best")
    assert teacher_of(str(tmp_path / "run"), "SST-2", ["SST-2", "RTE"]) == str(tmp_path / "run/SST-2/best")
    make(tmp_path / "bert-sst2")
    make(tmp_path / "bert-RTE")
    pattern = str(tmp_path / "bert-{task}")
    assert teacher_of(pattern, "SST-2", ["SST-2", "RTE"]) == str(tmp_path / "bert-sst2")
    assert teacher_of(pattern, "RTE", ["SST-2", "RTE"]) == str(tmp_path / "bert-RTE")
    assert teacher_of("somebody/bert-{task}", "SST-2", ["SST-2"]) == "somebody/bert-sst2"
    assert teacher_of(str(tmp_path / "bert-RTE"), "RTE", ["RTE"]) == str(tmp_path / "bert-RTE")


def test_teachers_that_are_none(tmp_path) -> None:
    make(tmp_path / "run/SST-2/best")
    with pytest.raises(UserError, match="no model for RTE"):
        teacher_of(str(tmp_path / "run"), "RTE", ["RTE"])
    make(tmp_path / "bert")
    with pytest.raises(UserError, match="one model, but 2 tasks"):
        teacher_of(str(tmp_path / "bert"), "RTE", ["RTE", "CoLA"])


@pytest.mark.parametrize(
    ("task", "said"),
    [("MNLI", "tells 2 classes apart, but MNLI has 3"), ("STS-B", r"STS-B has 1 \(a score\)")],
)
def test_a_teacher_must_know_the_classes(encoder, task, said) -> None:
    config = load_config(encoder)
    rte, key = named_benchmark("RTE")
    rte.check_fine_tuned(config, key, named="--teacher here")
    found, key = named_benchmark(task)
    with pytest.raises(UserError, match=f"--teacher here: it {said}|{said}"):
        found.check_fine_tuned(config, key, named="--teacher here")
    found.check_fine_tuned(found.fine_tuned(config, key), key, named="--teacher here")
