"""What lies beside the weights of a student: tokenizer, generation settings and modules of sentence-transformers."""

import json

import pytest
import torch
from chat_templates import TEMPLATES, chatting
from safetensors.torch import save_file
from tiny import tiny_config, tiny_model
from transformers import AutoModel, GenerationConfig
from word_models import save_tokenizer

from llmdistill.artifacts import manifest_damage
from llmdistill.config import FactorizeConfig
from llmdistill.config.student import StudentConfig
from llmdistill.students.convert import compress_folder, make_student


@pytest.mark.parametrize(("kind", "ends", "expected"), [
    ("factors", 1, [1, 2]),
    ("shape", [1, 3], [1, 3, 2]), ("shape", [1, 2], [1, 2]), ("shape", 2, 2), ("shape", None, 2),
])  # fmt: skip
def test_a_student_ends_as_its_tokenizer_says_and_has_the_teachers_settings(tmp_path, kind, ends, expected):
    teacher = tmp_path / "teacher"
    tiny_model("llama", vocab_size=5).save_pretrained(teacher)
    save_tokenizer(teacher, ["<s>", "[PAD]", "<|end|>", "[UNK]", "b"], marked=False, eos_token="<|end|>")
    settings = GenerationConfig(do_sample=True, temperature=0.25, bos_token_id=0, eos_token_id=ends)
    settings.save_pretrained(teacher)
    if kind == "factors":
        compress_folder(teacher, tmp_path / "student", StudentConfig(factorize=FactorizeConfig(rank=3)))
    else:
        make_student(teacher, tmp_path / "student", StudentConfig(shape="1x8x2", init="random"), seed=0, head="lm_head")
    settings = json.loads((tmp_path / "student/generation_config.json").read_text())
    assert settings["eos_token_id"] == expected
    assert (settings["temperature"], settings["do_sample"]) == (0.25, True)
    assert manifest_damage(tmp_path / "student") is None


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("ordinary_end", "</turn>"),
        ("glm", "<|user|>"),
        ("channels", "<|return|>"),
        ("chatml", "<|im_end|>"),
        (None, None),
    ],
)
@pytest.mark.parametrize("ends", [None, 1, [1, 3]])
def test_a_student_stops_where_the_chat_template_ends_a_turn(tmp_path, template, end, ends):
    teacher = tmp_path / "teacher"
    tokenizer = chatting(TEMPLATES[template or "chatml"])
    tokenizer.chat_template = tokenizer.chat_template if template else None
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(teacher)
    tokenizer.save_pretrained(teacher)
    GenerationConfig(eos_token_id=ends).save_pretrained(teacher)
    compress_folder(teacher, tmp_path / "student", StudentConfig(factorize=FactorizeConfig(rank=3)))
    # As transformers' generate and vLLM read it.
    found = GenerationConfig.from_pretrained(tmp_path / "student").eos_token_id
    expected = [*([] if ends is None else [1] if ends == 1 else ends), tokenizer.eos_token_id]
    expected += [tokenizer.convert_tokens_to_ids(end)] if end else []
    assert found == (expected if len(expected) > 1 else expected[0])


def sentence_encoder(folder, *, linear=False):
    """A teacher as sentence-transformers saves it, which also names a folder outside of its own."""
    AutoModel.from_config(tiny_config("bert")).save_pretrained(folder)
    modules = ["", "1_Pooling", *(["2_Dense"] if linear else []), "../secret", "3_Normalize"]
    (folder / "modules.json").write_text(json.dumps([{"path": path, "type": "..."} for path in modules]))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 7}')
    (folder / "config_sentence_transformers.json").write_text('{"similarity_fn_name": "cosine"}')
    for name in modules[1:-1]:
        (folder / name).mkdir()
    (folder.parent / "secret/config.json").write_text("{}")
    pooling = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    if linear:
        (folder / "2_Dense/config.json").write_text('{"in_features": 16, "out_features": 4}')
        save_file({"linear.weight": torch.zeros(4, 16)}, folder / "2_Dense/model.safetensors")
        (folder / "2_Dense/pytorch_model.bin").write_bytes(b"a pickle")
    return folder


def names(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


OF_MODELS = {"config.json", "model.safetensors", "manifest.json"}
SETTINGS = {"sentence_bert_config.json", "config_sentence_transformers.json"}
OF_SENTENCES = {"modules.json", "1_Pooling/config.json", *SETTINGS}


def test_a_factorized_student_keeps_the_modules_of_its_sentence_encoder(tmp_path):
    teacher = sentence_encoder(tmp_path / "teacher", linear=True)
    compress_folder(teacher, tmp_path / "student", StudentConfig(factorize=FactorizeConfig(rank=3)))
    of_linear = {"2_Dense/config.json", "2_Dense/model.safetensors"}  # and no pickle
    assert names(tmp_path / "student") == OF_MODELS | OF_SENTENCES | of_linear
    for name in OF_SENTENCES | of_linear:
        assert (tmp_path / "student" / name).read_bytes() == (teacher / name).read_bytes()
    (tmp_path / "student/1_Pooling/config.json").write_text("{}")
    assert "1_Pooling/config.json" in str(manifest_damage(tmp_path / "student"))


@pytest.mark.parametrize(("linear", "files"), [(False, OF_SENTENCES), (True, set())])
def test_a_narrower_student_pools_its_own_width_or_has_no_modules(tmp_path, linear, files):
    teacher = sentence_encoder(tmp_path / "teacher", linear=linear)
    make_student(teacher, tmp_path / "student", StudentConfig(shape="1x8x2", init="random"), seed=0, head="none")
    assert names(tmp_path / "student") == OF_MODELS | files  # a matrix would be of the teacher's width
    if files:
        pooling = json.loads((tmp_path / "student/1_Pooling/config.json").read_text())
        assert pooling == {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True}
