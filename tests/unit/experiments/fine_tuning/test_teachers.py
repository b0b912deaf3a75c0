from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from llmdistill.experiments.fine_tuning.protocols import teacher_of as find_teacher

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
