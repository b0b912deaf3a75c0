"""The table of docs/students.md: each cell is run on a tiny random model, or refused in one sentence."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import SETTINGS, WORDS, tiny_model
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedModel

import llmdistill
from llmdistill.config import FactorizeConfig, LoraConfig, ResponseConfig
from llmdistill.errors import UserError
from llmdistill.factorize.convert import compress_model
from llmdistill.factorize.counting import count_parameters
from llmdistill.factorize.export import merge
from llmdistill.factorize.install import is_factorized
from llmdistill.generation import responses
from llmdistill.generation.decode import inference, new_tokens
from llmdistill.models.adapters import add_lora
from llmdistill.models.families import is_causal
from llmdistill.models.load import load_model
from llmdistill.runtime.distributed import World

PAGE = Path(__file__).resolve().parents[2] / "docs/students.md"
COLUMNS = ("KD", "generate", "LoRA", "SVD", "MaKD", "relations", "export")
REASONS = {"1": "do not generate text"}
"""What the sentence of a refusal has, by its number in the table."""
NO_SCORES = {"attention": 0.0}
MAKD = {"modernbert": {"layer_layers": "4"}, "gemma2": NO_SCORES, "mpnet": NO_SCORES, "deberta-v2": NO_SCORES}
"""MaKD's settings where its attention term knows some layers only, or none."""
_IDS = torch.randint(5, WORDS, (3, 8), generator=torch.Generator().manual_seed(0))
_MASK = torch.ones_like(_IDS)
_MASK[1, 6:] = 0


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=_IDS, attention_mask=_MASK).logits


def student_of(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    teacher = tiny_model(name, scale=3.0)
    return teacher, compress_model(teacher, FactorizeConfig(rank=4))


def batch_of() -> dict[str, torch.Tensor]:
    labels = _IDS.masked_fill((_MASK == 0) | (torch.arange(8) < 3), -100)
    return {"input_ids": _IDS, "attention_mask": _MASK, "labels": labels}


def run_kd(name: str, _folder: Path) -> None:
    """The divergence is the one that the logits of both stock models give."""
    teacher, student = student_of(name)
    batch = batch_of()
    rows = functional.pad(batch["labels"][:, 1:], (0, 1), value=-100) if is_causal(teacher.config) else batch["labels"]
    log_p, log_q = (logits_of(model)[rows != -100].log_softmax(-1) for model in (teacher, student))
    expected = functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    loss = llmdistill.DistillationLoss(teacher, student, method="kd", ratio=1.0)
    result = loss(batch)
    torch.testing.assert_close(result.terms["forward_kl"], expected, rtol=1e-4, atol=1e-6)
    result.backward()
    assert any(each.grad is not None and each.grad.abs().sum() > 0 for each in student.parameters())


def run_generate(name: str, folder: Path) -> None:
    """Greedy answers are those of one forward pass a token, without padding."""
    model = tiny_model(name, scale=3.0)
    if not is_causal(model.config):
        model.config.save_pretrained(folder)
        responses._prepare(str(folder), "none.jsonl", folder / "out", ResponseConfig(engine="hf"), World.alone())
    settings = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=[WORDS - 1], pad_token_id=0)
    prompts = [_IDS[0, :5].tolist(), _IDS[1, :3].tolist()]
    with inference(model, settings):
        answers = new_tokens(model, prompts, settings, synced=False)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = torch.tensor([prompt])
        for token in answer:
            with torch.no_grad():
                assert int(model(tokens).logits[0, -1].argmax()) == token
            tokens = torch.cat([tokens, torch.tensor([[token]])], dim=1)


def run_lora(name: str, _folder: Path) -> None:
    """Adapters change nothing at first, and they alone are trained."""
    model = tiny_model(name, scale=3.0)
    before = logits_of(model)
    add_lora(model, LoraConfig(rank=2), seed=0)
    torch.testing.assert_close(logits_of(model), before)
    trained = [key for key, each in model.named_parameters() if each.requires_grad]
    assert trained
    assert all("lora_" in key for key in trained)
    model(input_ids=_IDS, attention_mask=_MASK).logits.square().mean().backward()
    assert any(each.grad is not None and each.grad.abs().sum() > 0 for each in model.parameters())


def run_svd(name: str, folder: Path) -> None:
    """The student is smaller, and loads from its folder with the same logits."""
    teacher, student = student_of(name)
    assert is_factorized(student)
    assert count_parameters(student) < count_parameters(teacher)
    student.save_pretrained(folder)
    assert torch.equal(logits_of(load_model(folder, dtype=torch.float32)), logits_of(student))


def run_export(name: str, _folder: Path) -> None:
    """The dense model has the student's logits and the stock modules."""
    _, student = student_of(name)
    before = logits_of(student)
    merge(student)
    assert not is_factorized(student)
    torch.testing.assert_close(logits_of(student), before, rtol=1e-4, atol=1e-5)


def run_makd(name: str, _folder: Path) -> None:
    if MAKD.get(name) is NO_SCORES:
        teacher, student = student_of(name)
        with pytest.raises(UserError, match=r"set makd\.attention to 0"):
            llmdistill.DistillationLoss(teacher, student, method="makd")
    _compares_inside(name, "makd", MAKD.get(name, {}))


def run_relations(name: str, _folder: Path) -> None:
    _compares_inside(name, "minilmv2", {"relation_heads": 2})


def _compares_inside(name: str, method: str, settings: dict[str, object]) -> None:
    """The inner terms are 0 for the teacher itself, and not for its student (random experts return almost nothing)."""
    teacher, student = student_of(name)
    sizes = []
    for model in (copy.deepcopy(teacher), student):
        loss = llmdistill.DistillationLoss(teacher, model, method=method, **settings)
        result = loss(batch_of())
        result.backward()
        inner = {key: float(value) for key, value in result.terms.items() if key not in ("logits", "label")}
        assert inner
        sizes.append(inner)
        loss.remove()
    assert all(abs(value) < 1e-6 for value in sizes[0].values()), sizes[0]
    assert all(value > 1e-6 for value in sizes[1].values()), sizes[1]


RUNS: dict[str, Callable[[str, Path], None]] = dict(
    zip(COLUMNS, (run_kd, run_generate, run_lora, run_svd, run_makd, run_relations, run_export), strict=True)
)


def page_rows() -> dict[str, list[str]]:
    """The cells of the page's table by architecture."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").split("| architecture |", 1)[1].splitlines()[2:]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found[name.strip("`")] = cells
    return found


def test_the_page_has_every_architecture_and_column() -> None:
    assert list(page_rows()) == list(SETTINGS)
    header = PAGE.read_text(encoding="utf-8").split("| architecture |", 1)[1].splitlines()[0]
    assert [cell.strip() for cell in header.strip("|").split("|")] == list(COLUMNS)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_cell_says_what_happens(name: str, column: str, tmp_path: Path) -> None:
    cell = page_rows()[name][COLUMNS.index(column)]
    assert (cell == "yes (2)") == (column == "MaKD" and MAKD.get(name) is NO_SCORES)
    if cell.startswith("yes"):
        RUNS[column](name, tmp_path)
        return
    number = re.fullmatch(r"no \(([0-9])\)", cell)
    assert number is not None, cell
    with pytest.raises(UserError, match=REASONS[number[1]]) as refused:
        RUNS[column](name, tmp_path)
    assert "\n" not in str(refused.value)
