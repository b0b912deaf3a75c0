"""The settings and checks of tasks in which an encoder writes; tests/dist/test_writing.py runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hostile import refuses
from transformers import BertConfig, BertModel, LlamaConfig, RobertaConfig
from word_models import save_tokenizer

from llmdistill.config import RunConfig
from llmdistill.config.command_line import parse_run
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.run.plan import make_plan
from llmdistill.tasks import make_task
from llmdistill.tasks.base import Models, ScoreTable
from llmdistill.tasks.writing import Writing

from support import write_rows

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *"abcdef"]


@pytest.fixture
def folder(tmp_path):
    """An encoder (its config alone) with its tokenizer, a teacher, and rows to write."""
    for name, kind in (("student", "BertModel"), ("teacher", "BertForMaskedLM")):
        config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **SIZES, architectures=[kind])
        config.save_pretrained(tmp_path / name)
        save_tokenizer(tmp_path / name, WORDS, marked=False)
    rows = [{"source": "a b c d e f", "target": "a b c"}, {"source": "a", "target": "a"}]
    for split in ("train", "dev", "test"):
        write_rows(tmp_path / f"{split}.jsonl", rows)
    return tmp_path


def config_of(folder: Path, *arguments: str) -> RunConfig:
    given = ["--recipe", "finetune", "--data.task.dir", str(folder), "--student.model", str(folder / "student")]
    given += ["--data.task.name", "summarization", "--data.max_length", "8", "--data.task.writing.max_length", "3"]
    return parse_run([*given, *arguments], METHODS)[0]


def test_the_terms_are_those_of_smoothed_masked_tokens(folder):
    plan = make_plan(config_of(folder, "--data.task.writing.label_smoothing", "0.2"))
    (term,) = plan.method.token_terms
    assert (term.name, term.smoothing) == ("label", 0.2)
    assert not plan.method.shift
    assert plan.models.student_head == "lm_head"


def test_a_method_of_layers_alone_learns_the_labels_too(folder):
    plan = make_plan(config_of(folder, "--method", "minilm", "--teacher.model", str(folder / "teacher")))
    assert set(plan.method.weights) == {"attention", "value_relation", "label"}


def read(folder: Path, *arguments: str) -> Writing:
    task = make_task(config_of(folder, *arguments))
    model, path = BertConfig.from_pretrained(folder / "student"), folder / "student"
    objective = task.objective(model, uses_output=True)
    paths = {"teacher_path": path, "tokenizer_path": path}
    data = task.read(Models(teacher=model, student=model, causal=False, objective=objective, **paths))
    assert isinstance(data, Writing)
    return data


def test_what_is_cut_is_said_and_steps_are_counted(folder):
    data = read(folder)
    assert data.report == "2 examples; 1 sources are cut at 5 tokens, 1 targets at 3"
    assert data.num_steps(epochs=3, global_batch_size=4) == 2
    assert data.sizes == {"train": 2, "dev": 2, "test": 2}


def test_scores_depend_on_how_texts_are_searched_and_not_on_the_training(folder):
    asked = read(folder).sets
    assert read(folder, "--data.task.writing.mask_share", "0.5").sets == asked
    assert read(folder, "--data.task.writing.beams", "3").sets != asked
    assert read(folder, "--scoring.limit", "1").sets["dev"] != asked["dev"]


def test_summary_and_table(folder):
    data = read(folder)
    score = {"metrics": {"rougeL": 30.0, "rouge1": 40.0, "rouge2": 20.0}}
    summary = data.summary({"dev": score, "test": {"metrics": {"rougeL": 1.0, "rouge1": 2.0, "rouge2": 3.0}}})
    assert summary["score"] == 30.0
    assert summary["dev"]["Summarization-test"] == {"rougeL": 1.0, "rouge1": 2.0, "rouge2": 3.0}
    table: ScoreTable = data.table({"student": summary})
    assert table.columns[0] == "Summarization ROUGE-L"
    assert table.rows["student"] == ["30.00", "40.00", "20.00", "1.00", "2.00", "3.00"]
    assert not data.warnings(None)
    assert "share nothing" in data.warnings({"score": 0.0, "chance": 0.0})[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data.max_length", "33"], "has positions for 32"),
        (["--data.max_length", "6"], "the source needs the rest"),
        (["--data.task.writing.min_length", "3"], "min_length is 3"),
    ],
)
def test_bad_settings_are_named(folder, arguments, said):
    with pytest.raises((UserError, ValueError), match=said):
        make_plan(config_of(folder, *arguments))


def test_models_that_cannot_write_or_teach_are_named(folder, monkeypatch):
    task = make_task(config_of(folder))
    refuses("let the llama learn the texts as instructions", task.check_model, "student.model", "here", LlamaConfig())
    headless = BertConfig(architectures=["BertModel"])
    refuses("BertModel without language-model head", task.check_model, "teacher.model", "here", headless)
    task.check_model("student.model", "here", RobertaConfig(max_position_embeddings=10))
    refuses("has positions for 7", task.check_model, "student.model", "here", RobertaConfig(max_position_embeddings=9))
    monkeypatch.setattr(BertModel, "forward", lambda self, input_ids: None)
    refuses("takes no keys and values", task.check_model, "student.model", "here", BertConfig())
