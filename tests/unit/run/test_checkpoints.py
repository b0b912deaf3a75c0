"""The checkpoints of a run's folder."""

from __future__ import annotations

from llmdistill.run.checkpoints import last_step


def test_last_step_reads_what_deepspeed_wrote(tmp_path):
    assert last_step(tmp_path) == 0
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step-120")
    assert last_step(tmp_path) == 120
