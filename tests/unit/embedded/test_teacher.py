from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.data.instruct import Limits, encode_prompts
from llmdistill.data.sources import read_examples
from llmdistill.embedded import corpus, locate
from llmdistill.generation.decode import Decoding, generate_passes
from llmdistill.runtime.distributed import World
from llmdistill.tasks.rouge import rouge_l


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(locate("embedded:teacher"))


@pytest.fixture(scope="module")
def teacher() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(locate("embedded:teacher")).eval()


@pytest.mark.parametrize(
    "text", ["ÄÖ ß", "日本語\n\t", "🙂🙃 \u200d \x00", "  two  spaces ,  and 1234 .", "Ünïcödé's don't"]
)
def test_tokenizer_takes_any_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_teacher_is_a_small_llama(teacher: PreTrainedModel) -> None:
    config = teacher.config
    assert config.model_type == "llama"
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert next(teacher.parameters()).dtype == torch.float32
    assert 1_000_000 < teacher.num_parameters() < 1_300_000


def test_teacher_reaches_its_score(teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    claimed = json.loads((locate("embedded:teacher") / "scores.json").read_text())["scores"]
    for split in corpus.TESTS:
        examples = read_examples(locate(f"embedded:{split}"))
        settings = Decoding(sample=False, no_repeat_ngram_size=6, batch_size=80)
        prompts = encode_prompts(examples, tokenizer, Limits()).ids
        limits = {"max_prompt_length": 256, "max_length": 512, "seeds": [0], "world": World.alone()}
        (found,) = generate_passes(teacher, tokenizer, prompts, settings, **limits)
        assert rouge_l(found.texts, [list(example.outputs) for example in examples]) == pytest.approx(
            claimed[split], abs=1.0
        )
