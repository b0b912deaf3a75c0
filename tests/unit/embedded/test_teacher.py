import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmdistill.data.instruct import Limits, encode_prompts
from llmdistill.data.sources import read_examples
from llmdistill.embedded import locate
from llmdistill.generation.decode import Decoding, generate_passes
from llmdistill.tasks.rouge import rouge_l


def test_teacher_reaches_its_score_and_its_tokenizer_takes_any_text():
    tokenizer = AutoTokenizer.from_pretrained(locate("embedded:teacher"))
    for text in ("ÄÖ ß", "日本語\n\t", "🙂🙃 \u200d \x00", "  two  spaces ,  and 1234 .", "Ünïcödé's don't"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    teacher = AutoModelForCausalLM.from_pretrained(locate("embedded:teacher"), dtype=torch.float32)
    claimed = json.loads((locate("embedded:teacher") / "scores.json").read_text())["scores"]
    examples = read_examples(locate("embedded:seen"))
    settings = Decoding(sample=False, no_repeat_ngram_size=6, batch_size=80)
    prompt_ids = encode_prompts(examples, tokenizer, Limits()).ids
    (found,) = generate_passes(teacher, tokenizer, prompt_ids, settings, seeds=[0])
    references = [list(example.outputs) for example in examples]
    assert rouge_l(found.texts, references) == pytest.approx(claimed["seen"], abs=1.0)
