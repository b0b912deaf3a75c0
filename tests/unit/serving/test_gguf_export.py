"""Models as GGUF: what transformers reads from the file is the model, with its tokens and its chat template."""

import shutil

import gguf
import pytest
import torch
from tiny import random_student, shaken, tiny_config, tiny_model
from transformers import (
    AddedToken,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GemmaTokenizer,
    GgufConfig,
    LlamaTokenizer,
)

import llmdistill
from llmdistill import messages
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer

from gguf_model import TEMPLATE, write_gguf

TEACHER = locate("embedded:teacher")
SIZES = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 128}
TEXTS = ["The 1,204 lamps of Orrin – are they bluer\n\tthan 77?", "  Ulma   lives in Marfield.<|end|>", "größe 文本 🦙"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLMDISTILL_CACHE", str(tmp_path / "cache"))


def saved(folder, model):
    """The folder of a model with the tokenizer of the embedded teacher."""
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TEACHER / name, folder)
    return folder


def read(folder, **more):
    options = {"gguf_file": "model.gguf", "dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    return AutoModelForCausalLM.from_pretrained(folder, **options, **more).eval()


@torch.no_grad()
def logits(model):
    ids = torch.randint(3, 1000, (2, 9), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids).logits


@pytest.mark.parametrize(("kind", "changes"), [
    ("llama", {"tie_word_embeddings": True}), ("llama", {"tie_word_embeddings": False, "attention_bias": True}),
    ("mistral", {"sliding_window": None}), ("qwen2", {}), ("qwen3", {"head_dim": 128}),
    ("gemma2", {"query_pre_attn_scalar": 256}), ("gemma3_text", {"num_hidden_layers": 7}),
])  # fmt: skip
def test_transformers_reads_the_model_from_the_file(tmp_path, kind, changes, monkeypatch, caplog):
    monkeypatch.setattr(messages.logger, "propagate", True)
    model = shaken(tiny_model(kind, **SIZES, **changes))
    made = llmdistill.export(saved(tmp_path / "model", model), tmp_path / "out", to="gguf")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"model.gguf", "manifest.json"}
    assert made["weights"] == "f32"
    assert made["comparison"]["changed"] == 0
    assert ("transformers reads attention_bias of a GGUF" if "attention_bias" in changes else "") in caplog.text
    assert ("otherwise" in caplog.text) == ("attention_bias" in changes)
    if "attention_bias" in changes:
        return
    torch.testing.assert_close(logits(read(tmp_path / "out")), logits(model), rtol=0, atol=1e-5)


def test_a_mistral_with_a_window_is_a_llama_in_the_file(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(messages.logger, "propagate", True)
    model = shaken(tiny_model("mistral", **SIZES, sliding_window=16, rope_parameters={"rope_theta": 1e6}))
    # A llama of just this name is one that transformers does not read.
    made = llmdistill.export(saved(tmp_path / "model", model), tmp_path / "mistral", to="gguf")
    again = read(tmp_path / "mistral")
    assert again.config.model_type == "llama"
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=1e-5)  # nine tokens
    assert "differ from the model's after the first 16 tokens" in caplog.text
    assert made["comparison"]["changed"] > 0
    assert "otherwise than the model has" not in caplog.text


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_what_a_gguf_does_not_tell_transformers_is_named(tmp_path, kind, monkeypatch, caplog):
    monkeypatch.setattr(messages.logger, "propagate", True)
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    changes = {"sliding_window": None} if kind == "mistral" else {}
    rope |= {"original_max_position_embeddings": 32}
    model = shaken(tiny_model(kind, **SIZES, **changes, rope_parameters=rope))
    made = llmdistill.export(saved(tmp_path / "model", model), tmp_path / "out", to="gguf")
    assert "transformers reads rope_parameters of a GGUF otherwise" in caplog.text
    assert made["comparison"]["changed"] == 0, "with the model's own settings"
    # What the warning advises; the model's own config is not read with the file of a Mistral.
    advised = 'take AutoConfig.from_pretrained(..., gguf_file="model.gguf"), set the model\'s rope_parameters in it'
    assert advised in caplog.text
    config = AutoConfig.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    config.rope_parameters = model.config.rope_parameters
    torch.testing.assert_close(logits(read(tmp_path / "out", config=config)), logits(model), rtol=0, atol=1e-5)
    factors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "out/model.gguf").tensors}
    frequencies = 1e4 ** (-torch.arange(0, 8, 2) / 8) / torch.tensor(factors["rope_freqs.weight"])
    torch.testing.assert_close(frequencies, model.model.rotary_emb.inv_freq, rtol=1e-5, atol=0)


