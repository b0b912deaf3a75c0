from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_model
from transformers import PreTrainedModel

from llmdistill.batch import IGNORE_INDEX
from llmdistill.data.collate import Encoded, collate
from llmdistill.generation.rollout import OnPolicyLoader, RowNoise, StudentWriter

from support import train_loader

END, PAD = 1, 0
ITEMS = [Encoded([2 + n, 5, 6 + n % 3][: 1 + n % 3], [9, END], f"teacher {n % 2}") for n in range(12)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", vocab_size=24, initializer_range=0.3, max_position_embeddings=64)


def make(model, *, share=1.0, micro_batch_size=8, seed=3, **ranks) -> OnPolicyLoader:
    ranks = {"rank": 0, "world_size": 1} | ranks
    sizes = {"global_batch_size": 8, "micro_batch_size": micro_batch_size}
    loader = train_loader(ITEMS, collate=collate, pad_token_id=PAD, seed=seed, **sizes, **ranks)
    writer = StudentWriter(model, 10, [END], pad_token_id=PAD, synced=False)
    return OnPolicyLoader(loader, writer, share=share, seed=seed, pad_token_id=PAD, **ranks)


def rows(batches) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) of each row, read off the masks and labels."""
    found = []
    for batch in batches:
        for ids, mask, labels in zip(batch.input_ids, batch.attention_mask, batch.labels, strict=True):
            learned = labels != IGNORE_INDEX
            assert torch.equal(labels[learned], ids[learned])
            found.append((ids[mask.bool() & ~learned].tolist(), ids[learned].tolist()))
    return found


def test_the_student_answers_the_prompts_of_the_step(model) -> None:
    loader = make(model)
    batches = loader.micro_batches(0)
    assert all(batch.own_answers for batch in batches)
    given = [item for items in loader.loader.micro_batch_items(0) for item in items]
    answered = rows(batches)
    assert [name for batch in batches for name in batch.teachers] == [item.teacher for item in given]
    assert [prompt for prompt, _ in answered] == [item.prompt_ids for item in given]
    for _, answer in answered:
        assert 1 <= len(answer) <= 10
        assert END not in answer[:-1]
        assert answer[-1] == END or len(answer) == 10
    assert len({tuple(answer) for _, answer in answered}) > 4


def test_ranks_and_micro_batches_do_not_change_an_answer(model) -> None:
    whole = rows(make(model).micro_batches(5))
    assert rows(make(model, micro_batch_size=2).micro_batches(5)) == whole
    ranks = [make(model, micro_batch_size=2, rank=rank, world_size=2).micro_batches(5) for rank in range(2)]
    # Micro batches go round the ranks.
    assert rows([batch for pair in zip(*ranks, strict=True) for batch in pair]) == whole


def test_a_step_is_a_pure_function_of_seed_and_number(model) -> None:
    loader = make(model, share=0.5)
    first = [rows(loader.micro_batches(step)) for step in range(4)]
    torch.manual_seed(99)
    assert [rows(make(model, share=0.5).micro_batches(step)) for step in reversed(range(4))] == first[::-1]


def test_the_same_prompts_are_answered_anew_in_another_step(model) -> None:
    loader = make(model)
    items = loader.loader.micro_batch_items(0)
    loader = replace(loader, loader=SimpleNamespace(micro_batch_items=lambda step: items))
    assert rows(loader.micro_batches(0)) != rows(loader.micro_batches(1))
    assert rows(loader.micro_batches(0)) != rows(replace(loader, seed=4).micro_batches(0))


def test_share_of_the_steps(model) -> None:
    loader = make(model, share=0.25)
    share = sum(loader.is_on_policy(step) for step in range(4000)) / 4000
    assert share == pytest.approx(0.25, abs=0.03)
    step = next(step for step in range(50) if not loader.is_on_policy(step))
    (batch,) = loader.micro_batches(step)
    assert not batch.own_answers
    assert all(answer == [9, END] for _, answer in rows([batch]))


def test_noise_draws_from_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])
    noise = RowNoise([7, 8], torch.device("cpu"))
    draws = torch.stack([noise(torch.empty(2, 0), logits.expand(2, 5)).argmax(-1) for _ in range(5000)]).flatten()
    shares = torch.bincount(draws, minlength=5) / len(draws)
    torch.testing.assert_close(shares, logits.softmax(-1), atol=0.02, rtol=0)
    assert shares[4] == 0
