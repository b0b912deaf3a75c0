"""The table of docs/students.md: each row is run on a tiny random model, cell by cell, or refused in one sentence."""

import copy
import re
from pathlib import Path

import pytest
import torch
from tiny import SETTINGS, WORDS, tiny_model
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedModel

import llmdistill
from llmdistill.config import FactorizeConfig, LoraConfig, ResponseConfig
from llmdistill.errors import UserError
from llmdistill.generation import responses
from llmdistill.generation.decode import inference, new_tokens
from llmdistill.models.adapters import add_lora
from llmdistill.models.families import is_causal
from llmdistill.models.load import load_model
from llmdistill.students.convert import compress_model
from llmdistill.students.counting import count_parameters
from llmdistill.students.install import is_factorized
from llmdistill.students.merge import merge

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


def batch_of() -> dict[str, torch.Tensor]:
    labels = _IDS.masked_fill((_MASK == 0) | (torch.arange(8) < 3), -100)
    return {"input_ids": _IDS, "attention_mask": _MASK, "labels": labels}


class Row:
    """An architecture: a teacher of it, and its student of SVD factors. Each column leaves both as they were."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.teacher = tiny_model(name, scale=3.0)
        self.student = compress_model(self.teacher, FactorizeConfig(rank=4))

    def run_kd(self) -> None:
        """The divergence is the one that the logits of both stock models give."""
        labels, models = batch_of()["labels"], (self.teacher, self.student)
        rows = functional.pad(labels[:, 1:], (0, 1), value=-100) if is_causal(self.teacher.config) else labels
        log_p, log_q = (logits_of(model)[rows != -100].log_softmax(-1) for model in models)
        expected = functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
        loss = llmdistill.DistillationLoss(*models, method="kd", ratio=1.0)
        result = loss(batch_of())
        torch.testing.assert_close(result.terms["forward_kl"], expected, rtol=1e-4, atol=1e-6)
        result.backward()
        loss.remove()
        assert any(each.grad is not None and each.grad.abs().sum() > 0 for each in self.student.parameters())

    def run_generate(self) -> None:
        """Greedy answers are those of one forward pass a token, without padding."""
        if not is_causal(self.teacher.config):
            self.teacher.config.save_pretrained(self.folder)
            given = (self.folder / "out", ResponseConfig(engine="hf"))
            responses._plan_job(str(self.folder), "none.jsonl", *given)
        settings = GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=[WORDS - 1], pad_token_id=0)
        prompts = [_IDS[0, :5].tolist(), _IDS[1, :3].tolist(), _IDS[1, :8].tolist(), _IDS[0, :2].tolist()]
        with inference(self.teacher, settings):
            answers = dict(new_tokens(self.teacher, prompts, settings, at_once=2))
        for prompt, answer in ((prompts[row], answers[row]) for row in range(len(prompts))):
            with torch.no_grad():
                logits = self.teacher(torch.tensor([[*prompt, *answer]])).logits[0]
            assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer

    def run_lora(self) -> None:
        """Adapters change nothing at first, and they alone are trained."""
        model, before = copy.deepcopy(self.teacher), logits_of(self.teacher)
        add_lora(model, LoraConfig(rank=2), seed=0)
        torch.testing.assert_close(logits_of(model), before)
        trained = [key for key, each in model.named_parameters() if each.requires_grad]
        assert trained
        assert all("lora_" in key for key in trained)
        model(input_ids=_IDS, attention_mask=_MASK).logits.square().mean().backward()
        assert any(each.grad is not None and each.grad.abs().sum() > 0 for each in model.parameters())

    def run_svd(self) -> None:
        """The student is smaller, and loads from its folder with the same logits."""
        assert is_factorized(self.student)
        assert count_parameters(self.student) < count_parameters(self.teacher)
        self.student.save_pretrained(self.folder)
        loaded = load_model(self.folder, dtype=torch.float32)
        torch.testing.assert_close(logits_of(loaded), logits_of(self.student), rtol=1e-5, atol=1e-6)

    def run_makd(self) -> None:
        if MAKD.get(self.name) is NO_SCORES:
            with pytest.raises(UserError, match=r"set makd\.attention to 0"):
                llmdistill.DistillationLoss(self.teacher, self.student, method="makd")
        self._compares_inside("makd", MAKD.get(self.name, {}))

    def run_relations(self) -> None:
        self._compares_inside("minilmv2", {"relation_heads": 2})

    def _compares_inside(self, method: str, settings: dict[str, object]) -> None:
        """The inner terms are 0 for the teacher itself, not for its student (random experts return almost nothing)."""
        sizes = []
        for model in (copy.deepcopy(self.teacher), self.student):
            loss = llmdistill.DistillationLoss(self.teacher, model, method=method, **settings)
            result = loss(batch_of())
            result.backward()
            loss.remove()
            sizes.append({key: float(value) for key, value in result.terms.items() if key not in ("logits", "label")})
            assert sizes[-1]
        assert all(abs(value) < 1e-6 for value in sizes[0].values()), sizes[0]
        assert all(value > 1e-6 for value in sizes[1].values()), sizes[1]

    def run_export(self) -> None:
        """The dense model has the student's logits and the stock modules."""
        dense = copy.deepcopy(self.student)
        merge(dense)
        assert not is_factorized(dense)
        torch.testing.assert_close(logits_of(dense), logits_of(self.student), rtol=1e-4, atol=1e-5)


def page_table() -> tuple[list[str], dict[str, list[str]]]:
    """The columns of the page's table, and the cells of each architecture; a line has several that are alike."""
    text = PAGE.read_text(encoding="utf-8").split("| architecture |", 1)[1].split("\n\n")[0]
    header, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return header, {name.strip(" `"): cells for names, *cells in lines for name in names.split(",")}


def test_the_page_has_every_architecture_and_column() -> None:
    header, rows = page_table()
    assert header == list(COLUMNS)
    assert rows.keys() == SETTINGS.keys()


@pytest.mark.parametrize("name", SETTINGS)
def test_each_cell_of_a_row_says_what_happens(name: str, tmp_path: Path) -> None:
    cells = page_table()[1][name]
    row = Row(name, tmp_path)
    for column, cell in zip(COLUMNS, cells, strict=True):
        run = getattr(row, f"run_{column.lower()}")
        assert (cell == "yes (2)") == (column == "MaKD" and MAKD.get(name) is NO_SCORES)
        if cell.startswith("yes"):
            run()
            continue
        number = re.fullmatch(r"no \(([0-9])\)", cell)
        assert number is not None, cell
        with pytest.raises(UserError, match=REASONS[number[1]]) as refused:
            run()
        assert "\n" not in str(refused.value)
