import pytest
import torch
import transformers
from references import greedy_answer
from tiny import SETTINGS, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from llmdistill.generation.decode import inference, new_tokens, plan_batches
from llmdistill.generation.refill import NoRepeatedNgram, bytes_of_token, fitting_rows
from llmdistill.generation.row_draws import RowDraws

ENDS = [2, 5, 11]
LIMIT = 30
"""With a prompt of 10 tokens these are all positions of the tiny models."""
PROMPTS = [
    torch.randint(12, 60, (1 + 7 * n % 10,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(8)
]


def answers_of(model, *, at_once, ngram=0, draws=None, count=None, prompts=PROMPTS):
    settings = GenerationConfig(
        max_new_tokens=LIMIT, do_sample=False, eos_token_id=ENDS, pad_token_id=0, no_repeat_ngram_size=ngram
    )
    with inference(model, settings):
        rows = dict(new_tokens(model, prompts, settings, at_once=at_once, draws=draws, count=count))
    return [rows[row] for row in range(len(prompts))]


def alone(model, prompt, ngram=0):
    """The answer without padding, cache and company."""
    answer = greedy_answer(model, prompt, LIMIT, ENDS[0], ngram)
    end = next((place for place, token in enumerate(answer, start=1) if token in ENDS), len(answer))
    return answer[:end]


@pytest.mark.parametrize(
    ("name", "ngram"), [("llama", 0), ("mistral", 3), ("gemma2", 3), ("gpt2", 3), ("opt", 3)], ids=str
)
def test_rows_that_take_each_others_places_answer_as_if_alone(name, ngram):
    model = tiny_model(name, seed=3, scale=3.0).eval()
    expected = [alone(model, prompt, ngram) for prompt in PROMPTS]
    assert answers_of(model, at_once=4, ngram=ngram) == expected
    assert len({len(answer) for answer in expected}) > 2, "of unequal lengths"
    assert answers_of(model, at_once=4, prompts=[]) == []


def test_rows_that_are_done_leave_and_waiting_ones_come():
    model = tiny_model("llama", seed=3, scale=3.0).eval()
    read = []
    hook = model.register_forward_pre_hook(lambda *given: read.append(given[2]["input_ids"].shape), with_kwargs=True)
    answers = answers_of(model, at_once=4)
    hook.remove()
    steps = [rows for rows, width in read[1:] if width == 1]
    assert max(rows for rows, _ in read) == 4
    plain = sum(len(batch) * (max(len(answers[row]) for row in batch) - 1) for batch in plan_batches(PROMPTS, 4))
    # The first token of each answer comes from the pass over its prompt.
    assert sum(map(len, answers)) - len(PROMPTS) <= sum(steps) < 0.8 * plain


def test_samples_of_a_row_depend_on_its_seed_alone():
    model = tiny_model("llama", seed=3).eval()
    expected = [
        answers_of(model, at_once=1, draws=RowDraws([seed]), prompts=[prompt])[0] for seed, prompt in enumerate(PROMPTS)
    ]
    assert len({len(answer) for answer in expected}) > 4
    assert answers_of(model, at_once=3, draws=RowDraws(range(len(PROMPTS)))) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_repeated_ngrams_are_banned_as_by_transformers(size):
    ids = torch.randint(4, (5, 8), generator=torch.Generator().manual_seed(size))
    scores = torch.randn(5, 6)
    expected = transformers.NoRepeatNGramLogitsProcessor(size)(ids, scores)
    assert torch.equal(NoRepeatedNgram(size)(ids, scores), expected)
    assert bool(expected.isinf().any()) == (size < 9)


def test_a_model_with_other_states_answers_batch_by_batch():
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **sizes)).eval()
    assert bytes_of_token(model) is None
    prompts = [PROMPTS[0], PROMPTS[3]]
    expected = [alone(model, prompt) for prompt in prompts]
    assert answers_of(model, at_once=1, prompts=prompts) == expected


def test_memory_of_a_token_and_rows_that_fit():
    settings = SETTINGS["llama"]
    model = tiny_model("llama")
    head = settings["hidden_size"] // settings["num_attention_heads"]
    assert bytes_of_token(model) == 2 * settings["num_hidden_layers"] * settings["num_key_value_heads"] * head * 4
    assert [fitting_rows(free, 10) for free in (0, 9, 10, 39, 40, 99, 5120, 10**9)] == [1, 1, 1, 2, 4, 8, 512, 512]
