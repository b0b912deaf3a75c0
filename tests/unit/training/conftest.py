"""A tiny run that the tests of this folder damage and plant code in, through the main job in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import save_decoder

from llmdistill.report import table
from llmdistill.train import main


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than the rest of a tiny run."""
    patch.setattr(table, "save_drawings", lambda *_: [])


@pytest.fixture(autouse=True)
def _no_plots(monkeypatch) -> None:
    draw_nothing(monkeypatch)


@pytest.fixture(scope="package")
def base(tmp_path_factory) -> Path:
    """A tiny teacher and its data."""
    folder = tmp_path_factory.mktemp("damage")
    save_decoder(folder / "teacher", num_hidden_layers=2, tie_word_embeddings=False)
    rows = [{"instruction": f"Where is {n}?", "input": "", "output": f"In town {n % 3}."} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="package")
def settings(base: Path) -> list[str]:
    """The arguments of the run, without its folder."""
    rows = str(base / "rows.jsonl")
    of_data = ["--data.train", rows, "--data.valid", rows, "--data.tests", "{}", "--data.max_length", "60"]
    of_student = ["--student.factorize.rank", "4", "--student.factorize.weighting", "none"]
    of_training = ["--train.steps", "3", "--train.global_batch_size", "4", "--train.save_every", "1"]
    of_training += ["--train.keep_checkpoints", "3"]
    of_scoring = ["--scoring.limit", "1", "--scoring.decoding", "greedy", "--scoring.models", "[untrained, student]"]
    teacher = ["--teacher.model", str(base / "teacher"), "--teacher.dtype", "fp32", "--method", "kd"]
    others = ["--data.max_prompt_length", "50", "--train.log_every", "1", "--ds_config", "ds_configs/zero1.json"]
    return [*of_data, *of_student, *of_training, *of_scoring, *teacher, *others]


@pytest.fixture(scope="package")
def finished(base, settings) -> Path:
    """The finished run; a test that changes it puts it back."""
    run = base / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE", raising=False)
        draw_nothing(patch)
        assert main([*settings, "--output_dir", str(run)]) == 0
    return run


@pytest.fixture
def trains(settings, capsys, caplog, monkeypatch) -> Callable[..., tuple[int, str]]:
    """Trains in a folder; returns the exit code and all that was said of mistakes."""

    def train(run: Path, *more: str) -> tuple[int, str]:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        capsys.readouterr()
        caplog.clear()
        code = main([*settings, "--output_dir", str(run), *more])
        return code, capsys.readouterr().err + caplog.text

    return train
