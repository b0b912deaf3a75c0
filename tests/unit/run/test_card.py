"""What the card of a run's student tells of the run."""

from __future__ import annotations

import json

from huggingface_hub import ModelCard


def test_a_run_tells_its_scores_data_and_command(finished):
    metrics = json.loads((finished / "metrics.json").read_text())
    card = ModelCard.load(finished / "student" / "README.md")
    trained = next(line for line in card.text.splitlines() if line.startswith("| trained |"))
    assert trained in (finished / "report.md").read_text(encoding="utf-8")
    assert f"{metrics['student']['params']:,}" in trained
    assert "examples" in next(line for line in card.text.splitlines() if line.startswith("- Data:"))
    assert metrics["run"]["versions"]["torch"] in card.text
    assert str(finished.parent) not in (finished / "student" / "README.md").read_text(encoding="utf-8")
    assert "README.md" not in json.loads((finished / "student" / "manifest.json").read_text())["files"]
