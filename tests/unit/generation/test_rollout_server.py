"""Answers of the student by a server, which a stand-in plays."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from stand_in_server import serving
from tiny import save_decoder

from llmdistill.errors import ServerLost, UserError
from llmdistill.generation import rollout_server
from llmdistill.generation.rollout import Prompt
from llmdistill.generation.rollout_server import RolloutServer, ServerWriter
from llmdistill.models.load import load_model
from llmdistill.runtime.distributed import World

from support import free_port

END, LONGEST = 2, 6
PROMPTS = [[Prompt([5, 6, 7], 1), Prompt([9], 2)], [Prompt([5, 6, 7], 3)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_decoder(tmp_path_factory.mktemp("student"))


@pytest.fixture
def server(folder):
    with serving(folder) as running:
        yield running


def client(url, *, wait=5.0, vocabulary=1024):
    return RolloutServer(url, vocabulary=vocabulary, max_new_tokens=LONGEST, end_token_ids=[END], wait=wait)


def writer(server, tmp_path, *, every=1, student=None):
    """One that hands over `student`, by default what the server has, and the folders that it saved."""
    saved = []

    def save(output):
        assert not output.exists()
        shutil.copytree(server._folder if student is None else student, output)
        saved.append(output)

    world = World(rank=0, size=1, device=torch.device("cpu"))
    return ServerWriter(client(server.url), save, tmp_path / "handed", every=every, world=world), saved


def test_the_answers_are_samples_of_the_handed_over_student(server, tmp_path):
    other = save_decoder(tmp_path / "other", initializer_range=0.5)
    made, _ = writer(server, tmp_path, student=other)
    written = made.write(0, PROMPTS)
    model = load_model(other, dtype=torch.float32).eval()
    assert [len(rows) for rows in written] == [2, 1]
    for prompts, rows in zip(PROMPTS, written, strict=True):
        for prompt, row in zip(prompts, rows, strict=True):
            assert len(row.ids) == LONGEST or row.ids[-1] == END
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt.ids, *row.ids]])).logits[0]
            expected = logits[len(prompt.ids) - 1 : -1].log_softmax(-1)[range(len(row.ids)), row.ids]
            torch.testing.assert_close(torch.tensor(row.log_probs), expected, rtol=0, atol=1e-5)
    assert written[0][0].ids != written[1][0].ids  # the same prompt, another seed
    assert made.write(1, PROMPTS) == written


def test_an_answer_ends_after_an_end_token(server):
    whole = client(server.url).ask(PROMPTS[0][0]).result().ids
    ending = RolloutServer(server.url, vocabulary=1024, max_new_tokens=LONGEST, end_token_ids=[whole[2]], wait=5.0)
    assert ending.ask(PROMPTS[0][0]).result().ids == whole[: whole.index(whole[2]) + 1]


@pytest.mark.parametrize(("every", "count"), [(1, 5), (2, 3), (4, 2)])
def test_the_weights_are_handed_over_every_so_many_steps(server, tmp_path, every, count):
    made, saved = writer(server, tmp_path, every=every)
    for step in range(2, 7):
        made.write(step, PROMPTS[1:])
    assert len(saved) == {1: 5, 2: 3, 4: 2}[every] == count


def test_a_server_that_was_started_again_gets_the_weights_again(server, tmp_path, folder):
    other = save_decoder(tmp_path / "other", initializer_range=0.5)
    made, saved = writer(server, tmp_path, every=100, student=other)
    first = made.write(0, PROMPTS)
    server.start_again()
    assert made.write(1, PROMPTS) == first
    assert len(saved) == 2


def test_two_trainings_do_not_share_a_server(server, tmp_path):
    made, _ = writer(server, tmp_path, every=100)
    made.write(0, PROMPTS)
    other, _ = writer(server, tmp_path / "other", every=100)
    other.write(0, PROMPTS)
    with pytest.raises(UserError, match="another training has handed its weights to this server"):
        made.write(1, PROMPTS)


def test_a_server_that_keeps_its_cache_is_told_again(server, tmp_path, monkeypatch):
    answer, told = server._answer, []

    def keeps(path, body):
        told.extend([path] if path == "/reset_prefix_cache" else [])
        return (200, {"success": len(told) > 2}) if path == "/reset_prefix_cache" else answer(path, body)

    monkeypatch.setattr(server, "_answer", keeps)
    monkeypatch.setattr(rollout_server.time, "sleep", lambda _: None)
    made, _ = writer(server, tmp_path)
    made.write(0, PROMPTS)
    assert len(told) == 3
    told.clear()
    monkeypatch.setattr(rollout_server, "_TRIES", 2)
    with pytest.raises(UserError, match="it goes on answering others"):
        made.write(1, PROMPTS)


def test_a_server_is_lost_after_the_time_without_an_answer(server, tmp_path):
    made, _ = writer(server, tmp_path)
    made.server = client(server.url, wait=1.0)
    made.write(0, PROMPTS)
    server.lives = 0
    with pytest.raises(ServerLost, match=r"data.rollout.url .*has not answered for 1 s \(.+\): start it again"):
        made.write(0, PROMPTS)


def refused(server, what):
    with pytest.raises(UserError, match=f"data.rollout.url {server.url}: {what}"):
        client(server.url).check(10)


def test_what_is_wrong_is_said_before_the_run(server):
    client(server.url).check(512)
    with pytest.raises(UserError, match=r"it reads 512 tokens, and a text of data\.max_length needs 513"):
        client(server.url).check(513)
    server.takes_weights = False
    refused(server, r"it does not take weights \(HTTP 500: no attribute weights_stamp\); start it with `VLLM")
    gone = SimpleNamespace(url=f"http://127.0.0.1:{free_port()}")
    refused(gone, "no server answers there .*; start it with .*StudentWeights`, or correct the url")


@pytest.mark.parametrize(
    ("changes", "vocabulary", "said"),
    [
        ({"token_ids": None}, 1024, "it does not give the 1 to 6 tokens of an answer"),
        ({"logprobs": None}, 1024, "it does not give the 1 to 6 tokens of an answer"),
        ({"token_ids": [5] * 7}, 1024, "it does not give the 1 to 6 tokens of an answer"),
        ({}, 8, "it names the token [0-9]+, and the student has 8"),
    ],
)
def test_an_answer_that_is_none_is_refused(server, changes, vocabulary, said):
    server.changes = changes
    with pytest.raises(UserError, match=said):
        client(server.url, vocabulary=vocabulary).ask(PROMPTS[0][0]).result()


def test_weights_that_it_cannot_read_are_refused(server, tmp_path):
    with pytest.raises(UserError, match=r"it refuses the weights in .*nothing: HTTP 500: cannot read"):
        client(server.url).take_weights(tmp_path / "nothing", "stamp")
