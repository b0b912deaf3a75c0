"""The answers of a model with a head for spans: the best span of all windows of each question."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmdistill.batch import Batch
from llmdistill.data.collate import padded
from llmdistill.data.windows import NO_ANSWER, EncodedWindow, QuestionExample
from llmdistill.runtime.distributed import World
from llmdistill.tasks.forward import Forward, values_of

_NO_SPAN = 1e4
"""The null odds of a question of whose context the tokenizer made no token."""


@dataclass(frozen=True)
class Spans:
    """The answers to the questions of a set, each by the id of its question, in order."""

    texts: dict[str, str]
    """The text of the best span, also where no answer is more probable."""
    null_odds: dict[str, float]
    """The score of no answer minus that of the best span; the score of a span is the sum of the logits of its ends."""


def predict_spans(
    forward: Forward,
    windows: Sequence[EncodedWindow],
    collate: Callable[[Sequence[EncodedWindow]], Batch],
    questions: Sequence[QuestionExample],
    *,
    max_answer_length: int,
    batch_size: int,
    world: World,
) -> Spans:
    """Answer each question by the best span of up to max_answer_length tokens in any of its windows (Devlin et al.).

    Every rank must call this function, and the model must be in evaluation mode. A question is unanswered as a whole
    only as far as each window says so: its score of no answer is the lowest of its windows.
    """

    def take(logits_B2T: Tensor, indices: Sequence[int]) -> Iterable[tuple[float, float, int, int]]:
        return best_spans(logits_B2T, [windows[index] for index in indices], max_answer_length)

    found = values_of(forward, windows, collate, take, batch_size=batch_size, world=world)
    best: dict[int, tuple[float, str]] = {}
    null: dict[int, float] = {}
    for window, (no_answer, score, first, last) in zip(windows, found, strict=True):
        question = window.question
        null[question] = min(no_answer, null.get(question, float("inf")))
        if score > best.get(question, (float("-inf"), ""))[0]:
            assert window.characters is not None
            start, end = int(window.characters[first, 0]), int(window.characters[last, 1])
            best[question] = score, questions[question].context[start:end].strip()
    texts, odds = {}, {}
    for question, example in enumerate(questions):
        score, texts[example.id] = best.get(question, (null[question] - _NO_SPAN, ""))
        odds[example.id] = null[question] - score
    return Spans(texts, odds)


def best_spans(
    logits_B2T: Tensor, windows: Sequence[EncodedWindow], max_answer_length: int
) -> Iterable[tuple[float, float, int, int]]:
    """Return for each window the score of no answer, the best score of a span, and its first and last token.

    Only tokens of the context can be the ends of a span. The score is -inf if the window has no such token.
    """
    starts_BT, ends_BT = logits_B2T.float().cpu().unbind(1)
    no_answer_B = starts_BT[:, NO_ANSWER] + ends_BT[:, NO_ANSWER]
    assert all(window.characters is not None for window in windows), "the windows are encoded for training"
    rows = [torch.from_numpy(window.characters[:, 0] >= 0) for window in windows]  # type: ignore[index]
    outside_BT = padded(rows, 0) == 0
    starts_BT = starts_BT.masked_fill(outside_BT, float("-inf"))
    ends_BT = ends_BT.masked_fill(outside_BT, float("-inf"))
    length = min(max_answer_length, ends_BT.shape[1])
    beyond = ends_BT.new_full((len(ends_BT), length - 1), float("-inf"))
    ends_BTL = torch.cat([ends_BT, beyond], dim=1).unfold(1, length, 1)  # [b, t, l]: the end l tokens after t
    best_BT, more_BT = ends_BTL.max(-1)
    score_B, first_B = (starts_BT + best_BT).max(-1)
    last_B = first_B + more_BT.gather(1, first_B[:, None])[:, 0]
    return zip(no_answer_B.tolist(), score_B.tolist(), first_B.tolist(), last_B.tolist(), strict=True)
