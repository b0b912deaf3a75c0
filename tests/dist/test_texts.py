"""Plain texts among the test sets of a run: their perplexity is that of a plain loop over transformers' own logits."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import llmdistill  # noqa: F401 (lets transformers load the student)

pytestmark = pytest.mark.dist

LINES = [f"Town {number} lies by a lake. = {number} =\n" if number % 3 else "\n" for number in range(40)]
WINDOW, LIMIT = 24, 9


def plain_loop(folder: Path, text: str) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
    losses = []
    for window in ids.split(WINDOW)[:LIMIT]:
        with torch.no_grad():
            logits = model(window[None]).logits[0]
        losses.append(float(cross_entropy(logits[:-1], window[1:])))
    assert len(losses) == LIMIT
    return math.exp(statistics.fmean(losses))


@pytest.mark.parametrize(("kind", "ranks"), [("instructions", 2), ("text", 1)])
def test_it_is_that_of_a_plain_loop_for_every_model(launch, settings, tiny_teacher, tmp_path, kind, ranks):
    file, run = tmp_path / "towns.txt", tmp_path / "run"
    file.write_text("".join(LINES))
    read = {"wikitext2": "\n\n".join("" if line == "\n" else line for line in LINES), "towns": "".join(LINES)}
    tests = dict.fromkeys(read, str(file)) | ({"seen": "embedded:seen"} if kind == "instructions" else {})
    own = ["--data.kind", "text", "--data.train", str(file), "--data.max_length", "32"] if kind == "text" else []
    scoring = ["--scoring.window", str(WINDOW), "--scoring.limit", str(LIMIT), "--scoring.decoding", "greedy"]
    words = [*settings, *own, *scoring, "--data.tests", json.dumps(tests), "--ds_config", "ds_configs/zero2.json"]
    launch(*words, "--output_dir", str(run), ranks=ranks)

    metrics = json.loads((run / "metrics.json").read_text())
    folders = {"teacher": tiny_teacher, "untrained": run / "untrained", "student": run / "student"}
    for model, folder in folders.items():
        found = {name: each["perplexity"] for name, each in metrics[model]["texts"].items()}
        assert found == pytest.approx({name: plain_loop(folder, text) for name, text in read.items()}, rel=1e-4)
    assert len({metrics[model]["texts"]["towns"]["perplexity"] for model in folders}) == 3
    assert ("rougeL" in metrics["student"]) == (kind == "instructions")
    for page in ("report.md", "report.html", "student/README.md"):
        assert "towns perplexity" in (run / page).read_text(), page
    assert "type: perplexity" not in (run / "student/README.md").read_text(), "a part of the windows is no result"
