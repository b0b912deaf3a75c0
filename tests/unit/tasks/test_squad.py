from functools import partial

import numpy as np
import pytest
import torch
from question_files import encode_windows
from word_models import word_tokenizer

from llmdistill.batch import Outputs, Taps
from llmdistill.data.pairs import collate_pairs
from llmdistill.data.questions import EncodedWindow, QuestionExample, WindowLimits
from llmdistill.tasks.squad import best_spans, predict_spans

COLLATE = partial(collate_pairs, pad_token_id=0)
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "who", *(f"w{n}" for n in range(30))]
CONTEXTS = [WORDS[5:17], WORDS[17:29], WORDS[29:]]
QUESTIONS = [QuestionExample(f"q{n}", "who", " ".join(words), ()) for n, words in enumerate(CONTEXTS)]
WINDOWS = encode_windows(QUESTIONS, word_tokenizer(WORDS), WindowLimits(12, 3, 4), learned=False)


def forward(batch) -> Outputs:
    """Random logits of a window, by its tokens: padding has -inf, as the head gives it."""
    rows = []
    for ids in batch.input_ids:
        generator = torch.Generator().manual_seed(int(ids.sum()))
        rows.append(4 * torch.randn(2, 40, generator=generator)[:, : len(ids)])
    logits = torch.stack(rows).masked_fill((batch.attention_mask == 0)[:, None], float("-inf"))
    return Outputs(None, Taps(), logits)


def naive(longest: int) -> tuple[dict[str, str], dict[str, float]]:
    """Every pair of tokens in every window of a question."""
    texts, odds = {}, {}
    for number, question in enumerate(QUESTIONS):
        found, null = [], []
        for each in (each for each in WINDOWS if each.question == number):
            (starts, ends), places = forward(COLLATE([each])).sequence_logits[0].tolist(), each.characters
            null.append(starts[0] + ends[0])
            for first in range(len(each)):
                for last in range(first, min(first + longest, len(each))):
                    if places[first, 0] >= 0 and places[last, 0] >= 0:
                        text = question.context[places[first, 0] : places[last, 1]]
                        found.append((starts[first] + ends[last], text))
        score, texts[question.id] = max(found)
        odds[question.id] = min(null) - score
    return texts, odds


@pytest.mark.parametrize(("longest", "batch_size"), [(1, 1), (4, 2), (30, 8)])
def test_the_best_span_of_all_windows(longest, batch_size):
    settings = {"max_answer_length": longest, "batch_size": batch_size}
    found = predict_spans(forward, WINDOWS, COLLATE, QUESTIONS, **settings)
    texts, odds = naive(longest)
    assert found.texts == texts
    assert list(found.null_odds) == ["q0", "q1", "q2"]
    assert found.null_odds == pytest.approx(odds, abs=1e-5)


def test_a_window_without_context():
    lonely = EncodedWindow(np.array([1, 2], dtype=np.int32), None, (0, 0), 0, np.full((2, 2), -1, dtype=np.int32))
    ((no_answer, score, *_),) = best_spans(torch.tensor([[[1.0, 9.0], [2.0, 9.0]]]), [lonely], 4)
    assert (no_answer, score) == (3.0, float("-inf"))
