from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.data.instruct import Limits, encode_prompts
from llmdistill.data.prompts import render_prompt
from llmdistill.data.sources import read_examples
from llmdistill.embedded import FOLDER, SPLITS, corpus, locate
from llmdistill.generation.decode import Decoding, generate_passes
from llmdistill.runtime.distributed import World
from llmdistill.tasks.rouge import rouge_l


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(locate("embedded:teacher"))


@pytest.fixture(scope="module")
def teacher() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(locate("embedded:teacher")).eval()


def test_embedded_files_weigh_at_most_five_megabytes() -> None:
    paths = [Path(root) / name for root, _, names in os.walk(FOLDER) if "__pycache__" not in root for name in names]
    assert sum(path.stat().st_size for path in paths) <= 5_000_000


@pytest.mark.parametrize("split", [*SPLITS, "teacher"])
def test_tokenizer_gives_texts_back(tokenizer: PreTrainedTokenizerBase, split: str) -> None:
    for example in corpus.records(split)[:300]:
        for text in (example["instruction"], example["input"], "".join(example["output"])):
            assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "text", ["ÄÖ ß", "日本語\n\t", "🙂🙃 \u200d \x00", "  two  spaces ,  and 1234 .", "Ünïcödé's don't"]
)
def test_tokenizer_takes_any_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_has_an_end_and_a_pad(tokenizer: PreTrainedTokenizerBase, teacher: PreTrainedModel) -> None:
    assert tokenizer.eos_token_id == teacher.config.eos_token_id == teacher.generation_config.eos_token_id
    assert tokenizer.pad_token_id == teacher.config.pad_token_id
    assert len(tokenizer) == teacher.config.vocab_size


def test_answers_are_allowed_under_the_n_gram_rule(tokenizer: PreTrainedTokenizerBase) -> None:
    """MiniLLM's protocol forbids the same six tokens twice, prompt included, so a right answer must not need them."""
    for split in corpus.TESTS:
        for example in read_examples(locate(f"embedded:{split}")):
            prompt, answer = tokenizer.encode(render_prompt(example)), tokenizer.encode(example.outputs[0])
            ids = prompt + answer
            grams = [tuple(ids[start : start + 6]) for start in range(len(ids) - 5)]
            seen_before = set(grams[: len(prompt) - 5])
            for gram in grams[len(prompt) - 5 :]:
                assert gram not in seen_before, (example, tokenizer.decode(gram))
                seen_before.add(gram)


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
