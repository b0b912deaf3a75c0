"""What users get wrong, through the main job's own entry: one sentence, exit code 2, before anything is written."""

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

    def run(*arguments: str) -> str:
        capsys.readouterr()  # what the test itself printed
        example = () if "--recipe" in arguments else ("--recipe", "quickstart")
        code = main(["--ds_config", DS, "--output_dir", str(tmp_path / "run"), *example, *arguments])
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


def test_rows_that_cannot_be_learned(fails, tmp_path):
    row = json.dumps({"instruction": "a", "output": " "})
    assert "the answers of all 2 examples are empty" in fails("--data.train", rows(tmp_path / "none.jsonl", row, row))
    data = rows(tmp_path / "asks.jsonl", json.dumps({"instruction": "a", "output": "b", "teacher": "skills"}))
    said = "the teacher 'skills', which is not"
    assert said in fails("--data.train", data, *SEVERAL.split(), "--teacher.average", "rows")


def test_a_length_beyond_the_positions_of_a_model(fails, text, tmp_path):
    for name, positions in (("roberta", 17), ("gpt2", 16)):
        tiny_config(name, max_position_embeddings=positions).save_pretrained(tmp_path / name)
    teacher = ("--teacher.model", str(tmp_path / "roberta"), "--student.factorize.rank", "2", "--method", "kd")
    said = f"data.max_length is 17, but teacher.model {tmp_path / 'roberta'} has positions for 16"
    assert said in fails(*text, *teacher, "--data.max_length", "17")
    student = ("--student.model", str(tmp_path / "gpt2"), "--method", "sft")
    lengths = ("--data.max_prompt_length", "8", "--data.max_length", "17")
    assert "has positions for 16; give that or less" in fails(*student, *lengths)


@pytest.fixture
def text(tmp_path):
    """Arguments of a run on text."""
    recipe, file = tmp_path / "text.yaml", rows(tmp_path / "text.txt", "one line", "another", "", "the end")
    return ("--recipe", rows(recipe, f"data: {{kind: text, train: {file}, max_length: 32}}"))


def encoder(tmp_path, kind=BertConfig, architecture="BertForPreTraining"):
    """A folder with nothing but a config, which is all that is looked at."""
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 96}
    kind(**sizes, architectures=[architecture]).save_pretrained(tmp_path / "teacher")
    return ("--teacher.model", str(tmp_path / "teacher"))


WEIGHTED = "--student.factorize.weighting gradients"
BY_LOSS = f"{WEIGHTED} --student.factorize.rank null --student.factorize.allocation loss"
SAMPLED = "--method kd --kd.divergence log_ratio"
OWN = "--kd.ratio 1 --data.on_policy 1"
SEVERAL = "--method kd --teacher.others.b.model embedded:teacher"
PACKED = "--student.quantize.packed true"
INT8, INT4 = (f"--student.quantize.weights {each}" for each in ("int8", "int4"))
KRONECKER = "--student.method kronecker --student.factorize.target_params null --student.factorize.shapes {'*':8x8}"
SHAPE = "--student.shape 2x32x4"
NO_TERM = "--distilbert.soft 0 --distilbert.label 0 --distilbert.cosine 0"
MISFITS = {
    "instructions": [
        (f"--student.model embedded:teacher {WEIGHTED}", "student.model embedded:teacher is not factorized"),
        (
            "--method kd --student.init important --student.shape 2x64x4 --student.factorize.calibration.data no.jsonl",
            "no.jsonl: no such file",
        ),
        (f"{BY_LOSS} --student.factorize.target_params 5%", "rank 1 for every linear, the smallest allocation"),
        (
            "--student.factorize.weighting none --student.factorize.calibration.data embedded:valid",
            "is embedded:valid, but nothing is measured on it",
        ),
        (
            "--train.keep_best score --data.train embedded:train --data.valid null",
            "no validation set: name one as data",
        ),
        ("--method sft --data.on_policy 0.5", "data.on_policy is 0.5, but method sft"),
        (SAMPLED, "kd.divergence is log_ratio, but data.on_policy is 0"),
        (f"{SAMPLED} {OWN} --kd.temperature 2", "kd.divergence is log_ratio, but kd.temperature is not 1"),
        (f"{SAMPLED} {OWN} --teacher.url http://a --teacher.top_k 5", "kd.divergence is log_ratio, but teacher.url"),
        (f"--method kd {OWN} --data.rollout.url http://a {INT8}", "http://a, but student.quantize.weights is int8"),
        ("--teacher.others.b.model embedded:teacher", "method makd compares more than tokens; take --method kd"),
        (f"{SEVERAL} --teacher.average rows", "no row has the key teacher with the value 'b'"),
        (f"{SEVERAL} --teacher.others.b.weight 0", "others.b.weight is 0.0: give a number over 0"),
        (
            f'{SEVERAL} --teacher.others.b.sharding zero3 --teacher.others.b.zero {{"offload_param":{{"device":1}}}}',
            "teacher.others.b.zero: offload_param.device is 1: DeepSpeed refuses it (input should be",
        ),
        (f"{SEVERAL} --teacher.others.b.wieght 1", "teacher.others: wieght is no setting of its entries"),
        ("--method kd --teacher.average rows", "teacher.average is rows, but there is one teacher"),
        ('--teacher.zero {"stage3_prefetch_bucket_size":1}', "set sharding to node or zero3"),
        ('--teacher.sharding zero3 --teacher.zero {"stage":2}', "sets the stage"),
        (f"--method kd {OWN} --data.rollout.url http://localhost:9", "localhost:9: no server answers there"),
        ("--method kd --teacher.url http://localhost:9 --teacher.top_k 5", "localhost:9: no server answers there"),
        (f"{INT4} --ds_config zero3", "ZeRO-3 keeps shares: take ZeRO-2"),
        (f"{INT4} --student.lora.rank 4", "student.lora.rank 4 trains adapters instead"),
        (PACKED, "no weights: give student.quantize.weights int8 or int4"),
        (f"{INT8} {PACKED}", "leave it out for int8"),
        (f"{INT4} {KRONECKER}", "Kronecker factors are none: take student.method svd"),
    ],
    "text": [
        (
            "--student.factorize.rank 2 --train.keep_best score --data.valid b.txt",
            "have only a validation loss: take loss",
        ),
        ("--method kd --student.shape 2x32x4 --data.text.pairs true", "text.pairs is true, but llama is a decoder"),
        ("--method seqkd", "method seqkd learns answers"),
        ("--data.train embedded:train", "holds instructions, but data.kind is text"),
        ("--data.tests.a b.jsonl", "data.tests.a b.jsonl is no text, but data.kind is text"),
        ('--method sft --also ["minilm"]', "method sft has no teacher"),
        ("--student.assistant_training.steps 9", "give student.assistants"),
        ("--minilm.teacher_layers uniform --minilm.teacher_layer 2", "leave one of them out"),
        (NO_TERM, "no term is left"),
    ],
    "encoder": [
        (SHAPE, "factorize the teacher"),
        ("--data.text.next_sentence true --data.text.pairs false", "next_sentence is true, but data.text.pairs is"),
        ("--method minilmv2 --minilmv2.teacher_layer auto", "name a text there"),
    ],
}
"""What the data, and the teacher, are -> more arguments of the run, and what is said of them."""


