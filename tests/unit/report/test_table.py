"""The table at the end of a run."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from llmdistill.report.table import print_table, training_speed, write_report


@pytest.fixture
def metrics():
    def model(params, score, **more):
        return {
            "params": params,
            "rougeL": {"seen": score, "unseen": score / 2, "skills": score / 3},
            "generation_tokens_per_second": 1234.5,
            **more,
        }

    return {
        "teacher": model(1_220_224, 98.4),
        "untrained": model(521_152, 35.3),
        "student": model(521_152, 97.3, training_tokens_per_second=3585.2),
        "run": {
            "command": "deepspeed llmdistill/train.py",
            "hardware": "1 rank",
            "versions": {"torch": "2.13.0"},
            "decoding": "greedy",
            "finished": "2026-11-21T00:00:00+00:00",
        },
    }


def test_table_fits_a_terminal_of_eighty_columns(metrics):
    out = io.StringIO()
    print_table(metrics, Console(file=out, width=80))
    text = out.getvalue()
    for cell in (
        "teacher",
        "untrained",
        "trained",
        "1,220,224",
        "521,152",
        "43%",
        "98.4",
        "48.6",
        "3,585",
    ):
        assert cell in text
    assert "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80


def test_report_is_markdown_and_json(tmp_path, metrics):
    write_report(tmp_path, metrics)
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics
    report = (tmp_path / "report.md").read_text()
    assert "| trained | 521,152 | 43% | 97.3 | 48.6 | 32.4 | 3,585 | 1,234 |" in report
    assert "`deepspeed llmdistill/train.py`" in report


def test_training_speed_is_the_median_row(tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert training_speed(file) is None
    file.write_text("".join(json.dumps({"step": n, "tokens_per_second": v}) + "\n" for n, v in enumerate([1, 100, 7])))
    assert training_speed(file) == 7
