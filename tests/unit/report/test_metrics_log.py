"""The rows of a training's log, as they were written and damaged."""

from __future__ import annotations

import pytest
import torch

from llmdistill.errors import UserError
from llmdistill.report.metrics_log import read_metrics_log
from llmdistill.run.log import RunLog
from llmdistill.runtime.distributed import World

ROWS = [b'{"step": 1, "loss": 2.5}', b'{"step": 2, "loss": NaN}']
WORLD = World(rank=0, size=1, device=torch.device("cpu"))


@pytest.mark.parametrize("bad", [b"", b"[1]", b"\xff", b'{"step": "1"}', b"[" * 100_000])
def test_a_bad_line_is_named(tmp_path, bad):
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([ROWS[0], bad, ROWS[1]]) + b"\n")
    said = r"metrics\.jsonl:2: not a row of a training's log; remove the line, and the run goes on$"
    with pytest.raises(UserError, match=said):
        read_metrics_log(tmp_path)
    with pytest.raises(UserError, match=said):
        RunLog(tmp_path, start=1, steps=3, world=WORLD)


def test_a_resumed_run_drops_later_rows_and_what_a_kill_left_of_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*ROWS, b'{"st']))
    RunLog(tmp_path, start=1, steps=3, world=WORLD)
    assert (tmp_path / "metrics.jsonl").read_bytes() == ROWS[0] + b"\n"
    (tmp_path / "metrics.jsonl").write_bytes(b"not a log")
    RunLog(tmp_path, start=0, steps=3, world=WORLD)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_columns_stay_apart_at_large_losses(tmp_path, capsys):
    values = {"loss": 161234.5, "hidden": 1.5e-10, "tokens_per_second": 1234567.0, "padding_share": 0.1}
    log = RunLog(tmp_path, start=0, steps=123456, world=WORLD)
    log.row(123400, {**values, "teacher_share": 0.5}, 60.0)
    header, row = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header == ["step", "loss", "hidden", "tok/s", "padding", "teacher", "eta"]
    assert row == ["123400/123456", "1.612e+05", "1.5e-10", "1,234,567", "10%", "50%", "01:00"]