@pytest.mark.parametrize(("kind", "words", "said"), [(kind, *each) for kind in MISFITS for each in MISFITS[kind]])
def test_settings_that_do_not_fit(fails, text, tmp_path, kind, words, said):
    given = {"instructions": (), "text": text, "encoder": (*text, *encoder(tmp_path))}[kind]
    assert said in fails(*given, *words.split())


def test_architectures_that_a_method_does_not_know(fails, tmp_path):
    teacher = ("--teacher.model", str(tmp_path))
    rows(tmp_path / "config.json", json.dumps({"model_type": "t5"}))
    assert "t5 has an encoder beside its decoder" in fails(*teacher)
    rows(tmp_path / "config.json", json.dumps({"model_type": "bloom", "vocab_size": 300}))
    assert "bloom has no entry in FAMILIES" in fails(*teacher, "--method", "makd")
    BertConfig().save_pretrained(tmp_path)
    assert "is an encoder (bert)" in fails(*teacher)


def test_student_with_other_tokens(fails, tmp_path):
    student = shutil.copytree(locate("embedded:teacher"), tmp_path / "student")
    content = json.loads((student / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (student / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    said = fails("--student.model", str(student), "--method", "makd")
    assert "different tokenizers, first at id" in said
    assert "take --method kd, which compares the text that both read" in said


def test_padded_vocabulary_is_trimmed_and_said(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    student = shutil.copytree(locate("embedded:teacher"), tmp_path / "student")
    config = json.loads((student / "config.json").read_text(encoding="utf-8"))
    (student / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 64}))
    assert main(["--ds_config", DS, "--student.model", str(student), "--method", "kd", "--dry_run", "--json"]) == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert "the 64 rows beyond those both have are padding" in note


def test_a_head_that_a_teacher_lacks(fails, text, tmp_path):
    words = ("--student.factorize.rank", "4", "--data.text.next_sentence", "true")
    said = fails(*text, *encoder(tmp_path, RobertaConfig, "RobertaForMaskedLM"), *words)
    assert "roberta has no next-sentence head" in said


def test_weights_of_few_bits_are_not_trained_on(fails, tmp_path):
    pytest.importorskip("torchao")
    from llmdistill.config.student import QuantizeConfig
    from llmdistill.models.load import load_model
    from llmdistill.models.quantized import quantize

    model = load_model(locate("embedded:teacher"), dtype="auto")
    quantize(model, QuantizeConfig(weights="int8"))
    model.save_pretrained(tmp_path / "small")
    shutil.copy(locate("embedded:teacher") / "tokenizer.json", tmp_path / "small")
    assert "small has int8 weights, which cannot be trained" in fails("--student.model", str(tmp_path / "small"))
    sharded = ("--teacher.model", str(tmp_path / "small"), "--teacher.sharding", "zero3")
    assert "the int8 weights of" in fails(*sharded)
