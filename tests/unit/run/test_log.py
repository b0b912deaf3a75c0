"""What a run leaves in TensorBoard beside its log."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from llmdistill.report.metrics_log import read_metrics_log


def events(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of each scalar, by its tag."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    found = defaultdict(list)
    for file in sorted((run / "tensorboard").iterdir()):
        for event in loader.LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                found[value.tag].append((event.step, value.simple_value))
    return dict(found)


def test_tensorboard_has_the_figures_of_the_log_and_nothing_else(finished):
    rows = read_metrics_log(finished)
    found = events(finished)
    columns = {name for row in rows for name in row} - {"step"}
    assert found.keys() == {f"train/{name}" for name in columns}
    for name in columns:
        expected = [(row["step"], row[name]) for row in rows if name in row]
        assert [step for step, _ in found[f"train/{name}"]] == [step for step, _ in expected]
        assert [value for _, value in found[f"train/{name}"]] == pytest.approx([value for _, value in expected])
