"""What llama.cpp computes from a GGUF file is what transformers computes from the model."""

import json
import platform

import pytest
import tokenizers
import torch
from tiny import random_student, shaken, tiny_config, tiny_model
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

import llmdistill
from llmdistill import messages
from llmdistill.embedded import locate_data
from llmdistill.serving.gguf_export import _name_of_cut

llama_cpp = pytest.importorskip("xllamacpp")

TEXTS = (
    "The 1,204 lamps of Orrin – are they bluer\n\tthan 77? größe 文本 🦙",
    "don't I'LL we've  THEY'RE 12345678 3.14",
    "  two spaces\n\n\n  x = [1,2];\n\treturn   \n",
    "blue<|im_end|>red",
)
SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256}
NEAR = 0.02
"""llama.cpp keeps keys and values in fp16: log-probabilities differed by up to 0.005."""
GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256}


@pytest.fixture(autouse=True)
def runs_here():
    if platform.machine() == "x86_64" and not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("its wheel needs AVX2")


@pytest.fixture
def rows(tmp_path):
    """One short row, on which the export compares the file with the model."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"instruction": "lamps", "output": "blue"}) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def said(monkeypatch, caplog):
    """The warnings of an export."""
    monkeypatch.setattr(messages.logger, "propagate", True)
    return caplog


def byte_level(*cuts, regex=True, prefix=False):
    """A tokenizer of byte-level BPE with these cuts of the text before it."""
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=regex)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence([*cuts, of_bytes])
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = locate_data("embedded:train").read_text(encoding="utf-8")
    made.train_from_iterator([*text.splitlines(), *TEXTS * 9], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>")


def split(regex):
    return byte_level(pre_tokenizers.Split(tokenizers.Regex(regex), "isolated"), regex=False)


def exported(tmp_path, model, tokenizer, rows):
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    llmdistill.export(folder, tmp_path / "out", to="gguf", data=str(rows))
    return folder, tmp_path / "out" / "model.gguf"


@torch.no_grad()
def compare(folder, file, texts=TEXTS):
    """Return the largest difference of the five highest log-probabilities after each text; inf for other tokens."""
    parameters = llama_cpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.n_parallel, parameters.cpuparams.n_threads, parameters.verbosity = 256, 1, 1, 0
    server = llama_cpp.Server(parameters)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    differences = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        expected = model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        # It tells no probabilities of an answer of an end token or half a character, so it has to choose a letter.
        letter = {"logit_bias": [[tokenizer.convert_tokens_to_ids("a"), 1000.0]]}
        answer = server.handle_completions(
            {"prompt": text, "n_predict": 1, "n_probs": 5, "cache_prompt": False, **letter}
        )
        top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        assert len(top) == 5
        found = max(abs(each["logprob"] - float(expected[each["id"]])) for each in top)
        differences.append(found if answer["usage"]["prompt_tokens"] == len(ids) else torch.inf)
    return differences


@pytest.mark.parametrize(("kind", "changes"), [
    ("llama", {"tie_word_embeddings": False, "attention_bias": True}), ("llama", {"head_dim": 32}),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                                   "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    ("mistral", {"sliding_window": None}), ("qwen2", {}), ("qwen3", {"head_dim": 128}),
    ("gemma2", {**GEMMA, "sliding_window": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}),
    ("gemma3_text", {**GEMMA, "num_hidden_layers": 7, "sliding_window": 8}),
    ("gemma2", {"head_dim": 8, "query_pre_attn_scalar": 16, "num_hidden_layers": 46}),
])  # fmt: skip
def test_the_outputs_are_those_of_the_model(tmp_path, rows, said, kind, changes):
    model = shaken(tiny_model(kind, **SIZES, **changes))
    folder, file = exported(tmp_path, model, byte_level(), rows)
    assert max(compare(folder, file)) < NEAR
    assert "llama.cpp divides" not in said.text


def test_a_factorized_student_is_served(tmp_path, rows):
    student = random_student(AutoModelForCausalLM, tiny_config("llama", **SIZES), {"rank": 5})
    folder, file = exported(tmp_path, student, byte_level(), rows)
    assert max(compare(folder, file)) < NEAR


DIGITS = pre_tokenizers.Digits(individual_digits=True)


@pytest.mark.parametrize(("kind", "make"), [
    pytest.param("qwen2", byte_level, id="gpt-2"), pytest.param("llama", lambda: byte_level(DIGITS), id="smollm"),
    *(pytest.param("llama", lambda name=name: split(GGUF_PRE_TOKENIZER_SPLITS[name]), id=name)
      for name in ("llama-bpe", "qwen2", "tekken", "gpt-4o")),
])  # fmt: skip
def test_text_has_the_same_tokens(tmp_path, rows, said, kind, make):
    folder, file = exported(tmp_path, shaken(tiny_model(kind, **SIZES)), make(), rows)
    assert max(compare(folder, file)) < NEAR
    assert "cuts text" not in said.text


@pytest.mark.parametrize("make", [
    pytest.param(lambda: split(r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"), id="a regex of its own"),
    pytest.param(lambda: byte_level(regex=False), id="no cuts"),
    pytest.param(lambda: byte_level(prefix=True), id="a space before the text"),
])  # fmt: skip
def test_text_that_llama_cpp_cuts_otherwise_is_named(tmp_path, rows, said, make):
    folder, file = exported(tmp_path, shaken(tiny_model("llama", **SIZES)), make(), rows)
    assert max(compare(folder, file)) > NEAR
    assert "llama.cpp knows no rule that cuts text as this tokenizer does" in said.text
    assert "copy the tokenizer of the teacher's GGUF, if there is one, by --tokenizer_file" in said.text


@pytest.mark.parametrize(("kind", "changes", "width"), [
    ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 256}, 16),
    ("gemma3_text", {"head_dim": 32, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}, 32),
])  # fmt: skip
def test_a_gemma_whose_queries_llama_cpp_scales_otherwise_is_named(tmp_path, rows, said, kind, changes, width):
    folder, file = exported(tmp_path, shaken(tiny_model(kind, **SIZES, **changes)), byte_level(), rows)
    assert max(compare(folder, file)) > NEAR
    assert f"llama.cpp divides the queries of this Gemma by the square root of {width}, and the model by" in said.text


@pytest.mark.parametrize(("steps", "name"), [
    ([{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}], "gpt-2"),
    ([{"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}], None),
    ([{"type": "Digits", "individual_digits": True},
      {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}], "smollm"),
    ([{"type": "Digits", "individual_digits": False},
      {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}], None),
    ([{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}, {"type": "Digits"}], None),
])  # fmt: skip
def test_only_a_rule_that_llama_cpp_has_gets_its_name(steps, name):
    assert _name_of_cut(steps) == name
