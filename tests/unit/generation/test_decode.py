import pytest
import torch
import torch.distributed
from references import greedy_answer
from tiny import tiny_model
from transformers import GenerationConfig
from word_models import word_tokenizer

from llmdistill.data.examples import Example
from llmdistill.data.instruct import Limits, encode_prompts
from llmdistill.generation import decode
from llmdistill.generation.decode import Decoding, HuggingFaceEngine, shared_jobs
from llmdistill.runtime.distributed import World

VOCABULARY = 98
PROMPTS = ["a", "Name three colours.", "bb bb", "What is it?", "x" * 30]
LENGTHS = {"max_prompt_length": 30, "max_length": 60}
GREEDY = Decoding(sample=False, no_repeat_ngram_size=6, batch_size=2, **LENGTHS)
SAMPLED = Decoding(sample=True, batch_size=2, **LENGTHS)


@pytest.fixture
def tokenizer():
    symbols = ["</s>", "[PAD]", "[UNK]", *map(chr, range(32, 127))]
    return word_tokenizer(symbols, marked=False, letters=True, eos_token="</s>")


@pytest.fixture
def model():
    """A random model whose greedy choices are no ties; its config's end token is not the tokenizer's."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "max_position_embeddings": 128}
    return tiny_model("llama", seed=1, **sizes, initializer_range=0.3, eos_token_id=5)


def answers_to(model, tokenizer, prompts, settings, seeds=(0,)):
    return decode.generate_passes(model, tokenizer, tokenizer(prompts)["input_ids"], settings, seeds=seeds)


@pytest.mark.parametrize("ngram", [0, 3])
def test_batching_and_left_padding_do_not_change_greedy_answers(model, tokenizer, ngram):
    settings = Decoding(sample=False, batch_size=3, no_repeat_ngram_size=ngram, **LENGTHS)
    [result] = answers_to(model, tokenizer, PROMPTS, settings)
    prompt_ids = tokenizer(PROMPTS)["input_ids"]
    batches = [[len(prompt_ids[index]) for index in batch] for batch in decode.plan_batches(prompt_ids, 3)]
    assert batches == [[1, 5, 11], [19, 30]], "prompts of similar lengths are together"
    expected = [greedy_answer(model, ids, 30, tokenizer.eos_token_id, ngram) for ids in prompt_ids]
    assert result.texts == [text.strip() for text in tokenizer.batch_decode(expected, skip_special_tokens=True)]
    assert result.tokens == sum(map(len, expected))
    assert result.seconds > 0


def test_the_bar_counts_the_tokens_while_they_are_generated(model, tokenizer, monkeypatch):
    counted = []
    monkeypatch.setattr(decode.TokenCount, "advance", lambda self, tokens: counted.append((self.total, tokens)))
    [result] = answers_to(model, tokenizer, PROMPTS, GREEDY)
    whole = len(PROMPTS) * GREEDY.max_new_tokens
    assert {total for total, _ in counted} == {whole}
    assert sum(tokens for _, tokens in counted) == whole, "also what the answers did not need"
    # A step of a batch counts each of its rows, so there are as many steps as the longest answers have tokens.
    assert len(counted) >= 3 + result.tokens / GREEDY.batch_size


def test_shipped_generation_settings_do_not_count_and_the_model_is_left_as_it_was(model, tokenizer):
    model.train().model.layers[1].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    [expected] = answers_to(model, tokenizer, PROMPTS[:2], SAMPLED)
    shipped = model.generation_config
    shipped.update(do_sample=False, temperature=0.01, top_k=1, top_p=0.1, min_p=0.5, repetition_penalty=9.0)
    shipped.update(suppress_tokens=list(range(10, 60)), min_new_tokens=20)
    [found] = answers_to(model, tokenizer, PROMPTS[:2], SAMPLED)
    assert found.texts == expected.texts
    assert model.generation_config is shipped
    assert {name: module.training for name, module in model.named_modules()} == modes


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.4}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_temperature_top_k_and_top_p_cut_the_distribution(model, tokenizer, settings):
    # 4,000 first tokens against the distribution worked out by hand; chance alone gives a distance of about 0.05.
    count = 4000
    ids = tokenizer("Hello")["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    expected = (logits / settings.get("temperature", 1.0)).softmax(-1)
    order = expected.argsort(descending=True)
    kept = int(settings.get("top_k", VOCABULARY))
    if "top_p" in settings:
        kept = int((expected[order].cumsum(0) < settings["top_p"]).sum()) + 1
    expected[order[kept:]] = 0
    expected /= expected.sum()
    engine = HuggingFaceEngine(model, tokenizer, Decoding(sample=True, max_length=257, **settings))
    drawn = torch.zeros(VOCABULARY)
    for _, (token,) in engine.answer([ids] * count, range(count), count):
        drawn[token] += 1 / count
    assert (drawn - expected).abs().sum() / 2 < 0.08
    assert drawn[expected == 0].sum() == 0
    assert settings or (drawn > 0).sum() > 50, "the library's default is a top-k of 50"


def test_samples_depend_on_the_seed_and_the_place_alone(model, tokenizer):
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    first, other = answers_to(model, tokenizer, ["Hello"] * 4, SAMPLED, seeds=(0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len(set(first.texts)) == 4, "equal prompts in the same batch, and in another one"
    torch.manual_seed(5)
    [again] = answers_to(model, tokenizer, ["Hello"] * 4, SAMPLED)
    assert again.texts == first.texts != other.texts


@pytest.mark.parametrize(("count", "ranks"), [(5, 2), (6, 3), (2, 4)])
def test_every_job_is_one_rank_s_and_shares_differ_by_one(count, ranks):
    worlds = [World(rank=rank, size=ranks, device=torch.device("cpu")) for rank in range(ranks)]

    def jobs_of(world, *, synced):
        with world.entered():
            return list(shared_jobs(count, synced=synced))

    shares = [jobs_of(world, synced=False) for world in worlds]
    assert sorted(number for share in shares for number, _ in share) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    filled = [jobs_of(world, synced=True) for world in worlds]
    assert {len(share) for share in filled} == {-(-count // ranks)}
    assert [[job for job in share if not job[1]] for share in filled] == shares


@pytest.mark.parametrize(("kind", "counts"), [(list, True), (int, True), ("default", False)])
def test_an_answer_stops_at_the_end_tokens_of_the_model(model, tokenizer, kind, counts):
    """As GLM-4 has them in its generation_config.json; an architecture's default in a config.json is none of them."""
    ids = encode_prompts([Example("", "", (), raw_prompt="a")], tokenizer, Limits()).ids
    [(_, row)] = HuggingFaceEngine(model, tokenizer, GREEDY).answer(ids, [0], 1)
    place = next(place for place in range(2, len(row)) if row[place] not in row[:place])
    if kind == "default":
        model.generation_config.eos_token_id = row[place]
    else:
        model.generation_config = GenerationConfig(eos_token_id=[row[place], 97] if kind is list else row[place])
    [(_, found)] = HuggingFaceEngine(model, tokenizer, GREEDY).answer(ids, [0], 1)
    assert found == (row[: place + 1] if counts else row)
    [result] = answers_to(model, tokenizer, ["a"], GREEDY)
    assert (result.texts[0] == tokenizer.decode(row[:place]).strip()) == counts


@pytest.mark.parametrize("refills", [True, False])
def test_an_answer_stops_at_the_end_of_a_turn(model, tokenizer, monkeypatch, refills):
    if not refills:  # as for a model that keeps other states than keys and values
        monkeypatch.setattr(decode, "bytes_of_token", lambda model: None)
    ids = encode_prompts([Example("", "", (), raw_prompt="a")], tokenizer, Limits()).ids
    [(_, row)] = HuggingFaceEngine(model, tokenizer, GREEDY).answer(ids, [0], 1)
    place = next(place for place in range(2, len(row)) if row[place] not in row[:place])
    symbol = tokenizer.convert_ids_to_tokens(row[place])
    # As in Gemma, another token than the end token ends the turns of the template.
    tokenizer.add_special_tokens({"additional_special_tokens": [symbol]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}" + symbol + "{% endfor %}"
    [result] = answers_to(model, tokenizer, ["a"], GREEDY)
    assert (result.texts, result.tokens) == ([tokenizer.decode(row[:place]).strip()], place + 1)
