from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from llmdistill.data.examples import Example
from llmdistill.data.instruct import Limits, encode_prompts
from llmdistill.generation.decode import (
    Decoding,
    GenerationResult,
    HuggingFaceEngine,
    answer_batch,
    decode_answers,
    generate_passes,
    plan_batches,
    shared_jobs,
)
from llmdistill.runtime.distributed import World

from support import RankServer

VOCABULARY = 98
END = 0
PROMPTS = ["a", "Name three colours.", "bb bb", "What is it?", "x" * 30]
GREEDY = Decoding(sample=False, no_repeat_ngram_size=6, batch_size=2)
LIMITS = {"max_prompt_length": 30, "max_length": 60, "seed": 0}


def character_tokenizer() -> PreTrainedTokenizerFast:
    symbols = ["</s>", "<pad>", "\n", *(chr(code) for code in range(32, 127))]
    backend = Tokenizer(models.WordLevel({symbol: n for n, symbol in enumerate(symbols)}, unk_token="\n"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")


def tiny_model(kind: str, *, scale: float = 6.0) -> PreTrainedModel:
    """A random model; scale sharpens its logits, so that greedy choices are no ties."""
    torch.manual_seed(1)
    if kind == "llama":
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.3,
        )
        model: PreTrainedModel = LlamaForCausalLM(config)
    else:
        # The config's own end token is not the tokenizer's: it must not count.
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=128,
            initializer_range=0.3,
            eos_token_id=5,
        )
        model = GPT2LMHeadModel(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(scale if kind == "llama" else 1.0)
    return model.eval()


def generate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, ids: Any, settings: Decoding, **limits: Any):
    """One pass in this process."""
    seed = limits.pop("seed")
    return generate_passes(model, tokenizer, ids, settings, seeds=[seed], world=World.alone(), **limits)[0]


def answers_to(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: list[str], settings: Decoding, seed: int = 0
) -> GenerationResult:
    return generate(model, tokenizer, tokenizer(prompts)["input_ids"], settings, **{**LIMITS, "seed": seed})


def naive_greedy(model: PreTrainedModel, prompt_ids: list[int], limit: int, ngram: int) -> list[int]:
    """One prompt, no padding, no cache, an n-gram of prompt and answer never twice."""
    ids = list(prompt_ids)
    for _ in range(limit):
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0, -1]
        for start in range(len(ids) - ngram + 1) if ngram else ():
            if ids[start : start + ngram - 1] == ids[len(ids) - ngram + 1 :]:
                scores[ids[start + ngram - 1]] = -torch.inf
        ids.append(int(scores.argmax()))
        if ids[-1] == END:
            break
    return ids[len(prompt_ids) :]


@pytest.mark.parametrize(("kind", "ngram"), [("llama", 0), ("gpt2", 3)])
def test_batching_and_left_padding_do_not_change_greedy_answers(kind: str, ngram: int) -> None:
    model, tokenizer = tiny_model(kind), character_tokenizer()
    settings = Decoding(sample=False, batch_size=3, no_repeat_ngram_size=ngram)
    result = answers_to(model, tokenizer, PROMPTS, settings)
    expected = [naive_greedy(model, ids, 30, ngram) for ids in tokenizer(PROMPTS)["input_ids"]]
    texts = tokenizer.batch_decode(expected, skip_special_tokens=True)
    assert result.texts == [text.strip() for text in texts]
    assert result.tokens == sum(map(len, expected))
    assert result.seconds > 0


def test_shipped_generation_settings_do_not_count() -> None:
    model, tokenizer = tiny_model("llama"), character_tokenizer()
    settings = Decoding(sample=True, no_repeat_ngram_size=6, batch_size=2)
    expected = answers_to(model, tokenizer, PROMPTS, settings).texts
    shipped = model.generation_config
    for key, value in {
        "do_sample": False,
        "temperature": 0.01,
        "top_k": 1,
        "top_p": 0.1,
        "min_p": 0.5,
        "repetition_penalty": 9.0,
        "eos_token_id": [7, 8, 9],
        "suppress_tokens": list(range(10, 60)),
        "min_new_tokens": 20,
    }.items():
        setattr(shipped, key, value)
    assert answers_to(model, tokenizer, PROMPTS, settings).texts == expected
    assert model.generation_config is shipped


