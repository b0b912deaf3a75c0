"""Encoders on text: the same numbers however the run is cut, projectors that stay behind, chains and searches."""

import json
import os
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from glue_tasks import TOKENS, write_text
from safetensors.torch import load_file
from tiny import tiny_model
from transformers import AutoModel, AutoModelForMaskedLM, BertForPreTraining, RobertaForMaskedLM
from word_models import save_bert, save_tokenizer

from llmdistill.report.trials import read_trials
from llmdistill.train import main

from support import interrupted_copy, largest_difference, log_rows, logged, weights


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A random BERT with both its heads, without dropout: it draws other numbers on each rank."""
    folder = tmp_path_factory.mktemp("bert")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    save_bert(folder, TOKENS, BertForPreTraining, max_position_embeddings=64, initializer_range=0.2, **sizes)
    save_tokenizer(folder, TOKENS, model_input_names=["input_ids", "token_type_ids", "attention_mask"])
    return folder


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Arguments of a short run on a text."""
    folder = tmp_path_factory.mktemp("text")
    text = write_text(folder / "text.txt")
    words = f"""--data.kind text --data.train {text} --data.valid {text} --data.text.valid_sequences 24
    --data.max_length 32 --data.cache_dir {folder / "cache"} --train.steps 4 --train.global_batch_size 8
    --train.learning_rate 2e-3 --train.save_every 2 --train.log_every 1"""
    return lambda teacher, *more: ["--teacher.model", str(teacher), *words.split(), *more]


def here(folder: Path, *arguments: str) -> Path:
    """A run of one rank in this process."""
    assert main([*arguments, "--output_dir", str(folder)]) == 0
    return folder


METHODS = {
    "makd": "--method makd --student.factorize.rank 6 --student.factorize.weighting none "
    "--data.text.next_sentence true",
    "projectors": "--method tinybert --also distilbert --distilbert.cosine 0 --student.shape 1x16x4",
    "kroneckerbert": "--method kroneckerbert --data.text.next_sentence true --student.method kronecker "
    "--student.factorize.shapes {'*.attention.*':16x8,'*.intermediate.dense':8x2,'*':2x8} "
    "--student.factorize.embedding_columns 4",
}


@pytest.fixture(scope="module")
def one(bert, settings, tmp_path_factory):
    """The run of a method on one rank, and its arguments; each method runs once."""
    folder = tmp_path_factory.mktemp("one")

    @cache
    def run(name: str) -> tuple[Path, list[str]]:
        arguments = settings(bert, *METHODS[name].split())
        return here(folder / name, *arguments), arguments

    return run


@pytest.mark.parametrize(
    ("name", "ds_config"), [("makd", "zero2"), ("projectors", "zero3"), ("kroneckerbert", "zero3")]
)
def test_two_ranks_equal_one(one, launch, tmp_path, name, ds_config):
    alone, arguments = one(name)
    launch(*arguments, "--ds_config", ds_config, "--output_dir", str(tmp_path / "two"), ranks=2)
    # The softmax over keys does not see what is added to all of them: where only attention is compared, the gradient of
    # the keys' bias is rounding alone, and Adam makes whole steps of it.
    assert largest_difference(alone, tmp_path / "two", without=r".*\.key\..*bias") < 1e-6
    before, after = logged(alone, "valid_loss")
    assert logged(tmp_path / "two", "valid_loss") == pytest.approx([before, after], rel=1e-5)
    assert after < before


def test_makd_learns_masked_words_where_there_are_no_sentence_pairs(settings, tmp_path):
    teacher = tmp_path / "teacher"
    tiny_model("roberta", vocab_size=len(TOKENS)).save_pretrained(teacher)
    save_tokenizer(teacher, TOKENS)
    folder = here(tmp_path / "run", *settings(teacher, "--student.factorize.rank", "6", "--makd.label", "1"))
    assert {"query", "attention", "hidden", "logits", "label"} <= log_rows(folder)[1].keys()
    assert not {"sequence_logits", "sequence_label"} & log_rows(folder)[1].keys()
    before, after = logged(folder, "valid_loss")
    assert after < before
    assert type(AutoModelForMaskedLM.from_pretrained(folder / "student")) is RobertaForMaskedLM


