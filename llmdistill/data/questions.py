"""Questions with their contexts as sliding windows of tokens, whose target is the span of the answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from llmdistill.batch import IGNORE_INDEX
from llmdistill.data.collate import sample_id
from llmdistill.data.store import TOKEN_IDS, Schema, in_pieces
from llmdistill.errors import UserError
from llmdistill.models.unembedded import check_token_ids

NO_ANSWER = 0
"""The position of start and end where a window holds no answer: the first token, [CLS] or <s>, as in BERT."""


@dataclass(frozen=True)
class Answer:
    text: str
    start: int
    """The position of its first character in the context."""


@dataclass(frozen=True)
class QuestionExample:
    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]
    """The right answers; none if the context does not answer the question. The first one is learned."""

    @property
    def is_located(self) -> bool:
        """Return whether the context has the first answer where the data set says, up to spaces, or there is none."""
        if not self.answers:
            return True
        first = self.answers[0]
        end = first.start + len(first.text)
        return bool(first.text.strip()) and self.context[first.start : end].split() == first.text.split()


@dataclass(frozen=True)
class WindowLimits:
    """The sizes of the windows, in tokens."""

    max_length: int
    """Question, part of the context and special tokens together."""
    stride: int
    """From the beginning of one window in the context to that of the next one."""
    max_question_length: int
    """A longer question is cut at its end."""


@dataclass(frozen=True)
class EncodedWindow:
    """The tokens of a question with a part of its context; T is the number of tokens."""

    input_ids: np.ndarray
    """(T,), int32."""
    token_type_ids: np.ndarray | None
    """(T,), 0 in the question and 1 in the context; None for models without segments."""
    target: tuple[int, int]
    """The first and the last token of the answer, NO_ANSWER twice if the window does not hold it; IGNORE_INDEX twice if
    the windows are only answered."""
    question: int
    """The index of the example."""
    characters: np.ndarray | None
    """(T, 2), the characters from and up to which a token stands in the context, -1 at other tokens; None if the window
    is only learned."""

    @cached_property
    def sample_id(self) -> int:
        return sample_id(self.input_ids, [] if self.token_type_ids is None else self.token_type_ids)

    def __len__(self) -> int:
        return len(self.input_ids)


WINDOWS = Schema(
    make=lambda input_ids, token_type_ids, characters, target, question: EncodedWindow(
        input_ids.astype(np.int32),
        token_type_ids,
        tuple(target.tolist()),
        question,
        None if characters is None else characters.reshape(-1, 2),
    ),
    columns={
        "input_ids": TOKEN_IDS,
        "token_type_ids": pa.list_(pa.int8()),
        "characters": pa.list_(pa.int32()),
        "target": pa.list_(pa.int32()),
        "question": pa.int32(),
    },
)
"""How encoded windows are stored on disk."""


def encode_in_pieces(
    examples: Sequence[QuestionExample], tokenizer: PreTrainedTokenizerBase, limits: WindowLimits, *, learned: bool
) -> Iterator[list[EncodedWindow]]:
    """Tokenize each question with its context, in windows that slide over a context that is too long (Devlin et al.).

    Learned windows have the first answer of their example as the target, NO_ANSWER if the window holds only a part of
    it; the other windows know the characters of their tokens.

    Raises:
        UserError: the tokenizer does not tell the characters of its tokens, or a window has no room for the context.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} does not tell the characters of its tokens: save it as "
            "tokenizer.json, by transformers' AutoTokenizer"
        )
    marks = tokenizer.num_special_tokens_to_add(pair=True)
    if limits.max_length <= limits.max_question_length + marks:
        raise UserError(
            f"data.max_length is {limits.max_length}: a question may have {limits.max_question_length} tokens "
            f"(data.task.max_question_length) and the tokenizer's own marks take {marks}; give more, 384 is usual"
        )
    # All at once would keep the tokenizer's own objects of all windows in memory.
    for indices in in_pieces(range(len(examples))):
        yield _encode_windows(examples, indices, tokenizer, limits, learned)


def _encode_windows(
    examples: Sequence[QuestionExample],
    indices: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    limits: WindowLimits,
    learned: bool,
) -> list[EncodedWindow]:
    limit, texts = limits.max_question_length, [examples[index].question.strip() for index in indices]
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    questions: dict[int, tuple[str, int]] = {}  # each as its text, cut after `limit` tokens, and their number
    for index, text, ids, offsets in zip(indices, texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        # Cut as text, because the pair is tokenized from texts below.
        questions[index] = text if len(ids) <= limit else text[: offsets[limit - 1][1]], min(len(ids), limit)
    windows: dict[int, list[EncodedWindow]] = {index: [] for index in indices}
    # transformers' `stride` is the overlap of two windows, and ours, as BERT's, is their distance: the overlap depends
    # on the length of the question, so questions of one length are tokenized together.
    order = sorted(indices, key=lambda index: questions[index][1])
    for length, group in groupby(order, key=lambda index: questions[index][1]):
        members = list(group)
        room = limits.max_length - length - tokenizer.num_special_tokens_to_add(pair=True)
        encoded = tokenizer(
            [questions[index][0] for index in members],
            [examples[index].context for index in members],
            truncation="only_second",
            max_length=limits.max_length,
            stride=max(0, room - limits.stride),
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            verbose=False,
        )
        of_window = [members[member] for member in encoded["overflow_to_sample_mapping"]]
        places = [f"question {examples[index].id}" for index in of_window]
        check_token_ids(tokenizer, encoded["input_ids"], partial(_locate, places))
        types = encoded.get("token_type_ids")
        for row, index in enumerate(of_window):
            characters = np.array(encoded["offset_mapping"][row], dtype=np.int32)
            in_context = np.array([part == 1 for part in encoded.sequence_ids(row)])
            # Some tokenizers have tokens of no character, such as the space in front of the text.
            in_context &= characters[:, 0] < characters[:, 1]
            characters = np.where(in_context[:, None], characters, -1)
            windows[index].append(
                EncodedWindow(
                    input_ids=np.array(encoded["input_ids"][row], dtype=np.int32),
                    token_type_ids=None if types is None else np.array(types[row], dtype=np.int8),
                    target=_find_target(characters, examples[index]) if learned else (IGNORE_INDEX, IGNORE_INDEX),
                    question=index,
                    characters=None if learned else characters,
                )
            )
    return [window for index in indices for window in windows[index]]


def _locate(places: Sequence[str], row: int, _token: str) -> str:
    return places[row]


def _find_target(characters: np.ndarray, example: QuestionExample) -> tuple[int, int]:
    """Return the first and the last token of the first answer, NO_ANSWER twice if the window lacks a part of it."""
    if not example.answers:
        return NO_ANSWER, NO_ANSWER
    answer = example.answers[0]
    # Spaces around the answer are no part of its span.
    spaces = len(answer.text) - len(answer.text.lstrip())
    first, last = answer.start + spaces, answer.start + len(answer.text.rstrip()) - 1
    context = characters[characters[:, 0] >= 0]  # (tokens of the context, 2)
    if len(context) == 0 or first < context[0, 0] or last >= context[-1, 1]:
        return NO_ANSWER, NO_ANSWER
    is_inside = (characters[:, 0] >= 0) & (characters[:, 1] > first) & (characters[:, 0] <= last)
    tokens = is_inside.nonzero()[0]
    return (int(tokens[0]), int(tokens[-1])) if len(tokens) else (NO_ANSWER, NO_ANSWER)