def test_batches_of_the_plan_answer_alone_as_they_do_together() -> None:
    # What a resumed run rests on: a batch depends on its number and on nothing that was generated before.
    model, tokenizer = tiny_model("gpt2"), character_tokenizer()
    settings = Decoding(sample=True, batch_size=2)
    ids = tokenizer(PROMPTS)["input_ids"]
    together = generate(model, tokenizer, ids, settings, **LIMITS)
    batches = plan_batches(ids, 2)
    assert [[len(ids[index]) for index in batch] for batch in batches] == [[1, 5], [11, 19], [30]]
    engine = HuggingFaceEngine(model, tokenizer, settings, max_new_tokens=30)
    alone: dict[int, list[int]] = {}
    for number in (2, 0, 1):
        alone.update(answer_batch(engine, ids, batches, number, LIMITS["seed"]))
    rows = [alone[index] for index in range(len(ids))]
    assert decode_answers(rows, tokenizer) == together.texts
    assert sum(map(len, rows)) == together.tokens


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.4}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_temperature_top_k_and_top_p_cut_the_distribution(settings: dict[str, float]) -> None:
    # 4,000 first tokens against the distribution worked out by hand; chance alone gives a distance of about 0.05, and
    # a top-k of 50, the library's default, 0.09.
    model, tokenizer = tiny_model("llama", scale=1.0), character_tokenizer()
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
    engine = HuggingFaceEngine(model, tokenizer, Decoding(sample=True, **settings), max_new_tokens=1)
    drawn = torch.zeros(VOCABULARY)
    for (token,) in engine.answer([ids] * count, [7]):
        drawn[token] += 1 / count
    assert (drawn - expected).abs().sum() / 2 < 0.08
    assert drawn[expected == 0].sum() == 0


def test_samples_depend_on_the_seed_alone() -> None:
    model, tokenizer = tiny_model("gpt2"), character_tokenizer()
    settings = Decoding(sample=True, no_repeat_ngram_size=6, batch_size=2)

    def sample(seed: int) -> list[str]:
        return answers_to(model, tokenizer, ["a", "b"], settings, seed).texts

    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    first = sample(0)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(5)
    assert sample(0) == first
    assert sample(1) != first


def test_equal_prompts_in_different_batches_get_different_samples() -> None:
    model, tokenizer = tiny_model("gpt2"), character_tokenizer()
    result = answers_to(model, tokenizer, ["Hello"] * 4, Decoding(sample=True, no_repeat_ngram_size=6, batch_size=2))
    assert len(set(result.texts)) == 4


def test_model_and_tokenizer_are_left_as_they_were() -> None:
    model, tokenizer = tiny_model("gpt2").train(), character_tokenizer()
    model.transformer.h[1].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    tokenizer.padding_side = "right"
    answers_to(model, tokenizer, PROMPTS, GREEDY)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert tokenizer.padding_side == "right"


def two_passes(world: World, *, synced: bool) -> list[tuple[list[str], int]]:
    tokenizer, settings = character_tokenizer(), Decoding(sample=True, batch_size=2)
    limits = {"max_prompt_length": 30, "max_length": 40, "seeds": [0, 7], "world": world, "synced": synced}
    passes = generate_passes(tiny_model("llama"), tokenizer, tokenizer(PROMPTS)["input_ids"], settings, **limits)
    return [(each.texts, each.tokens) for each in passes]


def run_rank(folder: str) -> None:
    torch.distributed.init_process_group("gloo")
    world = World(rank=torch.distributed.get_rank(), size=2, device=torch.device("cpu"))
    torch.save([two_passes(world, synced=synced) for synced in (False, True)], Path(folder) / f"{world.rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.dist
def test_two_ranks_give_the_texts_of_one(rank_server: RankServer, tmp_path: Path) -> None:
    done = rank_server.run([str(tmp_path)], ranks=2, program=__file__)
    assert done.returncode == 0, done.stderr
    alone = two_passes(World.alone(), synced=False)
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt", weights_only=True) == [alone, alone]


@pytest.mark.parametrize(("count", "ranks"), [(1, 1), (5, 2), (6, 3), (2, 4)])
def test_every_job_is_one_rank_s_and_shares_differ_by_one(count: int, ranks: int) -> None:
    worlds = [World(rank=rank, size=ranks, device=torch.device("cpu")) for rank in range(ranks)]
    shares = [list(shared_jobs(count, world, synced=False)) for world in worlds]
    assert sorted(number for share in shares for number, _ in share) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    filled = [list(shared_jobs(count, world, synced=True)) for world in worlds]
    assert {len(share) for share in filled} == {-(-count // ranks)}
    assert [[job for job in share if not job[1]] for share in filled] == shares


def test_an_answer_stops_at_the_end_of_a_turn() -> None:
    tokenizer, model = character_tokenizer(), tiny_model("llama")
    ids = encode_prompts([Example("", "", (), raw_prompt="a")], tokenizer, Limits()).ids
    [row] = HuggingFaceEngine(model, tokenizer, GREEDY, max_new_tokens=30).answer(ids, [0])
    place = next(place for place in range(2, len(row)) if row[place] not in row[:place])
    symbol = tokenizer.convert_ids_to_tokens(row[place])
    # As in Gemma, another token than the end token ends the turns of the template.
    tokenizer.add_special_tokens({"additional_special_tokens": [symbol]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}" + symbol + "{% endfor %}"
    result = generate(model, tokenizer, ids, GREEDY, **LIMITS)
    assert (result.texts, result.tokens) == ([tokenizer.decode(row[:place]).strip()], place + 1)


if __name__ == "__main__":
    run_rank(sys.argv[-1])
