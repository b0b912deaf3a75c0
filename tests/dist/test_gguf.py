"""A teacher in a GGUF file: ranks dequantize it once, and train as from the folder that comes of it."""

import json
from pathlib import Path

from llmdistill.embedded import locate

from gguf_model import write_gguf
from support import largest_difference


def test_a_run_of_two_ranks_is_that_of_the_dequantized_folder(trained, tiny_teacher, launch, settings, tmp_path):
    file = write_gguf(tiny_teacher, tmp_path / "tiny.gguf", "Q8_0")
    run = tmp_path / "run"
    words = (*settings, "--method", "kd", "--scoring.models", "[]")
    done = launch(*words, "--teacher.model", str(file), "--output_dir", str(run), ranks=2)
    assert done.stderr.count("tiny.gguf: dequantizing 8 bits (Q8_0), once; kept in ") == 1
    assert f"{file}, " in done.stdout
    assert "parameters, dequantized from 8 bits (Q8_0)" in done.stdout
    record = json.loads((run / "metrics.json").read_text())["run"]
    assert record["teacher_origin"] == "dequantized from 8 bits (Q8_0)"
    assert "Made from: tiny.gguf, dequantized from 8 bits (Q8_0)" in (run / "student" / "README.md").read_text()
    folder = locate(str(file))  # made by the run
    again = trained("--method", "kd", "--scoring.models", "[]", "--teacher.model", str(folder), ranks=2)
    assert largest_difference(run, Path(again)) == 0