@pytest.mark.parametrize("weights", ["f16", "bf16", "q8_0"])
def test_a_factorized_student_is_multiplied_out_and_rounded(tmp_path, weights):
    student = random_student(AutoModelForCausalLM, tiny_config("llama", **SIZES), {"rank": 5})
    folder = saved(tmp_path / "student", student)
    made = llmdistill.export(folder, tmp_path / "out", to="gguf", weights=weights)
    kinds = {each.name: each.tensor_type.name for each in gguf.GGUFReader(tmp_path / "out/model.gguf").tensors}
    assert kinds.pop("blk.0.attn_norm.weight") == kinds.pop("output_norm.weight") == "F32"
    assert kinds["blk.0.ffn_up.weight"] == kinds["token_embd.weight"] == weights.upper()
    difference = (logits(read(tmp_path / "out")) - logits(student)).abs().max()
    assert 0 < difference < 0.02 * logits(student).abs().max()
    assert made["params"] == read(tmp_path / "out").num_parameters()


def test_a_student_of_few_bits_becomes_floats(tmp_path):
    student = random_student(AutoModelForCausalLM, tiny_config("llama", **SIZES), {"rank": 5, "embedding_rank": 8})
    llmdistill.export(saved(tmp_path / "student", student), tmp_path / "small", to="int8")
    made = llmdistill.export(tmp_path / "small", tmp_path / "out", to="gguf")
    assert made["comparison"]["changed"] == 0
    small = load_model(tmp_path / "small", dtype=torch.float32, head="saved")
    torch.testing.assert_close(logits(read(tmp_path / "out")), logits(small), rtol=0, atol=1e-5)


NEEDS_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('A system turn is needed') }}{% endif %}" + TEMPLATE
)


