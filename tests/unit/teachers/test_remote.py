"""A teacher behind a server, which a stand-in plays in vLLM's documented format, and a sharded one."""

from types import SimpleNamespace

import pytest
import torch
from stand_in_server import serving
from tiny import save_decoder

from llmdistill.data.collate import Encoded, collate, collate_packed
from llmdistill.errors import ServerLost, UserError
from llmdistill.models.load import load_model
from llmdistill.step.teacher import RequestingLoader
from llmdistill.teachers.remote import RemoteTeacher, TeacherServer

K = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_decoder(tmp_path_factory.mktemp("teacher"))


@pytest.fixture
def server(folder):
    with serving(folder, name="a teacher") as running:
        yield running


def client(url, name="a teacher", *, k=K, vocabulary=1024):
    return TeacherServer(url, name, k=k, vocabulary=vocabulary, wait=60.0)


@pytest.fixture
def examples():
    draw = torch.Generator().manual_seed(0)
    lengths = ((5, 3), (2, 7), (4, 1))
    return [Encoded(*(torch.randint(3, 1024, (n,), generator=draw).tolist() for n in pair)) for pair in lengths]


@pytest.mark.parametrize("packed", [False, True])
def test_the_likely_tokens_are_those_of_the_model_alone(server, folder, examples, packed):
    made = collate_packed(examples, 0, max_length=18) if packed else collate(examples, 0)
    batch = made.with_positions(shift=True)
    teacher = RemoteTeacher(client(server.url), device=torch.device("cpu"))
    found = teacher.compute_targets(batch, lm_head=("labels", "tokens")).lm_head
    model = load_model(folder, dtype=torch.float32).eval()
    expected = {"labels": [], "tokens": []}
    by_id = {each.sample_id: each for each in examples}
    for each in (by_id[number] for row in batch.sample_ids for number in row):
        ids = torch.tensor([[*each.prompt_ids, *each.response_ids]])
        with torch.no_grad():
            rows = model(ids).logits[0].double().log_softmax(-1)
        expected["tokens"] += list(rows)
        expected["labels"] += list(rows[len(each.prompt_ids) - 1 : -1])
    for place, rows in expected.items():
        top = torch.stack(rows).topk(K)
        assert torch.equal(found[place].tokens, top.indices)
        torch.testing.assert_close(found[place].log_probs, top.values.float(), rtol=0, atol=1e-5)
        rest = (1 - top.values.exp().sum(1)).log().float()
        torch.testing.assert_close(found[place].rest[1.0], rest, rtol=0, atol=1e-4)
    assert sorted(server.asked) == sorted([*each.prompt_ids, *each.response_ids] for each in examples)


def test_what_was_asked_before_is_not_asked_again(server, examples):
    teacher = RemoteTeacher(client(server.url), device=torch.device("cpu"))
    made = SimpleNamespace(micro_batches=lambda step: [collate(examples, 0), collate(examples[:1], 0)])
    batches = RequestingLoader(made, teacher.request).micro_batches(0)
    teacher.wait(batches)
    assert len(server.asked) == 4
    whole = [
        teacher.compute_targets(each.with_positions(shift=True), lm_head=["labels"]).lm_head["labels"]
        for each in batches
    ]
    assert len(server.asked) == 4
    assert [len(each.tokens) for each in whole] == [11, 3]


def test_a_request_that_fails_is_repeated(server, examples):
    server.stumbles = 3
    (top,) = client(server.url).score([[7, 8, 9]])
    assert top.tokens.shape == (3, K)
    assert server.stumbles == 0


UNKNOWN = {"logprobs": {"top_logprobs": [{f"token_id:{n}": -1.0 for n in range(1020, 1025)}]}}


@pytest.mark.parametrize(("asked", "longest", "changes", "said"), [
    ({"name": "another"}, 10, {}, "it serves a teacher, and teacher.model is another: .*-model-name another`"),
    ({"k": 65}, 10, {}, "Requested prompt logprobs of 65, .*--max-logprobs 65"),
    ({"vocabulary": 1025}, 10, {}, "Token id 1024 is out of vocabulary; serve the model of teacher.model"),
    ({}, 512, {}, "it reads 512 tokens, .* --max-model-len 513"),
    ({}, 10, {"logprobs": {"top_logprobs": [{"token_id:3": -1.0}]}}, "it does not give the 5 most likely tokens"),
    ({}, 10, UNKNOWN, "it names the token 1024, and a teacher has 1024"),
])  # fmt: skip
def test_what_is_wrong_with_a_server_is_said(server, asked, longest, changes, said):
    client(f"{server.url}/v1/").check(511)  # nothing is wrong before
    server.changes = changes
    with pytest.raises(UserError, match=f"teacher.url {server.url}: .*{said}") as raised:
        client(server.url, **asked).check(longest)
    assert not isinstance(raised.value, ServerLost)
