"""What a finished run leaves for people and other programs, and the first line that it prints."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from huggingface_hub import ModelCard

from llmdistill.report.metrics_log import read_metrics_log
from llmdistill.train import main


def test_the_card_tells_the_scores_the_data_and_the_command(finished):
    metrics = json.loads((finished / "metrics.json").read_text())
    card = ModelCard.load(finished / "student" / "README.md")
    trained = next(line for line in card.text.splitlines() if line.startswith("| trained |"))
    assert trained in (finished / "report.md").read_text(encoding="utf-8")
    assert f"{metrics['student']['params']:,}" in trained
    assert "examples" in next(line for line in card.text.splitlines() if line.startswith("- Data:"))
    assert metrics["run"]["versions"]["torch"] in card.text
    assert str(finished.parent) not in (finished / "student" / "README.md").read_text(encoding="utf-8")
    assert "README.md" not in json.loads((finished / "student" / "manifest.json").read_text())["files"]


def test_tensorboard_has_the_figures_of_the_log_and_nothing_else(finished):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    found, logged = defaultdict(list), defaultdict(list)
    for file in sorted((finished / "tensorboard").iterdir()):
        for event in loader.LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                found[value.tag].append((event.step, value.simple_value))
    for row in read_metrics_log(finished):
        for name in row.keys() - {"step"}:
            logged[f"train/{name}"].append((row["step"], pytest.approx(row[name])))
    assert found == logged


def test_the_first_line_says_which_recipe_is_used(settings, finished, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main([*settings, "--output_dir", str(finished)]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "Recipe      none: the defaults of llmdistill, and what the command line says"
    assert others