@pytest.mark.parametrize("template", [TEMPLATE, NEEDS_SYSTEM], ids=["plain", "needs a system turn"])
def test_the_tokenizer_and_the_template_are_written_or_copied(tmp_path, template):
    folder = saved(tmp_path / "model", tiny_model("llama", **SIZES))
    own = load_tokenizer(folder)
    own.chat_template = template
    own.save_pretrained(folder)
    llmdistill.export(folder, tmp_path / "out", to="gguf")
    written = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    for text in TEXTS:
        assert written(text)["input_ids"] == own(text)["input_ids"]
    assert (written.eos_token_id, written.pad_token_id) == (own.eos_token_id, own.pad_token_id)
    assert written.chat_template == template
    fields = gguf.GGUFReader(tmp_path / "out/model.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == "smollm", "digits are cut apart"
    kinds = fields["tokenizer.ggml.token_type"].contents()
    controls = {number for number, kind in enumerate(kinds) if kind == gguf.TokenType.CONTROL}
    assert controls == set(own.all_special_ids), "the others are text, which llama.cpp shows"
    teacher = write_gguf(TEACHER, tmp_path / "teacher.gguf", begins=True)
    llmdistill.export(folder, tmp_path / "copy", to="gguf", tokenizer_file=str(teacher))
    copied, source = (gguf.GGUFReader(file).fields for file in (tmp_path / "copy/model.gguf", teacher))
    names = {name for name in source if name.startswith("tokenizer.")}
    assert names == {name for name in copied if name.startswith("tokenizer.")}
    assert all(copied[name].contents() == source[name].contents() for name in names)
    other = write_gguf(TEACHER, tmp_path / "other.gguf", tokens=1000)
    with pytest.raises(UserError, match=r"other.gguf has 1,000 tokens, .* give the file of its own teacher"):
        llmdistill.export(folder, tmp_path / "bad", to="gguf", tokenizer_file=str(other))
    # As a teacher it is the model again.
    assert torch.equal(
        logits(load_model(locate(str(tmp_path / "out")), dtype="auto")), logits(load_model(folder, dtype="auto"))
    )


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_tokenizer_of_sentencepiece_is_written(tmp_path, kind):
    words = ["▁the", "▁lamp", "▁lamps", "s"]
    letters = [*"▁abcdehlmpst.", *words]
    specials = ["<pad>", "<eos>", "<bos>", "<unk>"] if kind == "gemma2" else ["<unk>", "<s>", "</s>"]
    tokens = [
        *specials,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *letters[:13],
        "▁t",
        "▁th",
        "▁l",
        "▁la",
        "▁lam",
        *words,
        "  ",
        "    ",
    ]
    merges = [
        ("▁", "t"),
        ("▁t", "h"),
        ("▁th", "e"),
        ("▁", "l"),
        ("▁l", "a"),
        ("▁la", "m"),
        ("▁lam", "p"),
        ("▁lamp", "s"),
        ("  ", "  "),  # sentencepiece's own tokens of spaces, which the list of merges in a GGUF cannot name
    ]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    make = GemmaTokenizer if kind == "gemma2" else LlamaTokenizer
    tokenizer = make(vocab=vocabulary, merges=merges)
    changes = {"query_pre_attn_scalar": 256} if kind == "gemma2" else {}
    model = tiny_model(kind, **{**SIZES, "vocab_size": 512}, **changes)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    llmdistill.export(tmp_path / "model", tmp_path / "out", to="gguf")
    read_back = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    own = load_tokenizer(tmp_path / "model")
    for text in ("the lamps", "the lamp. 7", "  a theß"):
        assert read_back(text)["input_ids"] == own(text)["input_ids"]
    fields = gguf.GGUFReader(tmp_path / "out/model.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    scores, listed = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("scores", "tokens"))
    assert scores[listed.index("▁th")] > scores[listed.index("▁the")] > scores[listed.index("a")]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_tokens_of_sentencepiece_have_the_types_of_llama_cpp(tmp_path, kind):
    """As convert_hf_to_gguf.py writes them: whole tokens with a score of -1000, Gemma's of spaces with real ones."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>"] if kind == "gemma2" else ["<unk>", "<s>", "</s>"]
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁▁", "▁▁▁", "▁a", "<tool>"]
    merges = [("▁", "▁"), ("▁▁", "▁"), ("▁", "a")]
    make = GemmaTokenizer if kind == "gemma2" else LlamaTokenizer
    tokenizer = make(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    changes = {"query_pre_attn_scalar": 256} if kind == "gemma2" else {}
    tiny_model(kind, **{**SIZES, "vocab_size": len(tokens) + 2}, **changes).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    llmdistill.export(tmp_path / "model", tmp_path / "out", to="gguf")
    fields = gguf.GGUFReader(tmp_path / "out/model.gguf").fields
    names = ("tokens", "token_type", "scores")
    listed = list(zip(*(fields[f"tokenizer.ggml.{name}"].contents() for name in names), strict=True))
    kinds = gguf.TokenType
    assert listed[: len(specials)] == [(token, kinds.CONTROL, -1000.0) for token in specials]
    of_user = [("  ", kinds.USER_DEFINED, -1000.0), ("   ", kinds.USER_DEFINED, -1000.0)]
    spaces = of_user if kind == "gemma2" else [("▁▁", kinds.NORMAL, 0.0), ("▁▁▁", kinds.NORMAL, -1.0)]
    assert listed[len(tokens) - 4 : len(tokens)] == [
        *spaces,
        ("▁a", kinds.NORMAL, -2.0),
        ("<tool>", kinds.USER_DEFINED, -1000.0),
    ]
    assert listed[-1][:2] == (f"[PAD{len(tokens) + 1}]", kinds.UNUSED)
    own = load_tokenizer(tmp_path / "model")
    again = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    for text in ("a   a", "  a<tool>  a", "a a    "):
        assert again(text)["input_ids"] == own(text)["input_ids"]


def test_what_has_no_place_in_a_file_is_refused(tmp_path):
    tiny_model("gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UserError, match=r"GPT2LMHeadModel, and transformers reads no GGUF of it; expected a decoder"):
        llmdistill.export(tmp_path / "gpt2", tmp_path / "out", to="gguf")
    folder = saved(tmp_path / "model", tiny_model("llama", **SIZES))
    with pytest.raises(UserError, match=r"weights 'q2' does not fit; expected f32, f16, bf16, q8_0"):
        llmdistill.export(folder, tmp_path / "out", to="gguf", weights="q2")
    assert not (tmp_path / "out").exists()
