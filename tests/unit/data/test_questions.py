from itertools import groupby

import pytest
from question_files import encode_windows
from word_models import word_tokenizer

from llmdistill.batch import IGNORE_INDEX
from llmdistill.data.pairs import collate_pairs
from llmdistill.data.questions import NO_ANSWER, Answer, QuestionExample, WindowLimits

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "who", "what", *(f"w{n}" for n in range(40))]
LIMITS = WindowLimits(max_length=12, stride=3, max_question_length=4)


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(WORDS, model_input_names=["input_ids", "token_type_ids", "attention_mask"])


def example(words: range, *answer: int, question: str = "who what", id: str = "q") -> QuestionExample:
    """The context has the words wN; the answer goes from one word up to and with another one."""
    context = "  ".join(f"w{n}" for n in words)
    found = ()
    if answer:
        text = "  ".join(f"w{n}" for n in range(answer[0], answer[-1] + 1))
        found = (Answer(text, context.index(text)),)
    return QuestionExample(id, question, context, found)


def words_of(ids):
    return [WORDS[int(each)] for each in ids]


def test_windows_slide_over_a_long_context(tokenizer):
    """12 tokens less 3 marks and 2 of the question leave room for 7 of the context; the next window is 3 further."""
    windows = encode_windows([example(range(10, 25), 16, 19)], tokenizer, LIMITS, learned=True)
    contexts = [[word for word in words_of(window.input_ids) if word[1:].isdigit()] for window in windows]
    assert contexts == [[f"w{n}" for n in range(start, min(start + 7, 25))] for start in (10, 13, 16, 19)]
    assert words_of(windows[0].input_ids)[:4] == ["[CLS]", "who", "what", "[SEP]"]
    assert windows[0].token_type_ids.tolist() == [0] * 4 + [1] * 8
    # the first window has only the beginning of the answer, and the last one only its end
    learned = [words_of(window.input_ids[window.target[0] : window.target[1] + 1]) for window in windows]
    answer = ["w16", "w17", "w18", "w19"]
    assert learned == [["[CLS]"], answer, answer, ["[CLS]"]]
    assert all(window.characters is None for window in windows)
    assert collate_pairs(windows, 0).targets.tolist() == [list(window.target) for window in windows]


def test_windows_that_are_answered_know_their_characters(tokenizer):
    asked = [example(range(3), 1), example(range(5, 25), 7, question="what"), example(range(6), 2)]
    windows = encode_windows(asked, tokenizer, LIMITS, learned=False)
    assert [question for question, _ in groupby(window.question for window in windows)] == [0, 1, 2]
    for window in windows:
        assert window.target == (IGNORE_INDEX, IGNORE_INDEX)
        for token, (start, end) in zip(window.input_ids, window.characters, strict=True):
            if start >= 0:
                assert asked[window.question].context[start:end] == WORDS[int(token)]
        inside = window.characters[:, 0] >= 0
        assert inside.sum() == len(window) - 3 - (1 if window.question == 1 else 2)
        assert window.token_type_ids[inside].all()


def test_a_long_question_is_cut_and_spaces_do_not_matter(tokenizer):
    long = example(range(3), question=" who what who what who what ")
    (window,) = encode_windows([long], tokenizer, LIMITS, learned=True)
    assert words_of(window.input_ids) == ["[CLS]", "who", "what", "who", "what", "[SEP]", "w0", "w1", "w2", "[SEP]"]
    assert window.target == (NO_ANSWER, NO_ANSWER), "there is no answer"
    spaced = QuestionExample("q", "who", "w1  w2 w3", (Answer(" w2 ", 3),))
    assert spaced.is_located
    (window,) = encode_windows([spaced], tokenizer, LIMITS, learned=True)
    assert words_of(window.input_ids[slice(window.target[0], window.target[1] + 1)]) == ["w2"]


def test_a_stride_beyond_the_window_leaves_nothing_out(tokenizer):
    windows = encode_windows([example(range(20))], tokenizer, WindowLimits(12, 100, 4), learned=False)
    assert sum((window.characters[:, 0] >= 0).sum() for window in windows) == 20
