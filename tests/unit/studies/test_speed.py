"""The speed of models side by side: what is timed, on which batches, and the table of it."""

import json
from itertools import count

import pytest
import torch
from tiny import tiny_model
from transformers import BertModel
from word_models import save_bert, save_tokenizer

from llmdistill.commands.side_by_side import main
from llmdistill.report.trials import read_trials
from llmdistill.runtime import speed
from llmdistill.runtime.speed import time_batches


@pytest.fixture
def bert(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "what", "is", "it", "a", "tool", "?"]
    save_bert(tmp_path / "bert", words, BertModel, num_hidden_layers=4, max_position_embeddings=24)
    save_tokenizer(tmp_path / "bert", words, model_input_names=["input_ids", "token_type_ids", "attention_mask"])
    return tmp_path / "bert"


@pytest.fixture
def clock(monkeypatch):
    """Every pass takes one second more than the one before; gives the batches in the order of the passes."""
    seconds, passed = count(1), []

    def timed(work):
        work()
        passed.append(work.args[-1])
        return float(next(seconds))

    monkeypatch.setattr(speed, "timed", timed)
    return passed


def run(tmp_path, *arguments):
    assert main("speed", [*map(str, arguments), "--output_dir", str(tmp_path / "out")]) == 0
    return json.loads((tmp_path / "out" / "results.json").read_text())


def test_a_model_and_a_shape_of_it_on_full_batches(bert, tmp_path, clock):
    options = ("--batches", 3, "--batch_size", 2, "--max_length", 20, "--warmup", 1, "--dtype", "fp32")
    found = run(tmp_path, "--model", bert, "--shapes", "2x16x2", *options)
    # The passes take turns: 1 and 2 are the warm-up, then 3 5 7 are the model's and 4 6 8 the shape's.
    first, second = found["models"].values()
    assert (first["forward"]["seconds"], second["forward"]["seconds"]) == (3 + 5 + 7, 4 + 6 + 8)
    assert (first["forward"]["speedup"], second["forward"]["speedup"]) == (1, 5 / 6)
    assert all(torch.equal(inputs["attention_mask"], torch.ones(2, 20)) for inputs in clock)
    assert first["tokens"] == second["tokens"] == 3 * 2 * 20
    whole = BertModel.from_pretrained(bert)
    assert first["params"]["embedding"] == whole.embeddings.word_embeddings.weight.numel()
    assert first["params"]["transformer"] == sum(weight.numel() for weight in whole.encoder.parameters())
    assert 2 * second["params"]["transformer"] == first["params"]["transformer"]
    (row,) = read_trials(tmp_path / "out")
    assert [entry.by_set("speedup") for entry in row.models.values()] == [{"forward": 1}, {"forward": 5 / 6}]
    assert "| 15.0 s | 1.0x |" in (tmp_path / "out" / "report.md").read_text()


def test_examples_of_a_task_are_padded_to_their_batch(bert, tmp_path, clock):
    folder = tmp_path / "glue" / "QNLI"
    folder.mkdir(parents=True)
    rows = ["what is it ?\ta tool", "what ?\tit is a tool a tool", "is it ?\ta", "what is a ?\tit"]
    lines = ["index\tquestion\tsentence\tlabel", *(f"0\t{row}\tentailment" for row in rows)]
    (folder / "train.tsv").write_text("\n".join(lines) + "\n")
    options = ("--batches", 2, "--batch_size", 2, "--max_length", 20, "--warmup", 3)
    found = run(tmp_path, "--model", bert, "--task", "qnli", "--data_dir", tmp_path / "glue", *options)
    # [CLS] and two [SEP] are added: 9 and 11 tokens, then 7 and 8; the batches are the warm-up too, in turn.
    assert [tuple(inputs["input_ids"].shape) for inputs in clock] == [(2, 11), (2, 8), (2, 11), (2, 11), (2, 8)]
    assert next(iter(found["models"].values()))["tokens"] == 9 + 11 + 7 + 8
    assert clock[-1]["token_type_ids"].sum(1).tolist() == [2, 2]


def test_a_training_step_changes_the_weights_and_a_forward_pass_does_not():
    model = tiny_model("bert", num_hidden_layers=1).base_model
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    batch = {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}

    def moved():
        return max(float((weight - before[name]).abs().max()) for name, weight in model.state_dict().items())

    assert len(time_batches({"one": model}, {"one": [batch] * 4}, warmup=1)["one"]) == 3
    assert moved() == 0
    time_batches({"one": model}, {"one": [batch]}, warmup=0, training=True)
    # AdamW's first step is as long as the learning rate, and the weight decay adds a hundredth of it.
    assert moved() == pytest.approx(1e-5, rel=0.05)
    assert not model.training


def test_mistakes(bert, tmp_path, refused):
    for words, said in (
        (("--max_length", 30), "has positions for 24 tokens; give 24 or less"),
        (("--shapes", "2x15x2"), "--shapes 2x15x2: 2 heads do not divide the width 15"),
        (("--task", "squad1"), "--task squad1: take the examples of a task of GLUE (cola, "),
        (("--task", "rte", "--data_dir", "nowhere"), "nowhere"),
    ):
        length = () if "--max_length" in words else ("--max_length", 8)
        given = ("--model", bert, *length, *words, "--output_dir", tmp_path / "out")
        assert said in refused("speed", *given)
    assert not (tmp_path / "out").exists()
