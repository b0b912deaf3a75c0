"""What several tests compare with: the terms of a method from whole logits and taps, after both models have run."""

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from llmdistill.batch import IGNORE_INDEX, Batch, LossSum, Outputs, predicted_labels
from llmdistill.losses.divergence import output_divergence
from llmdistill.losses.terms import TokenTerm
from llmdistill.methods import Method


def terms_of(method: Method, student: Outputs, teacher: Outputs | None, batch: Batch) -> dict[str, LossSum]:
    """Every term of a method, unweighted, by autograd; without the labels where the student wrote them itself."""
    running = method.bind_terms(teacher, batch)
    losses: dict[str, LossSum] = {}
    for layer in running.layer_terms:
        assert teacher is not None
        loss = layer.loss(student.taps, teacher.taps, batch.attention_mask)
        before = losses.get(layer.name)
        losses[layer.name] = loss if before is None else LossSum(before.sum + loss.sum, loss.count)
    losses |= {each.name: token_loss(each, student, teacher, batch, method.shift) for each in running.token_terms}
    losses |= {each.name: each.loss(student, teacher, batch) for each in running.sequence_terms}
    return {name: losses[name] for name in method.weights if name in losses}


def token_loss(term: TokenTerm, student: Outputs, teacher: Outputs | None, batch: Batch, shift: bool) -> LossSum:
    """A term on tokens from the logits of all of them."""
    assert student.logits is not None
    if term.divergence is None:
        targets_N = predicted_labels(batch.labels, shift=shift).flatten()
        rows = student.logits.flatten(0, 1)
        loss = functional.cross_entropy(rows, targets_N, ignore_index=IGNORE_INDEX, reduction="sum")
        return LossSum(loss, (targets_N != IGNORE_INDEX).sum())
    assert teacher is not None
    assert teacher.logits is not None
    value, temperature = term.divergence.value, term.temperature
    if term.positions == "tokens":  # any label makes a real token count
        labels, shift = torch.where(batch.attention_mask != 0, 0, IGNORE_INDEX), False
    else:
        labels = batch.labels
    loss = output_divergence(
        student.logits, teacher.logits, labels, divergence=value, temperature=temperature, shift=shift
    )
    return LossSum(loss.sum * (term.scale / temperature**2), loss.count)


def window_loss(model: PreTrainedModel, ids: list[int], window: int, stride: int, count: int) -> float:
    """The mean loss of a token of a text, by the model's own logits, a window at a time."""
    losses = []
    for start in range(0, stride * count, stride):
        piece = torch.tensor([ids[start : start + window]])
        with torch.no_grad():
            log_probs = model(piece).logits.log_softmax(-1)
        for place in range(1 if start == 0 else max(1, window - stride), window):
            losses.append(-float(log_probs[0, place - 1, piece[0, place]]))
    return sum(losses) / len(losses)


def truncated(matrix: Tensor, rank: int) -> Tensor:
    """The truncated SVD of a matrix, or of each of a stack."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return (u * s[..., None, :])[..., :rank] @ vh[..., :rank, :]


def greedy_answer(model: PreTrainedModel, prompt_ids: list[int], limit: int, end: int, ngram: int = 0) -> list[int]:
    """One prompt, no padding, no cache; with `ngram` no so many tokens of prompt and answer occur twice."""
    ids = list(prompt_ids)
    while len(ids) < len(prompt_ids) + limit and ids[len(prompt_ids) :][-1:] != [end]:
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0, -1]
        for start in range(len(ids) - ngram + 1) if ngram else ():
            if ids[start : start + ngram - 1] == ids[len(ids) - ngram + 1 :]:
                scores[ids[start + ngram - 1]] = -torch.inf
        ids.append(int(scores.argmax()))
    return ids[len(prompt_ids) :]
