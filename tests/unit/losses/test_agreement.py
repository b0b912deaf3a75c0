"""The figures on the student's own answers, against sets and plain softmaxes."""

import torch

from llmdistill.batch import HeadInputs, TopK
from llmdistill.losses import agreement
from llmdistill.losses.several import SeveralHeads

N, V, W, K = 7, 30, 4, 3


def head(seed: int) -> HeadInputs:
    draw = torch.Generator().manual_seed(seed)
    return HeadInputs(*(torch.randn(*shape, generator=draw) for shape in ((N, W), (V, W), (V,))))


def logits(each: HeadInputs) -> torch.Tensor:
    return each.rows @ each.weight.T + each.bias


def test_the_shared_tokens_are_counted_as_sets(monkeypatch) -> None:
    monkeypatch.setattr(agreement, "_CHUNK", 2)
    student, teacher = head(0), head(1)
    for vocabulary in (None, 20):
        best = [row[:vocabulary].sort(descending=True).indices[:K].tolist() for row in logits(teacher)]
        own = [set(row[:vocabulary].sort(descending=True).indices[:K].tolist()) for row in logits(student)]
        top = agreement.top_tokens(teacher, K, vocabulary)
        assert top.tolist() == best
        shared = sum(len(one & set(other)) for one, other in zip(own, best, strict=True))
        assert 0 < shared < N * K
        assert int(agreement.count_shared(student, top, vocabulary)) == shared


def test_other_ways_of_teaching_give_their_most_likely_tokens() -> None:
    teacher = head(1)
    best = logits(teacher).topk(K).indices
    kept = TopK(logits(teacher).topk(5).indices, torch.zeros(N, 5), {})
    assert torch.equal(agreement.top_tokens(kept, K, None), best)
    assert agreement.top_tokens(kept, 6, None) is None
    parts = tuple(teacher._replace(rows=teacher.rows[start::2]) for start in range(2))
    places = tuple(torch.arange(start, N, 2) for start in range(2))
    assert torch.equal(agreement.top_tokens(SeveralHeads(parts, places=places), K, None), best)
    assert torch.equal(agreement.top_tokens(SeveralHeads((teacher, teacher), (0.5, 0.5)), K, None), best)
    # Of teachers whose vocabularies are padded differently the tokens that both know count.
    more = [torch.cat([each, torch.full((5, *each.shape[1:]), 9.0)]) for each in (teacher.weight, teacher.bias)]
    padded = HeadInputs(teacher.rows, *more)
    assert torch.equal(agreement.top_tokens(SeveralHeads((teacher, padded), (0.5, 0.5)), K, V), best)


def test_the_log_probabilities_of_the_labels(monkeypatch) -> None:
    monkeypatch.setattr(agreement, "_CHUNK", 2)
    student, labels_N = head(0), torch.arange(N)
    expected = [logits(student)[n].softmax(-1)[n].log() for n in range(N)]
    torch.testing.assert_close(agreement.log_probs_of(student, labels_N), torch.stack(expected))
