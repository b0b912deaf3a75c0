"""What users get wrong with text and encoders, through the main job's own entry: one sentence, nothing written."""

from __future__ import annotations

import pytest
from transformers import BertConfig, RobertaConfig

from llmdistill.train import main

CHAIN = ("--method", "minilmv2", "--minilmv2.relation_heads", "4", *("--student.shape", "2x32x4"))
CHAIN = (*CHAIN, "--student.assistants", "4x32x4")


@pytest.fixture
def teacher(tmp_path):
    """Makes a folder with nothing but a config, which is all that is looked at."""

    def make(kind=BertConfig, architecture="BertForPreTraining", **changes):
        folder = tmp_path / "teacher"
        sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 96}
        kind(**{**sizes, **changes, "architectures": [architecture]}).save_pretrained(folder)
        return str(folder)

    return make


@pytest.fixture
def fails(tmp_path, capsys, monkeypatch):
    """Run the main job on text with a mistake in it; gives the sentence."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    recipe = tmp_path / "text.yaml"
    (tmp_path / "text.txt").write_text("one line\nanother\n\nthe end\n", encoding="utf-8")
    recipe.write_text(f"data: {{kind: text, train: {tmp_path / 'text.txt'}, max_length: 32}}\n", encoding="utf-8")

    def run(*arguments: str) -> str:
        output = str(tmp_path / "run")
        code = main(
            ["--ds_config", "ds_configs/zero2.json", "--recipe", str(recipe), "--output_dir", output, *arguments]
        )
        error = capsys.readouterr().err
        assert code == 2
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert not (tmp_path / "run").exists()
        return error

    return run


def test_relation_heads_that_do_not_divide_list_those_that_do(fails, teacher):
    said = fails("--teacher.model", teacher(), "--method", "minilmv2", "--student.shape", "2x32x4")
    assert "minilmv2.relation_heads is 48" in said
    assert "48 in the teacher and 32 in the student; give one of 1, 2, 4, 8, 16" in said


def test_another_number_of_heads_points_to_minilmv2(fails, teacher):
    said = fails("--teacher.model", teacher(), "--method", "minilm", "--student.shape", "2x32x2")
    assert "minilmv2" in said


def test_a_shape_that_is_none(fails, teacher):
    assert "student.shape" in fails("--teacher.model", teacher(), "--method", "minilm", "--student.shape", "2x32")
    said = fails("--teacher.model", teacher(), "--method", "minilm", "--student.shape", "2x32x5")
    assert "1, 2, 4, 8, 16, 32" in said


def test_a_shape_beside_makd_is_refused(fails, teacher):
    assert "factorize the teacher" in fails("--teacher.model", teacher(), "--student.shape", "2x32x4")


def test_next_sentences_where_there_is_no_head_for_them(fails, teacher):
    folder = teacher(RobertaConfig, "RobertaForMaskedLM")
    said = fails("--teacher.model", folder, "--student.factorize.rank", "4", "--data.text.next_sentence", "true")
    assert "roberta has no next-sentence head" in said


def test_pairs_of_a_decoder(fails):
    said = fails("--method", "kd", "--student.shape", "2x32x4", "--data.text.pairs", "true")
    assert "data.text.pairs is true, but llama is a decoder" in said


def test_next_sentences_without_pairs(fails, teacher):
    said = fails("--teacher.model", teacher(), "--data.text.next_sentence", "true", "--data.text.pairs", "false")
    assert "data.text.next_sentence is true, but data.text.pairs is false" in said


def test_terms_on_the_output_of_a_bare_encoder(fails, teacher):
    said = fails("--teacher.model", teacher(architecture="BertModel"), "--student.factorize.rank", "4")
    assert "is a BertModel without language-model head, but logits compare its output" in said


def test_a_search_needs_a_validation_text(fails, teacher):
    said = fails("--teacher.model", teacher(), "--method", "minilmv2", "--minilmv2.teacher_layer", "auto")
    assert "name a text there" in said


def test_a_layer_that_is_not_there(fails, teacher):
    shape = ("--method", "minilmv2", "--minilmv2.relation_heads", "4", "--student.shape", "2x32x4")
    assert "minilmv2.teacher_layer" in fails("--teacher.model", teacher(), *shape, "--minilmv2.teacher_layer", "7")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--method", "seqkd"), "method seqkd learns answers"),
        (("--data.train", "embedded:train"), "holds instructions, but data.kind is text"),
        (("--data.tests.a", "b.jsonl"), "data.tests.a b.jsonl is no text, but data.kind is text"),
        (("--data.text.mask_share", "1.5"), "data.text.mask_share is 1.5"),
        (("--method", "sft", "--also", '["minilm"]'), "method sft has no teacher"),
        (("--also", '["makd"]'), "name each method once"),
        (("--student.assistants", '["2x32x4"]'), "give student.shape"),
        (("--student.assistant_training.steps", "9"), "give student.assistants"),
        (
            (*CHAIN, "--student.assistant_training.stepps", "9"),
            "student.assistant_training.stepps: there is no such setting; did you mean student.assistant_training.s",
        ),
        ((*CHAIN, "--student.assistant_training.steps", "many"), "steps: 'many' does not fit"),
        (
            ("--student.shape", "2x32x4", "--student.assistants", '["2x32x4"]', "--method", "none"),
            "student.assistants teach, but method none has no teacher",
        ),
        (("--minilm.teacher_layers", "uniform", "--minilm.teacher_layer", "2"), "leave one of them out"),
        (("--minilmv2.relations", '["qq", "qq"]'), "each once"),
        (("--minilmv2.relations", '["qx"]'), "qx"),
        (("--tinybert.hidden", "-1"), "tinybert.hidden is -1.0"),
        (("--distilbert.soft", "0", "--distilbert.label", "0", "--distilbert.cosine", "0"), "no term is left"),
    ],
)
def test_settings_that_contradict(fails, arguments, said):
    assert said in fails(*arguments)
