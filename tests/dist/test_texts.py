"""Perplexities in runs and comparisons, of plain texts and of references: they are those of a plain loop."""

import json
import math
from pathlib import Path

import pytest
import torch
from references import window_loss
from transformers import AutoModelForCausalLM, AutoTokenizer

import llmdistill  # noqa: F401 (lets transformers load the student)

from support import write_rows

LINES = [f"Town {number} lies by a lake. = {number} =\n" if number % 3 else "\n" for number in range(40)]
WINDOW, LIMIT = 24, 9
PAIRS = {
    # Two make a batch: rank 0 has one more than rank 1.
    "odd": [{"prompt": f"Town {n}", "completion": " lies by a lake" * n} for n in (1, 2, 3, 4, 5)],
    # Rank 1 has no example at all.
    "one": [{"prompt": "Say:", "completion": " so"}],
}


def plain_loop(folder: Path, text: str) -> float:
    model, ids = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert len(ids) >= WINDOW * LIMIT
    return math.exp(window_loss(model.float(), ids, WINDOW, WINDOW, LIMIT))


def of_references(folder: Path, rows: list[dict[str, str]]) -> float:
    """By the loss of the model itself, an example at a time."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).float(), AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for row in rows:
        start = tokenizer(row["prompt"])["input_ids"]
        end = [*tokenizer(row["completion"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        labels = torch.tensor([[-100] * len(start) + end])
        loss = float(model(input_ids=torch.tensor([start + end]), labels=labels).loss.detach())
        total, count = total + loss * len(end), count + len(end)
    return math.exp(total / count)


def test_it_is_that_of_a_plain_loop_for_every_model(launch, settings, tiny_teacher, tmp_path):
    file, run = tmp_path / "towns.txt", tmp_path / "run"
    file.write_text("".join(LINES))
    read = {"wikitext2": "\n\n".join("" if line == "\n" else line for line in LINES), "towns": "".join(LINES)}
    tests = dict.fromkeys(read, str(file))
    tests |= {name: str(write_rows(tmp_path / f"{name}.jsonl", rows)) for name, rows in PAIRS.items()}
    scoring = ["--scoring.window", str(WINDOW), "--scoring.limit", str(LIMIT), "--scoring.batch_size", "2"]
    short = ["--scoring.decoding", "greedy", "--data.max_prompt_length", "300", "--data.max_length", "320"]
    words = [*settings, *scoring, *short, "--data.tests", json.dumps(tests)]
    launch(*words, "--teacher.sharding", "zero3", "--output_dir", str(run), ranks=2)

    metrics = json.loads((run / "metrics.json").read_text())
    folders = {"teacher": tiny_teacher, "untrained": run / "untrained", "student": run / "student"}
    for model, folder in folders.items():
        found = {name: each["perplexity"] for name, each in metrics[model]["texts"].items()}
        assert found == pytest.approx({name: plain_loop(folder, text) for name, text in read.items()}, rel=1e-4)
        expected = {name: of_references(folder, rows) for name, rows in PAIRS.items()}
        assert {name: metrics[model]["perplexity"][name] for name in PAIRS} == pytest.approx(expected, rel=1e-4)
    assert len({metrics[model]["texts"]["towns"]["perplexity"] for model in folders}) == 3
    assert "rougeL" in metrics["student"]
    for page in ("report.md", "report.html", "student/README.md"):
        assert "towns perplexity" in (run / page).read_text(), page
    assert "type: perplexity" not in (run / "student/README.md").read_text(), "a part of the windows is no result"


def test_a_comparison_on_text_chooses_by_the_perplexity_of_a_plain_loop(launch, settings, tiny_teacher, tmp_path):
    texts = {"towns": "".join(LINES), "back": "".join(reversed(LINES)), "valid": "".join(LINES[1::2] * 2)}
    files = {name: tmp_path / f"{name}.txt" for name in texts}
    for name, file in files.items():
        file.write_text(texts[name])
    tests = {name: str(files[name]) for name in ("towns", "back")}
    words = [*settings, "--data.kind", "text", "--data.train", tests["towns"], "--data.valid", str(files["valid"])]
    words += ["--data.tests", json.dumps(tests), "--data.max_length", "32", "--train.steps", "3"]
    words += ["--scoring.window", str(WINDOW), "--scoring.limit", str(LIMIT)]
    words += ["--methods", "none,kd", "--seeds", "1", "--learning_rates", "3e-3"]
    launch("compare", *words, "--output_dir", str(tmp_path / "out"), program="llmdistill.cli", ranks=0)

    out = tmp_path / "out"
    results = json.loads((out / "results.json").read_text())
    methods = results["methods"]
    assert (results["score"], list(methods)) == ("perplexity", ["teacher", "none", "kd"])
    folders = {"teacher": tiny_teacher, "none": out / methods["none"]["runs"][0] / "untrained"}
    folders["kd"] = out / methods["kd"]["runs"][0] / "student"
    for name, folder in folders.items():
        expected = {text: plain_loop(folder, texts[text]) for text in tests}
        found = dict(methods[name]["perplexity"])
        assert found.pop("average") == pytest.approx(math.sqrt(math.prod(expected.values())), rel=1e-4)
        assert {text: each["mean"] for text, each in found.items()} == pytest.approx(expected, rel=1e-4)

    trials = [each for each in (out / "trials").glob("kd-*") if each.is_dir()]
    tried = {each: plain_loop(each / "student", texts["valid"]) for each in trials}
    assert len(tried) == 2  # the weights on the labels, of which each makes another validation loss
    assert out / methods["kd"]["runs"][0] == min(tried, key=tried.__getitem__)
    assert methods["kd"]["valid_perplexity"] == pytest.approx(min(tried.values()), rel=1e-4)
