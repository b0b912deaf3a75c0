"""Two ranks over gloo: data are read and tokenized once, and a stream is shared."""

from __future__ import annotations

import json

import pytest

from support import logged

STREAMED = ("--data.streaming", "true", "--data.shuffle_buffer", "100", "--data.bucket_steps", "2")


def test_a_stream_that_two_ranks_share_is_that_of_one(trained) -> None:
    alone, shared = (logged(trained(*STREAMED, ranks=ranks), "loss") for ranks in (1, 2))
    assert len(alone) == 5
    assert shared == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_a_malformed_row_is_said_once(launch, settings, tmp_path, streaming: str) -> None:
    data = tmp_path / "bad.jsonl"
    rows = [json.dumps({"instruction": f"Count {n}.", "output": "a b"}) for n in range(30)]
    data.write_text("\n".join([*rows, '{"instruction": "Count."}']), encoding="utf-8")
    given = ("--data.train", str(data), "--data.streaming", streaming, "--data.shuffle_buffer", "2")
    done = launch(*settings, "--ds_config", "zero2", "--output_dir", str(tmp_path / "run"), *given, ranks=2, code=2)
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert said == [f"error: {data}:31: the key \"output\" is missing (there are ['instruction']); add it"]


def test_two_ranks_leave_one_set_of_tokens(launch, settings, tmp_path) -> None:
    cache = tmp_path / "cache"
    given = ("--data.cache_dir", str(cache), "--train.steps", "1")
    launch(*settings, "--ds_config", "zero2", "--output_dir", str(tmp_path / "run"), *given, ranks=2)
    [folder] = (cache / "instructions").iterdir()
    made = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert set(made) == {"meta.json", "manifest.json", "0.arrow"}
    launch(*settings, "--ds_config", "zero2", "--output_dir", str(tmp_path / "again"), *given, ranks=1)
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == made, "another run uses them again"
