"""What users get wrong, through the main job's own entry: one sentence, exit code 2, before anything is written."""

from __future__ import annotations

import json
import shutil

import pytest
from tiny import tiny_config
from transformers import BertConfig, RobertaConfig

from llmdistill.embedded import locate
from llmdistill.train import main

DS = "ds_configs/zero2.json"


@pytest.fixture
def fails(tmp_path, capsys, monkeypatch):
    """Run the main job on a mistake; gives the sentence."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def run(*arguments: str, ds_config: str = DS) -> str:
        capsys.readouterr()  # what the test itself printed
        example = () if "--recipe" in arguments else ("--recipe", "quickstart")
        code = main(["--ds_config", ds_config, "--output_dir", str(tmp_path / "run"), *example, *arguments])
        captured = capsys.readouterr()
        assert code == 2
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        assert not (tmp_path / "run").exists()
        return captured.err

    return run


def rows(path, *lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("setting", ["--data.train", "--data.valid", "--data.tests.mine"])
def test_missing_files_and_bad_rows_are_seen_before_the_ranks_join(fails, tmp_path, monkeypatch, setting):
    monkeypatch.setattr("llmdistill.runtime.distributed.process_group", lambda *_: pytest.fail("the ranks join"))
    assert "nowhere.jsonl: no such file" in fails(setting, "nowhere.jsonl")
    bad = rows(tmp_path / "bad.jsonl", json.dumps({"instruction": "a"}))
    assert 'bad.jsonl:1: the key "output" is missing' in fails(setting, bad)


def test_a_set_whose_answers_are_all_empty(fails, tmp_path):
    row = json.dumps({"instruction": "a", "output": " "})
    assert "the answers of all 2 examples are empty" in fails("--data.train", rows(tmp_path / "none.jsonl", row, row))


def test_a_length_beyond_the_positions_of_a_model(fails, tmp_path):
    for name, positions in (("bert", 16), ("roberta", 17), ("gpt2", 16)):
        tiny_config(name, max_position_embeddings=positions).save_pretrained(tmp_path / name)
    text = ("--data.kind", "text", "--data.train", rows(tmp_path / "a.txt", "one two"), "--method", "kd")
    for name in ("bert", "roberta"):
        given = ("--teacher.model", str(tmp_path / name), "--student.factorize.rank", "2", "--data.max_length", "17")
        said = f"data.max_length is 17, but teacher.model {tmp_path / name} has positions for 16"
        assert said in fails(*given, *text)
    lengths = ("--data.max_prompt_length", "8", "--data.max_length", "17")
    student = ("--student.model", str(tmp_path / "gpt2"), "--method", "sft")
    assert "has positions for 16; give that or less" in fails(*student, *lengths)


def test_long_prompts_are_counted(fails, tmp_path):
    row = json.dumps({"instruction": "word " * 600, "input": "", "output": "b"})
    said = fails("--data.train", rows(tmp_path / "long.jsonl", row, row))
    assert "2 of 2 prompts are longer than data.max_prompt_length" in said
    assert "long.jsonl:1" in said
    assert "data.long_prompts=drop" in said


FACTORIZE = "--student.factorize."
WEIGHTED = (f"{FACTORIZE}weighting", "gradients")
BY_LOSS = (*WEIGHTED, f"{FACTORIZE}rank", "null", f"{FACTORIZE}allocation", "loss", f"{FACTORIZE}target_params")
ON_VALID = (f"{FACTORIZE}calibration.data", "embedded:valid")
SAMPLED = ("--method", "kd", "--kd.divergence", "log_ratio")
OWN = ("--kd.ratio", "1", "--data.on_policy", "1")
IMPORTANT = ("--method", "kd", "--student.init", "important", "--student.shape")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--student.model", "embedded:teacher", *WEIGHTED), "student.model embedded:teacher is not factorized"),
        ((*IMPORTANT, "2x64x4", f"{FACTORIZE}calibration.data", "nowhere.jsonl"), "nowhere.jsonl: no such file"),
        (
            (*BY_LOSS, "5%"),
            "target_params 5% is out of reach: rank 1 for every linear, the smallest allocation, has 146",
        ),
        ((f"{FACTORIZE}weighting", "none", *ON_VALID), "is embedded:valid, but nothing is measured on it"),
        (("--method", "sft", "--data.on_policy", "0.5"), "data.on_policy is 0.5, but method sft"),
        (SAMPLED, "kd.divergence is log_ratio, but data.on_policy is 0"),
        ((*SAMPLED, *OWN, "--kd.temperature", "2"), "kd.divergence is log_ratio, but kd.temperature is not 1"),
        (
            (*SAMPLED, *OWN, "--teacher.url", "http://a", "--teacher.top_k", "5"),
            "kd.divergence is log_ratio, but teacher.url",
        ),
        (
            ("--method", "kd", *OWN, "--data.rollout.url", "http://a", "--student.quantize.weights", "int8"),
            "data.rollout.url is http://a, but student.quantize.weights is int8",
        ),
    ],
)
def test_settings_that_do_not_fit(fails, arguments, said):
    assert said in fails(*arguments)


def test_architectures_that_a_method_does_not_know(fails, tmp_path):
    teacher = ("--teacher.model", str(tmp_path))
    rows(tmp_path / "config.json", json.dumps({"model_type": "t5"}))
    assert "t5 has an encoder beside its decoder" in fails(*teacher)
    rows(tmp_path / "config.json", json.dumps({"model_type": "bloom", "vocab_size": 300}))
    assert "bloom has no entry in FAMILIES" in fails(*teacher, "--method", "makd")
    BertConfig().save_pretrained(tmp_path)
    assert "is an encoder (bert)" in fails(*teacher)


@pytest.fixture
def copied(tmp_path):
    """A copy of the embedded teacher, of which a JSON file is changed."""
    folder = tmp_path / "student"
    shutil.copytree(locate("embedded:teacher"), folder)

    def change(name, edit):
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        edit(content)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
        return ("--student.model", str(folder), "--method", "kd")

    return change


def test_student_with_other_tokens(fails, copied):
    def swap(content):
        vocabulary = content["model"]["vocab"]
        first, second = list(vocabulary)[300:302]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]

    said = fails(*copied("tokenizer.json", swap), "--method", "makd")
    assert "different tokenizers, first at id" in said
    assert "take --method kd, which compares the text that both read" in said
    assert "llmdistill generate, then --method seqkd" in said


def test_padded_vocabulary_is_trimmed_and_said(copied, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    student = copied("config.json", lambda content: content.update(vocab_size=content["vocab_size"] + 64))
    assert main(["--ds_config", DS, *student, "--dry_run", "--json"]) == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert "the 64 rows beyond those both have are padding" in note


def test_a_best_student_needs_a_validation_that_can_tell(fails, tmp_path):
    best, without = ("--train.keep_best", "score"), ("--data.train", "embedded:train", "--data.valid", "null")
    assert "no validation set: name one as data.valid" in fails(*best, *without)
    text = ("--data.kind", "text", "--data.train", rows(tmp_path / "a.txt", "one two"), "--data.valid", "b.txt")
    assert "have only a validation loss: take loss" in fails(*best, *text, "--data.tests", "{}")


# Text and encoders.


@pytest.fixture
def text(tmp_path):
    """Arguments of a run on text."""
    recipe, file = tmp_path / "text.yaml", tmp_path / "text.txt"
    file.write_text("one line\nanother\n\nthe end\n", encoding="utf-8")
    recipe.write_text(f"data: {{kind: text, train: {file}, max_length: 32}}\n", encoding="utf-8")
    return ("--recipe", str(recipe))


def encoder(tmp_path, kind=BertConfig, architecture="BertForPreTraining"):
    """A folder with nothing but a config, which is all that is looked at."""
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 96}
    kind(**sizes, architectures=[architecture]).save_pretrained(tmp_path / "teacher")
    return ("--teacher.model", str(tmp_path / "teacher"))


NEXT_SENTENCE = ("--data.text.next_sentence", "true")
MINILMV2 = ("--method", "minilmv2", "--student.shape", "2x32x4")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (MINILMV2, "minilmv2.relation_heads is 48: it must divide the width of what is related, 48 in the teacher and"),
        (("--student.shape", "2x32x4"), "factorize the teacher"),
        ((*NEXT_SENTENCE, "--data.text.pairs", "false"), "next_sentence is true, but data.text.pairs is false"),
        (("--method", "minilmv2", "--minilmv2.teacher_layer", "auto"), "name a text there"),
    ],
)
def test_settings_that_do_not_fit_an_encoder(fails, text, tmp_path, arguments, said):
    assert said in fails(*text, *encoder(tmp_path), *arguments)


def test_heads_that_a_teacher_lacks(fails, text, tmp_path):
    rank = ("--student.factorize.rank", "4")
    roberta = encoder(tmp_path, RobertaConfig, "RobertaForMaskedLM")
    assert "roberta has no next-sentence head" in fails(*text, *roberta, *rank, *NEXT_SENTENCE)
    decoder = ("--method", "kd", "--student.shape", "2x32x4", "--data.text.pairs", "true")
    assert "data.text.pairs is true, but llama is a decoder" in fails(*text, *decoder)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--method", "seqkd"), "method seqkd learns answers"),
        (("--data.train", "embedded:train"), "holds instructions, but data.kind is text"),
        (("--data.tests.a", "b.jsonl"), "data.tests.a b.jsonl is no text, but data.kind is text"),
        (("--method", "sft", "--also", '["minilm"]'), "method sft has no teacher"),
        (("--student.assistant_training.steps", "9"), "give student.assistants"),
        (("--minilm.teacher_layers", "uniform", "--minilm.teacher_layer", "2"), "leave one of them out"),
        (("--distilbert.soft", "0", "--distilbert.label", "0", "--distilbert.cosine", "0"), "no term is left"),
    ],
)
def test_settings_of_a_text_that_contradict(fails, text, arguments, said):
    assert said in fails(*text, *arguments)


FEW_BITS = ("--student.quantize.weights", "int4")


@pytest.mark.parametrize(
    ("arguments", "ds_config", "said"),
    [
        (FEW_BITS, "zero3", "ZeRO-3 keeps shares: take ZeRO-2"),
        ((*FEW_BITS, "--student.lora.rank", "4"), DS, "student.lora.rank 4 trains adapters instead"),
        (("--student.quantize.packed", "true"), DS, "no weights: give student.quantize.weights int8 or int4"),
        (("--student.quantize.weights", "int8", "--student.quantize.packed", "true"), DS, "leave it out for int8"),
        (
            (
                *FEW_BITS,
                "--student.method",
                "kronecker",
                f"{FACTORIZE}target_params",
                "null",
                f"{FACTORIZE}shapes",
                "{'*': 8x8}",
            ),
            DS,
            "Kronecker factors are none: take student.method svd",
        ),
    ],
)
def test_students_of_few_bits_that_cannot_learn(fails, arguments, ds_config, said):
    assert said in fails(*arguments, ds_config=ds_config)


def test_weights_of_few_bits_are_not_trained_on(fails, tmp_path):
    pytest.importorskip("torchao")
    from llmdistill.config import QuantizeConfig
    from llmdistill.models.load import load_model
    from llmdistill.models.quantized import quantize

    model = load_model(locate("embedded:teacher"), dtype="auto")
    quantize(model, QuantizeConfig(weights="int8"))
    model.save_pretrained(tmp_path / "small")
    shutil.copy(locate("embedded:teacher") / "tokenizer.json", tmp_path / "small")
    assert "small has int8 weights, which cannot be trained" in fails("--student.model", str(tmp_path / "small"))
    sharded = ("--teacher.model", str(tmp_path / "small"), "--teacher.sharding", "zero3")
    assert "the int8 weights of" in fails(*sharded)
