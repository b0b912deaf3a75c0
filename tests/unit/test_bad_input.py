"""What users get wrong, through the main job's own entry: one sentence, exit code 2, before anything is written."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, BertConfig, GPT2Config, LlamaConfig, LlamaForCausalLM, RobertaConfig

from llmdistill.config import DataConfig, RunConfig
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.tasks import make_task
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


def test_missing_data(fails):
    assert "nowhere.jsonl: no such file" in fails("--data.train", "nowhere.jsonl")


def test_malformed_data_names_the_line(fails, tmp_path):
    good = json.dumps({"instruction": "a", "input": "", "output": "b"})
    path = rows(tmp_path / "bad.jsonl", good, '{"instruction": ')
    assert "bad.jsonl:2: not JSON" in fails("--data.train", path)


@pytest.mark.parametrize("setting", ["--data.train", "--data.valid", "--data.tests.mine"])
def test_missing_files_and_first_rows_are_seen_before_the_ranks_join(fails, tmp_path, monkeypatch, setting):
    monkeypatch.setattr("llmdistill.runtime.distributed.process_group", lambda *_: pytest.fail("the ranks join"))
    assert "nowhere.jsonl: no such file" in fails(setting, "nowhere.jsonl")
    bad = rows(tmp_path / "bad.jsonl", json.dumps({"instruction": "a"}))
    assert 'bad.jsonl:1: the key "output" is missing' in fails(setting, bad)


def test_a_missing_text_is_seen_by_its_task():
    task = make_task(RunConfig(ds_config="", data=DataConfig(kind="text", train="nowhere.txt")))
    with pytest.raises(UserError, match=r"nowhere\.txt: no such file"):
        task.check_files()


def test_malformed_test_set_is_seen_before_training(fails, tmp_path):
    path = rows(tmp_path / "bad.jsonl", json.dumps({"instruction": "a"}))
    assert 'bad.jsonl:1: the key "output" is missing' in fails("--data.tests.mine", path)


def test_empty_data(fails, tmp_path):
    assert "empty.jsonl: holds no example" in fails("--data.train", rows(tmp_path / "empty.jsonl"))


@pytest.mark.parametrize("setting", ["--data.train", "--data.valid", "--data.tests.mine"])
def test_a_set_whose_answers_are_all_empty(fails, tmp_path, setting):
    empty, full = (json.dumps({"instruction": "a", "output": text}) for text in (" ", "b"))
    said = fails(setting, rows(tmp_path / "none.jsonl", empty, empty))
    assert "the answers of all 2 examples are empty" in said
    assert "nowhere.jsonl" in fails(
        setting, rows(tmp_path / "one.jsonl", empty, full), "--data.tests.z", "nowhere.jsonl"
    )


def test_a_length_beyond_the_positions_of_a_model(fails, tmp_path):
    sizes = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertConfig(**sizes, intermediate_size=8, max_position_embeddings=16).save_pretrained(tmp_path / "bert")
    RobertaConfig(**sizes, intermediate_size=8, max_position_embeddings=18).save_pretrained(tmp_path / "roberta")
    GPT2Config(vocab_size=30, n_embd=8, n_layer=1, n_head=2, n_positions=16).save_pretrained(tmp_path / "gpt2")
    text = ("--data.kind", "text", "--data.train", rows(tmp_path / "a.txt", "one two"), "--method", "kd")
    for name in ("bert", "roberta"):
        given = ("--teacher.model", str(tmp_path / name), "--student.factorize.rank", "2")
        assert f"data.max_length is 17, but teacher.model {tmp_path / name} has positions for 16" in fails(
            *given, *text, "--data.max_length", "17"
        )
    lengths = ("--data.max_prompt_length", "8", "--data.max_length", "17")
    student = ("--student.model", str(tmp_path / "gpt2"), "--method", "sft")
    assert "has positions for 16; give that or less" in fails(*student, *lengths)


def test_long_prompts_are_counted(fails, tmp_path):
    row = json.dumps({"instruction": "word " * 600, "input": "", "output": "b"})
    said = fails("--data.train", rows(tmp_path / "long.jsonl", row, row))
    assert "2 of 2 prompts are longer than data.max_prompt_length" in said
    assert "long.jsonl:1" in said
    assert "data.long_prompts=drop" in said


def test_rank_beyond_the_matrix(fails):
    said = fails("--student.factorize.rank", "5000")
    assert "5000" in said
    assert "layers.0" in said


WEIGHTED = ("--student.factorize.weighting", "gradients")
BY_LOSS = (*WEIGHTED, "--student.factorize.rank", "null", "--student.factorize.allocation", "loss")


def test_weighting_of_a_student_that_is_given(fails):
    said = fails("--recipe", "quickstart", "--student.model", "embedded:teacher", *WEIGHTED)
    assert "student.factorize.weighting is gradients, but student.model embedded:teacher is not factorized" in said
    said = fails("--student.shape", "2x64x4", "--student.factorize.embedding_rank", "8", *WEIGHTED)
    assert "student.shape 2x64x4 is not factorized by this run" in said


IMPORTANT = ("--recipe", "quickstart", "--method", "kd", "--student.init", "important")


def test_important_parts_of_a_teacher_that_has_fewer(fails):
    said = fails(*IMPORTANT, "--student.shape", "2x256x4")
    assert "student.init important takes a part, but the student's width of 256 is more than the teacher's 128" in said
    assert "a student of 7 layers cannot be made of a teacher's 6" in fails(*IMPORTANT, "--student.shape", "7x64x4")
    said = fails(*IMPORTANT, "--student.shape", "2x96x3")
    assert "3 heads cannot share keys and values 2 at a time" in said
    assert "take a multiple of 2" in said


def test_important_parts_without_calibration_data(fails):
    calibration = ("--student.factorize.calibration.data", "nowhere.jsonl")
    assert "nowhere.jsonl: no such file" in fails(*IMPORTANT, "--student.shape", "2x64x4", *calibration)


def test_ranks_by_loss_without_a_target_or_with_one_out_of_reach(fails):
    no_target = ("--student.factorize.target_params", "null")
    assert "give target_params and weighting gradients" in fails("--recipe", "quickstart", *BY_LOSS, *no_target)
    said = fails("--recipe", "quickstart", *BY_LOSS, "--student.factorize.target_params", "5%")
    assert (
        "target_params 5% is out of reach: rank 1 for every linear, the smallest allocation, has 146,608 parameters"
        in said
    )


def test_calibration_data_that_are_not_there(fails):
    said = fails("--recipe", "quickstart", *WEIGHTED, "--student.factorize.calibration.data", "nowhere.jsonl")
    assert "nowhere.jsonl: no such file" in said


def test_calibration_data_on_which_nothing_is_measured(fails):
    data = ("--student.factorize.calibration.data", "embedded:valid")
    said = fails("--recipe", "quickstart", "--student.factorize.weighting", "none", *data)
    assert "student.factorize.calibration.data is embedded:valid, but nothing is measured on it" in said
    said = fails("--recipe", "quickstart", "--method", "kd", "--student.shape", "4x128x4", *data)
    assert "nothing is measured on it" in said


def test_batch_that_does_not_divide(fails):
    assert "the nearest that does is 30" in fails("--train.global_batch_size", "32", "--train.micro_batch_size", "5")


def test_ds_config_that_is_not_json(fails, tmp_path):
    assert "z.json:1: not valid JSON" in fails(ds_config=rows(tmp_path / "z.json", "{zero}"))


def test_ds_config_that_disagrees(fails, tmp_path):
    path = rows(tmp_path / "z.json", json.dumps({"train_batch_size": 7, "zero_optimization": {"stage": 2}}))
    assert "z.json: train_batch_size is 7, but the run says" in fails(ds_config=path)


def test_unknown_architecture(fails, tmp_path):
    rows(tmp_path / "config.json", json.dumps({"model_type": "blom", "architectures": ["BloomForCausalLM"]}))
    said = fails("--teacher.model", str(tmp_path))
    assert "does not know the model_type 'blom'" in said
    rows(tmp_path / "config.json", json.dumps({"model_type": "t5"}))
    assert "t5 has an encoder beside its decoder" in fails("--teacher.model", str(tmp_path))
    rows(tmp_path / "config.json", json.dumps({"model_type": "bloom", "vocab_size": 300}))
    said = fails("--teacher.model", str(tmp_path), "--method", "makd")
    assert "bloom has no entry in FAMILIES" in said
    assert "take method sft, kd or seqkd" in said


def test_encoder_is_refused(fails, tmp_path):
    BertConfig().save_pretrained(tmp_path)
    assert "is an encoder (bert)" in fails("--teacher.model", str(tmp_path))


def test_student_with_another_vocabulary(fails, tmp_path):
    config = AutoConfig.from_pretrained(locate("embedded:teacher"))
    student = tmp_path / "student"
    other = LlamaConfig(**{**config.to_dict(), "vocab_size": config.vocab_size + 3})
    LlamaForCausalLM(other).save_pretrained(student)
    said = fails("--student.model", str(student))
    assert f"a vocabulary of {config.vocab_size} tokens" in said
    assert f"one of {config.vocab_size + 3}" in said


def test_student_with_other_tokens(fails, tmp_path):
    source, student = locate("embedded:teacher"), tmp_path / "student"
    shutil.copytree(source, student)
    tokenizer = json.loads((student / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (student / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    said = fails("--student.model", str(student))
    assert "different tokenizers, first at id" in said
    assert "llmdistill generate, then --method seqkd" in said
    assert "different tokenizers" in fails("--student.model", str(student), "--method", "kd")


def test_padded_vocabulary_is_trimmed_and_said(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    student = tmp_path / "student"
    shutil.copytree(locate("embedded:teacher"), student)
    config = json.loads((student / "config.json").read_text(encoding="utf-8"))
    padded = {**config, "vocab_size": config["vocab_size"] + 64}
    (student / "config.json").write_text(json.dumps(padded), encoding="utf-8")
    assert main(["--ds_config", DS, "--student.model", str(student), "--method", "kd", "--dry_run", "--json"]) == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert "64 rows" in note
    assert "padding" in note


def test_own_answers_without_a_teacher(fails):
    assert "data.on_policy is 0.5, but method sft" in fails("--method", "sft", "--data.on_policy", "0.5")


def test_divergence_out_of_range(fails):
    assert "kd.beta is 1.5" in fails("--method", "kd", "--kd.beta", "1.5")
    assert "forward_kl" in fails("--method", "kd", "--kd.divergence", "forward")


def test_validation_reference_without_output(fails, tmp_path):
    path = rows(tmp_path / "bad.jsonl", json.dumps({"instruction": "a", "input": ""}))
    assert 'bad.jsonl:1: the key "output" is missing' in fails("--data.valid", path)


def test_test_set_with_the_name_of_the_validation_set(fails):
    assert "data.tests.valid" in fails("--data.tests.valid", "embedded:seen")


def test_stream_that_is_malformed_is_seen_before_anything(fails, tmp_path):
    path = rows(tmp_path / "bad.jsonl", '{"instruction": ')
    assert "bad.jsonl:1: not JSON" in fails("--data.train", path, "--data.streaming", "true")


def test_adapter_without_its_base(fails, tmp_path):
    rows(tmp_path / "adapter_config.json", json.dumps({"base_model_name_or_path": str(tmp_path / "gone")}))
    said = fails("--teacher.model", str(tmp_path))
    assert "gone" in said


def test_teacher_without_weights(tmp_path, capsys):
    from llmdistill.models.load import load_model

    shutil.copy(locate("embedded:teacher") / "config.json", tmp_path)
    with pytest.raises(ValueError, match="weights"):
        load_model(tmp_path, dtype=torch.float32)


def test_a_best_student_needs_a_validation_that_can_tell(fails, tmp_path):
    best = ("--train.keep_best", "score")
    assert "no validation set: name one as data.valid" in fails(
        *best, "--data.train", "embedded:train", "--data.valid", "null"
    )
    text = ("--data.kind", "text", "--data.train", rows(tmp_path / "a.txt", "one two"), "--data.valid", "b.txt")
    text += ("--data.tests", "{}")
    assert "have only a validation loss: take loss" in fails(*best, *text)
