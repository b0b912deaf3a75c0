"""Two ranks over gloo share a stream."""

from __future__ import annotations

import json

import pytest

from support import logged

STREAMED = ("--data.streaming", "true", "--data.shuffle_buffer", "100", "--data.bucket_steps", "2")


def test_a_stream_that_two_ranks_share_is_that_of_one(trained) -> None:
    alone, shared = (logged(trained(*STREAMED, ranks=ranks), "loss") for ranks in (1, 2))
    assert len(alone) == 5
    assert shared == pytest.approx(alone, rel=1e-5)


def test_a_malformed_row_of_a_stream_is_said_once(launch, settings, tmp_path) -> None:
    data = tmp_path / "bad.jsonl"
    rows = [json.dumps({"instruction": f"Count {n}.", "output": "a b"}) for n in range(30)]
    data.write_text("\n".join([*rows, '{"instruction": "Count."}']), encoding="utf-8")
    given = ("--data.train", str(data), "--data.streaming", "true", "--data.shuffle_buffer", "2")
    done = launch(*settings, "--ds_config", "zero2", "--output_dir", str(tmp_path / "run"), *given, ranks=2, code=2)
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert said == [f"error: {data}:31: the key \"output\" is missing (there are ['instruction']); add it"]
