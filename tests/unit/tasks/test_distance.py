"""The distance of a student is KL(teacher‖student) of transformers' own logits at the labels."""

import math

import pytest
import torch
from tiny import tiny_model

from llmdistill.batch import IGNORE_INDEX, Batch
from llmdistill.tasks.distance import HOPELESS, Distance, compare_rows, cut_to_tokens, read_rows, sample_texts


def batch_of(lengths: list[int], prompt: int) -> Batch:
    ids = torch.randint(3, 40, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * length + [0] * (max(lengths) - length) for length in lengths])
    labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
    labels[:, :prompt] = IGNORE_INDEX
    return Batch(ids, mask, labels, sample_ids=tuple((row,) for row in range(len(lengths))))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_distance_is_that_of_plain_logits(kind):
    torch.manual_seed(0)
    teacher, student = tiny_model(kind), tiny_model(kind)
    for parameter in student.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    batches = [batch_of([9, 5], 2), batch_of([7], 3)]
    divergence = loss = teacher_loss = count = 0.0
    for batch in batches:
        with torch.no_grad():
            inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
            theirs, ours = (model.eval()(**inputs).logits.log_softmax(-1) for model in (teacher, student))
        for row, place in (batch.labels[:, 1:] != IGNORE_INDEX).nonzero().tolist():
            p, q, label = theirs[row, place], ours[row, place], batch.labels[row, place + 1]
            divergence += float((p.exp() * (p - q)).sum())
            loss, teacher_loss, count = loss - float(q[label]), teacher_loss - float(p[label]), count + 1
    found = compare_rows(read_rows(teacher, batches, "teacher"), read_rows(student, batches, "student"))
    assert found.tokens == count == 14
    assert found.divergence == pytest.approx(divergence / count, abs=1e-5)
    assert found.perplexity == pytest.approx(math.exp(loss / count), rel=1e-4)
    assert found.teacher_perplexity == pytest.approx(math.exp(teacher_loss / count), rel=1e-4)
    itself = compare_rows(read_rows(teacher, batches, "teacher"), read_rows(teacher, batches, "teacher"))
    assert itself.divergence == pytest.approx(0, abs=1e-6)


def test_so_many_tokens_are_read_and_no_row_is_cut():
    batches = [batch_of([9, 5], 0), batch_of([7, 7], 0), batch_of([3], 0)]
    assert [len(each.input_ids) for each in cut_to_tokens(batches, 1000)] == [2, 2, 1]
    assert [len(each.input_ids) for each in cut_to_tokens(batches, 16)] == [2, 1]
    assert [len(each.input_ids) for each in cut_to_tokens(batches, 14)] == [2]
    assert [len(each.input_ids) for each in cut_to_tokens(batches, 1)] == [1]


def test_the_words_follow_the_nats():
    words = [Distance(nats, 20, 10, 5).verdict for nats in (0.01, 0.1, 0.37, 0.9, 2, HOPELESS + 1, math.nan)]
    assert len(set(words)) == 6
    assert words[0] == "hardly differs from its teacher"
    assert "most" in words[2], "with 0.8 of the teacher's ROUGE-L"
    assert "nothing" in words[-1]


def test_texts_are_sampled_the_same_each_time():
    model = tiny_model("llama")
    first, second = (sample_texts(model, count=2, length=6)[0] for _ in range(2))
    assert first.input_ids.shape == (2, 7)
    assert first.input_ids.equal(second.input_ids)
