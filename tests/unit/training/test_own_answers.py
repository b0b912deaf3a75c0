"""Answers of the student in training, by itself and by a server."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from stand_in_server import serving
from tiny import save_decoder, tiny_model

from llmdistill.batch import IGNORE_INDEX
from llmdistill.data.collate import Encoded, collate
from llmdistill.errors import UserError
from llmdistill.models.load import load_model
from llmdistill.training import own_answers
from llmdistill.training.own_answers import OnPolicyLoader, Prompt, RolloutServer, ServerWriter, StudentWriter

from support import train_loader

END, PAD = 1, 0
ITEMS = [Encoded([2 + n, 5, 6 + n % 3][: 1 + n % 3], [9, END], f"teacher {n % 2}") for n in range(12)]


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", vocab_size=24, initializer_range=0.3, max_position_embeddings=64)


def make(model, *, on_policy=1.0, micro_batch_size=8, seed=3, **ranks):
    ranks = {"rank": 0, "world_size": 1} | ranks
    sizes = {"global_batch_size": 8, "micro_batch_size": micro_batch_size}
    loader = train_loader(ITEMS, collate=collate, pad_token_id=PAD, seed=seed, **sizes, **ranks)
    writer = StudentWriter(model, 10, [END], pad_token_id=PAD, synced=False)
    return OnPolicyLoader(loader, writer, on_policy=on_policy, pad_token_id=PAD)


def rows(batches):
    """(prompt, answer) of each row, read off the masks and labels."""
    found = []
    for batch in batches:
        for ids, mask, labels in zip(batch.input_ids, batch.attention_mask, batch.labels, strict=True):
            learned = labels != IGNORE_INDEX
            assert torch.equal(labels[learned], ids[learned])
            found.append((ids[mask.bool() & ~learned].tolist(), ids[learned].tolist()))
    return found


def test_the_student_answers_the_prompts_of_the_step(model):
    loader = make(model)
    batches = loader.micro_batches(0)
    assert all(batch.labels_are == "samples" for batch in batches)
    given = [item for items in loader.loader.micro_batch_items(0) for item in items]
    answered = rows(batches)
    assert [name for batch in batches for name in batch.teachers] == [item.teacher for item in given]
    assert [prompt for prompt, _ in answered] == [item.prompt_ids for item in given]
    for _, answer in answered:
        assert 1 <= len(answer) <= 10
        assert END not in answer[:-1]
        assert answer[-1] == END or len(answer) == 10
    assert len({tuple(answer) for _, answer in answered}) > 4


def test_of_a_conversation_the_last_prompt_is_answered(model):
    long = Encoded([2, 3], [4, END, 5, 6, 7, END], gaps=((2, 4),), rest_ids=[8], asked_ids=[2, 3, 4, END, 5, 6])
    loader = make(model)
    loader = replace(
        loader, loader=SimpleNamespace(share=loader.loader.share, micro_batch_items=lambda step: [[long, ITEMS[0]]])
    )
    assert [prompt for prompt, _ in rows(loader.micro_batches(0))] == [long.asked_ids, ITEMS[0].prompt_ids]


def test_ranks_and_micro_batches_do_not_change_an_answer(model):
    whole = rows(make(model).micro_batches(5))
    assert rows(make(model, micro_batch_size=2).micro_batches(5)) == whole
    ranks = [make(model, micro_batch_size=2, rank=rank, world_size=2).micro_batches(5) for rank in range(2)]
    # Micro batches go round the ranks.
    assert rows([batch for pair in zip(*ranks, strict=True) for batch in pair]) == whole


def test_the_same_prompts_are_answered_anew_in_another_step(model):
    items = make(model).loader.micro_batch_items(0)

    def answers(step, seed=3):
        loader = make(model, seed=seed)
        same = SimpleNamespace(share=loader.loader.share, micro_batch_items=lambda step: items)
        return rows(replace(loader, loader=same).micro_batches(step))

    assert answers(0) == answers(0)
    assert answers(0) != answers(1)
    assert answers(0) != answers(0, seed=4)


def test_share_of_the_steps(model):
    loader = make(model, on_policy=0.25)
    chosen = [loader.is_on_policy(step) for step in range(4000)]
    assert sum(chosen) / 4000 == pytest.approx(0.25, abs=0.03)
    assert [loader.is_on_policy(step) for step in range(4000)] == chosen
    step = next(step for step in range(50) if not loader.is_on_policy(step))
    (batch,) = loader.micro_batches(step)
    assert batch.labels_are == "answers"
    assert all(answer == [9, END] for _, answer in rows([batch]))


# Answers by a server, which a stand-in plays.

LONGEST = 6
PROMPTS = [[Prompt([5, 6, 7], 1), Prompt([9], 2)], [Prompt([5, 6, 7], 3)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_decoder(tmp_path_factory.mktemp("student"))


@pytest.fixture
def server(folder):
    with serving(folder) as running:
        yield running


def client(url, *, vocabulary=1024, end=2):
    return RolloutServer(url, vocabulary=vocabulary, max_new_tokens=LONGEST, end_token_ids=[end], wait=60.0)


def writer(server, tmp_path, *, every=1, student=None):
    """One that hands over `student`, by default what the server has, and the folders that it saved."""
    saved = []

    def save(output):
        assert not output.exists()
        shutil.copytree(server._folder if student is None else student, output)
        saved.append(output)

    return ServerWriter(client(server.url), save, tmp_path / "handed", every=every), saved


def test_the_answers_are_samples_of_the_handed_over_student(server, tmp_path):
    other = save_decoder(tmp_path / "other", initializer_range=0.5)
    made, _ = writer(server, tmp_path, student=other)
    written = made.write(0, PROMPTS)
    model = load_model(other, dtype=torch.float32).eval()
    assert [len(rows) for rows in written] == [2, 1]
    for prompts, rows in zip(PROMPTS, written, strict=True):
        for prompt, row in zip(prompts, rows, strict=True):
            assert len(row.ids) == LONGEST or row.ids[-1] == 2
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt.ids, *row.ids]])).logits[0]
            expected = logits[len(prompt.ids) - 1 : -1].log_softmax(-1)[range(len(row.ids)), row.ids]
            torch.testing.assert_close(torch.tensor(row.log_probs), expected, rtol=1e-5, atol=1e-5)
    assert written[0][0].ids != written[1][0].ids  # the same prompt, another seed
    assert made.write(1, PROMPTS) == written


def test_an_answer_ends_after_an_end_token(server):
    whole = client(server.url).request(PROMPTS[0][0]).result().ids
    ending = client(server.url, end=whole[2]).request(PROMPTS[0][0]).result()
    assert ending.ids == whole[: whole.index(whole[2]) + 1]


@pytest.mark.parametrize(("every", "count"), [(1, 5), (2, 3), (4, 2)])
def test_the_weights_are_handed_over_every_so_many_steps(server, tmp_path, every, count):
    made, saved = writer(server, tmp_path, every=every)
    for step in range(2, 7):
        made.write(step, PROMPTS[1:])
    assert len(saved) == count


def test_a_server_that_was_started_again_gets_the_weights_again_and_one_of_others_is_refused(server, tmp_path):
    student = save_decoder(tmp_path / "student", initializer_range=0.5)
    made, saved = writer(server, tmp_path, every=100, student=student)
    first = made.write(0, PROMPTS)
    server.start_again()
    assert made.write(1, PROMPTS) == first
    assert len(saved) == 2
    other, _ = writer(server, tmp_path / "other", every=100)
    other.write(0, PROMPTS)
    with pytest.raises(UserError, match="another training has handed its weights to this server"):
        made.write(2, PROMPTS)


def test_a_server_that_keeps_its_cache_is_told_again(server, tmp_path, monkeypatch):
    answer, told = server._answer, []

    def keeps(path, body):
        told.extend([path] if path == "/reset_prefix_cache" else [])
        return (200, {"success": len(told) > 2}) if path == "/reset_prefix_cache" else answer(path, body)

    monkeypatch.setattr(server, "_answer", keeps)
    monkeypatch.setattr(own_answers.time, "sleep", lambda _: None)
    made, _ = writer(server, tmp_path)
    made.write(0, PROMPTS)
    assert len(told) == 3
    told.clear()
    monkeypatch.setattr(own_answers, "_TRIES", 2)
    with pytest.raises(UserError, match="it goes on answering others"):
        made.write(1, PROMPTS)


def test_what_is_wrong_is_said_before_the_run(server, tmp_path):
    def refused(what, call, *given):
        with pytest.raises(UserError, match=f"data.rollout.url {server.url}: {what}"):
            call(*given)

    own = client(server.url)
    own.check(512)
    refused(r"it reads 512 tokens, and a text of data\.max_length needs 513", own.check, 513)
    refused(r"it refuses the weights in .*nothing: HTTP 500: cannot read", own.take_weights, tmp_path / "nothing", "")
    server.takes_weights = False
    said = r"it does not take weights \(HTTP 500: no attribute weights_stamp\); start it with `VLLM"
    refused(said, own.check, 10)


@pytest.mark.parametrize(("changes", "vocabulary", "said"), [
    ({"token_ids": None}, 1024, "it does not give the 1 to 6 tokens of an answer"),
    ({"token_ids": [5] * 7}, 1024, "it does not give the 1 to 6 tokens of an answer"),
    ({}, 8, "it names the token [0-9]+, and the student has 8"),
])  # fmt: skip
def test_an_answer_that_is_none_is_refused(server, changes, vocabulary, said):
    server.changes = changes
    with pytest.raises(UserError, match=said):
        client(server.url, vocabulary=vocabulary).request(PROMPTS[0][0]).result()
