"""The Python of README.md, docs/ and the public docstrings: it runs, or it is in a list with the reason."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import PAGES, blocks
from tiny import save_decoder
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

import llmdistill
from llmdistill import losses

NOT_RUN = {
    ("evaluate.md", 'scores = llmdistill.evaluate("runs/glue/'): "a model that is fine-tuned on RTE, and GLUE's files",
    ("serve.md", "import llmdistill  # lets transformers load"): "sentence-transformers, which is not installed here",
    ("serve.md", "from optimum.onnxruntime import"): "Optimum, which is not installed here",
}
"""Page and first line of each block that is only compiled -> what it needs."""

SHORTER = {
    "README.md": {
        '"examples": 256': '"examples": 8, "held_out": 4',
        '"global_batch_size": 32': '"global_batch_size": 4',
        '"steps": 120': '"steps": 2',
        '"embedded:unseen")': '"embedded:unseen", limit=2)',
    },
    "students.md": {'"examples": 64': '"examples": 8'},
    "train.md": {"}] * 64": "}] * 8", "steps=10": "steps=2"},
}
"""What is made smaller so that a page runs in seconds; each text is in the page once."""


def run_pages_blocks(page: Path) -> dict[str, Any]:
    """Run the blocks of a page one after the other, as a reader would, and return their names."""
    torch.manual_seed(0)  # pages draw tokens, and what they learn of them depends on these
    names: dict[str, Any] = {}
    shorter = dict(SHORTER.get(page.name, {}))
    for text in blocks(page, "python"):
        if any(page.name == name and text.startswith(first) for name, first in NOT_RUN):
            continue
        for long in [each for each in shorter if each in text]:
            assert text.count(long) == 1
            text = text.replace(long, shorter.pop(long))
        exec(compile(text, page.name, "exec"), names)
    assert not shorter, f"{page.name} has none of {list(shorter)}"
    return names


def numbers(text: str) -> list[float]:
    return [float(line) for line in text.splitlines() if re.fullmatch(r"[\d.]+", line)]


def of_readme(names: dict[str, Any], printed: str) -> None:
    teacher, untrained, _ = numbers(printed)
    assert teacher > untrained
    assert Path("my-student/model.safetensors").is_file()


def of_api(names: dict[str, Any], printed: str) -> None:
    (score,) = numbers(printed)
    assert 0 <= score <= 100
    assert Path("served/config.json").is_file()


def of_evaluate(names: dict[str, Any], printed: str) -> None:
    of_model, of_answer = numbers(printed)
    assert 0 <= of_model <= 100
    assert of_answer == pytest.approx(100 * 6 / 7)  # three of three words, and three of four


def of_methods(names: dict[str, Any], printed: str) -> None:
    first, _, last = (float(line.split()[0]) for line in printed.splitlines() if "{'query'" in line)
    assert names["result"].loss.item() == pytest.approx(last)
    assert last < first


def of_students(names: dict[str, Any], printed: str) -> None:
    assert numbers(printed) == [AutoModelForCausalLM.from_pretrained("STUDENT").num_parameters()]
    assert names["student"].num_parameters() < 0.35 * 1_220_224


def of_train(names: dict[str, Any], printed: str) -> None:
    result = names["result"]
    assert f"{result.history[-1]['loss']} {result.folder}" in printed


def of_serve(names: dict[str, Any], printed: str) -> None:
    assert type(names["model"].model.layers[0].mlp.up_proj.weight).__name__ == "IntxUnpackedToInt8Tensor"


CHECKS: dict[str, Callable[[dict[str, Any], str], None]] = {
    "README.md": of_readme,
    "api.md": of_api,
    "evaluate.md": of_evaluate,
    "methods.md": of_methods,
    "serve.md": of_serve,
    "students.md": of_students,
    "train.md": of_train,
}
"""Page -> what must be true after its Python has run."""


@pytest.mark.parametrize("name", CHECKS)
def test_python_of_a_page_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if name == "students.md":  # which loads the student of the quick start
        llmdistill.compress("embedded:teacher", rank=8).save_pretrained("runs/quickstart/student")
    (page,) = (each for each in PAGES if each.name == name)
    names = run_pages_blocks(page)
    CHECKS[name](names, capsys.readouterr().out)


def test_every_block_of_python_is_run_or_has_a_reason():
    left = {}
    for page in PAGES:
        if page.name in ("extending.md", "CHANGELOG.md"):
            continue
        texts = [*blocks(page, "python")]
        reasons = [first for name, first in NOT_RUN if name == page.name]
        not_run = [text for text in texts if text.startswith(tuple(reasons))]
        assert len(not_run) == len(reasons), page.name
        for text in not_run:
            compile(text, page.name, "exec")
        left[page.name] = len(texts) - len(reasons)
    assert {name for name, count in left.items() if count} == CHECKS.keys()
    fences = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines() if line[:3] == "```"]
    assert {line for line in fences if "py" in line.lower()} == {"```python"}


PUBLIC = [
    llmdistill,
    llmdistill.compress,
    llmdistill.distill,
    llmdistill.evaluate,
    llmdistill.export,
    llmdistill.sizes,
    llmdistill.DistillationLoss,
    llmdistill.DistillationLoss.counts,
    llmdistill.DistillationTrainer,
    losses.divergence_by_autograd,
]
"""What has an example in its docstring; those of `llmdistill.losses` itself are in losses/test_public.py."""


def examples_of(documented: Any) -> str:
    """All blocks of code in a docstring, with few steps and a rank that fits the small model, and without ONNX.

    ONNX takes 20 seconds; serving/test_onnx_export.py has it.
    """
    text = re.split(r"^(?:Args|Returns|Raises):", inspect.getdoc(documented) or "", flags=re.MULTILINE)[0]
    parts = text.split("\n\n")
    found = "\n".join(textwrap.dedent(part) for part in parts if part.startswith("    "))
    assert found, f"{documented} has no example"
    shorter = {"steps=200": "steps=2", "rank=48": "rank=8", '"40%"': '"90%"', 'to="onnx", int8=True': 'to="dense"'}
    shorter["calibration=rows)"] = 'calibration={"data": rows, "examples": 8, "held_out": 4})'
    for long, short in shorter.items():
        found = found.replace(long, short)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny decoder with the embedded teacher's tokenizer."""
    path = tmp_path_factory.mktemp("model")
    return save_decoder(path, num_hidden_layers=2, tie_word_embeddings=False, initializer_range=0.02)


@pytest.mark.slow  # ten runs of what test_api.py and training/ test
@pytest.mark.parametrize("documented", PUBLIC, ids=lambda each: each.__name__)
def test_examples_of_the_docstrings_run(documented, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"instruction": f"Where is number {i}?", "input": "", "output": f"In town {i % 7}."} for i in range(32)]
    teacher, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer("Where does it live?").input_ids])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    student = llmdistill.compress(teacher, rank=8)
    names = {"llmdistill": llmdistill, "torch": torch, "divergence_by_autograd": losses.divergence_by_autograd}
    names |= {"model": teacher, "teacher": teacher, "student": student, "collator": lambda rows: rows[0]}
    names |= {"rows": rows if documented is not llmdistill.DistillationTrainer else [batch] * 4}
    args = TrainingArguments("trainer", max_steps=2, report_to=[], use_cpu=True, remove_unused_columns=False)
    names |= {"loader": [batch, batch], "batches": [batch, batch], "args": args}
    if documented is llmdistill.DistillationLoss.counts:
        names["loss"] = llmdistill.DistillationLoss(teacher, student)
    exec(compile(examples_of(documented), f"docstring of {documented.__name__}", "exec"), names)