def test_projectors_are_trained_kept_for_a_resumed_run_and_not_shipped(one, tmp_path):
    whole, arguments = one("projectors")
    assert not any("projector" in name for name in weights(whole))
    AutoModelForMaskedLM.from_pretrained(whole / "student")
    files = (whole / "checkpoints").glob("step-*/rank-00000.safetensors")
    kept = {file.parent.name: load_file(file) for file in files}
    names = [name for name in kept["step-4"] if name.startswith("weight/") and "projector" in name]
    assert len(names) == 2
    assert all(not torch.equal(kept["step-2"][name], kept["step-4"][name]) for name in names)
    interrupted_copy(whole, tmp_path / "killed")
    assert largest_difference(whole, here(tmp_path / "killed", *arguments)) == 0


def test_chain_trains_the_assistant_first_and_resumes_where_it_was(bert, settings, tmp_path):
    more = "--method minilm --student.shape 1x16x4 --student.assistants 2x16x4 --seed 1"
    arguments = settings(bert, *more.split())
    folder = here(tmp_path / "run", *arguments)
    assistant = AutoModel.from_pretrained(folder / "assistant-1" / "student")
    assert (assistant.config.num_hidden_layers, assistant.config.hidden_size) == (2, 16)
    record = json.loads((folder / "assistant-1" / "run.json").read_text())
    assert record["config"]["teacher"]["model"] == str(bert)
    before = weights(folder)
    shutil.rmtree(folder / "student")
    shutil.rmtree(folder / "checkpoints")
    times = {file: os.stat(file).st_mtime_ns for file in (folder / "assistant-1").rglob("*.safetensors")}
    here(folder, *arguments)
    assert all(torch.equal(before[name], value) for name, value in weights(folder).items())
    assert times == {file: os.stat(file).st_mtime_ns for file in (folder / "assistant-1").rglob("*.safetensors")}


def test_search_scores_each_layer_and_trains_with_the_best(bert, settings, tmp_path, capsys):
    more = "--method minilmv2 --minilmv2.relation_heads 8 --student.shape 1x16x4 --minilmv2.teacher_layer auto "
    more += "--minilmv2.search.layers 1,2 --minilmv2.search.steps 2 --minilmv2.search.probe_steps 2"
    arguments = settings(bert, "--data.text.pairs", "false", *more.split())
    folder = here(tmp_path / "run", *arguments)
    found = json.loads((folder / "layer_search.json").read_text())
    assert [each["layer"] for each in found["layers"]] == [1, 2]
    assert found["chosen"] == min(found["layers"], key=lambda each: each["valid_loss"])["layer"]
    for each in found["layers"]:
        probe = folder / "layer-search" / f"layer-{each['layer']}" / "probe"
        assert log_rows(probe)[-1]["valid_loss"] == each["valid_loss"]
    rows = {row.folder: row for row in read_trials(folder / "layer-search")}
    for each in found["layers"]:
        row = rows[f"layer-{each['layer']}/probe"]
        assert row.models["student"].on_validation("loss") == each["valid_loss"]
        assert row.chosen == (each["layer"] == found["chosen"])
    assert (folder / "layer_search.png").is_file()
    assert "chosen" in capsys.readouterr().out
    named = here(tmp_path / "named", *arguments, "--minilmv2.teacher_layer", str(found["chosen"]))
    assert largest_difference(folder, named) == 0
    model, info = AutoModel.from_pretrained(folder / "student", output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"], "a stock model without head"
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (1, 16)
    assert (folder / "student" / "tokenizer.json").is_file()
