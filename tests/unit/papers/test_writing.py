"""The files, settings and checks of tasks in which an encoder writes; tests/dist/test_writing.py runs them."""

import pytest
from hostile import refuses
from transformers import BertConfig, BertModel, LlamaConfig, RobertaConfig
from word_models import save_tokenizer

from llmdistill.config import RunConfig, TaskConfig
from llmdistill.config.command_line import parse_run
from llmdistill.data.targets import TargetExample
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.papers.writing import Writing
from llmdistill.papers.writing_files import read_files
from llmdistill.tasks import make_task
from llmdistill.tasks.base import Models
from llmdistill.training.plan import make_plan

from support import write_rows

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
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


def config_of(folder, *arguments: str) -> RunConfig:
    given = ["--recipe", "finetune", "--data.task.dir", str(folder), "--student.model", str(folder / "student")]
    given += ["--data.task.name", "summarization", "--data.max_length", "8", "--data.task.writing.max_length", "3"]
    return parse_run([*given, *arguments], METHODS)[0]


def test_the_terms_are_those_of_smoothed_masked_tokens(folder):
    plan = make_plan(config_of(folder, "--data.task.writing.label_smoothing", "0.2"))
    (term,) = plan.method.token_terms
    assert (term.name, term.smoothing, plan.method.shift) == ("label", 0.2, False)
    assert plan.models.student_head == "lm_head"
    plan = make_plan(config_of(folder, "--method", "minilm", "--teacher.model", str(folder / "teacher")))
    assert "label" in plan.method.weights, "a method of layers alone learns the labels too"


def read(folder, *arguments: str) -> Writing:
    task = make_task(config_of(folder, *arguments))
    model, path = BertConfig.from_pretrained(folder / "student"), folder / "student"
    objective = task.objective(model, uses_output=True)
    paths = {"teacher_path": path, "tokenizer_path": path}
    return task.read(Models(teacher=model, student=model, causal=False, objective=objective, **paths))


def test_what_is_cut_is_said_and_scores_depend_on_how_texts_are_searched_and_not_on_the_training(folder):
    data = read(folder)
    assert data.report == "2 examples; 1 sources are cut at 5 tokens, 1 targets at 3"
    assert data.num_steps(epochs=3, global_batch_size=4) == 2
    asked = data.sets
    assert read(folder, "--data.task.writing.mask_share", "0.5").sets == asked
    assert read(folder, "--data.task.writing.beams", "3").sets != asked
    assert read(folder, "--scoring.limit", "1").sets["dev"] != asked["dev"]


def test_the_data_set_on_the_hub_that_a_card_names(folder):
    names = {
        name: make_task(config_of(folder, "--data.task.name", name)).hub for name in ("cnndailymail", "summarization")
    }
    assert names == {"cnndailymail": "abisee/cnn_dailymail", "summarization": None}


def test_summary_and_table(folder):
    data = read(folder)
    score = {"metrics": {"rougeL": 30.0, "rouge1": 40.0, "rouge2": 20.0}}
    summary = data.summary({"dev": score, "test": {"metrics": {"rougeL": 1.0, "rouge1": 2.0, "rouge2": 3.0}}})
    assert summary["score"] == 30.0
    table = data.table({"student": summary})
    assert table.columns[0] == "Summarization ROUGE-L"
    assert table.rows["student"] == ["30.00", "40.00", "20.00", "1.00", "2.00", "3.00"]
    assert not data.warnings(None)
    assert "share nothing" in data.warnings({"score": 0.0, "chance": 0.0})[0]


def test_bad_settings_and_models_that_cannot_write_or_teach_are_named(folder, monkeypatch):
    for setting, value, said in (
        ("max_length", "33", "has positions for 32"),
        ("max_length", "6", "the source needs the rest"),
        ("task.writing.min_length", "3", "min_length is 3"),
    ):
        with pytest.raises((UserError, ValueError), match=said):
            make_plan(config_of(folder, f"--data.{setting}", value))
    task = make_task(config_of(folder))
    refuses("let the llama learn the texts as instructions", task.check_model, "student.model", "here", LlamaConfig())
    headless = BertConfig(architectures=["BertModel"])
    refuses("BertModel without language-model head", task.check_model, "teacher.model", "here", headless)
    task.check_model("student.model", "here", RobertaConfig(max_position_embeddings=10))
    refuses("has positions for 7", task.check_model, "student.model", "here", RobertaConfig(max_position_embeddings=9))
    monkeypatch.setattr(BertModel, "forward", lambda self, input_ids: None)
    refuses("takes no keys and values", task.check_model, "student.model", "here", BertConfig())


@pytest.mark.parametrize("pair", ["source target", "document summary", "Document SUMMARY"])
def test_summaries_of_the_usual_rows(tmp_path, pair):
    source, target = pair.split()
    write_rows(tmp_path / "train.jsonl", [{source: "a b c", target: "a", "id": 1}, {source: "d", target: "e"}])
    write_rows(tmp_path / "validation.jsonl", [{source: "f", target: "g"}])
    write_rows(tmp_path / "test.jsonl", [{source: "h", target: "i"}])
    Writing.check_folder(str(tmp_path), "summarization", setting="data.task.dir")
    files = read_files("summarization", TaskConfig(dir=str(tmp_path)))
    assert files.train == [TargetExample("a b c", None, "a"), TargetExample("d", None, "e")]
    assert {name: each.references for name, each in files.sets.items()} == {"dev": [["g"]], "test": [["i"]]}
    assert len(read_files("summarization", TaskConfig(dir=str(tmp_path), limit=1)).train) == 1


def test_examples_of_one_source_are_one_with_several_references(tmp_path):
    rows = [{"context": "x y", "answer": answer, "question": question} for answer, question in ("xa", "yb", "xc")]
    write_rows(tmp_path / "dev.jsonl", [*rows])
    write_rows(tmp_path / "train.jsonl", [*rows])
    found = read_files("questiongeneration", TaskConfig(dir=str(tmp_path)), only_scores=True).sets["dev"]
    assert found.references == [["a", "c"], ["b"]]
    assert [(each.source, each.hint) for each in found.examples] == [("x y", "x"), ("x y", "y")]


def test_questions_whose_answer_is_not_in_their_context_are_skipped(tmp_path):
    asked = [{"context": "one two", "question": "q", "answer": answer} for answer in ("two", "three", "")]
    write_rows(tmp_path / "train.jsonl", [*asked, {"source": "one two [SEP] two", "target": "how many"}])
    write_rows(tmp_path / "dev.jsonl", [{"context": "one two", "question": "which", "answer": "three"}])
    files = read_files("questiongeneration", TaskConfig(dir=str(tmp_path)))
    assert [example.hint for example in files.train] == ["two", None]
    assert files.skipped == [f"{tmp_path / 'train.jsonl'}:{line}" for line in (2, 3)]
    assert len(files.sets["dev"].examples) == 1


def test_missing_files_and_empty_targets_are_named(tmp_path):
    refuses("data.task.dir is missing", Writing.check_folder, None, "summarization", setting="data.task.dir")
    Writing.check_folder(None, "xsum", setting="data.task.dir")
    write_rows(tmp_path / "train.jsonl", [{"source": "a", "target": " "}])
    refuses("has no dev.jsonl or valid.jsonl", Writing.check_folder, str(tmp_path), "xsum", setting="data.task.dir")
    write_rows(tmp_path / "dev.jsonl", [{"source": "a", "target": "b"}])
    refuses("train.jsonl:1: target is ' '", read_files, "summarization", TaskConfig(dir=str(tmp_path)))
