"""A teacher with another tokenizer than its student: it reads the text of each batch in its own tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from llmdistill.batch import IGNORE_INDEX, Batch, HeadInputs, OtherTokens, Outputs, Positions, Taps
from llmdistill.config.teacher import CacheConfig, TeacherConfig
from llmdistill.data.begin import begin_tokens
from llmdistill.data.collate import pad_rows, padding_mask, sample_id
from llmdistill.data.token_bytes import TokenBytes, equal_spans, shared_tokens
from llmdistill.errors import UserError
from llmdistill.models.families import max_positions
from llmdistill.progress import progress
from llmdistill.runtime.terminal import print_main
from llmdistill.step.forward import TappedModel
from llmdistill.step.teacher import Teacher
from llmdistill.teachers.source import ModelSource, TeacherContext, TeacherData, TeacherPlan, TeacherSource


class _Translated(NamedTuple):
    """A sequence in the tokens of the teacher."""

    ids: np.ndarray
    spans: np.ndarray
    """The span of each of the teacher's tokens; -1 for a token in none."""
    student_spans: np.ndarray
    """As above, for the student's tokens that have a label."""
    pairs: np.ndarray
    """For each span whether it is one token on both sides, which both know."""


class Translation:
    """Turns batches of a student's tokens into batches of the teacher's."""

    def __init__(
        self,
        student: PreTrainedTokenizerBase,
        teacher: PreTrainedTokenizerBase,
        *,
        prompts: Mapping[int, Sequence[int]] | None,
        longest: int,
    ) -> None:
        """Find the tokens that both know.

        Args:
            student: the student's tokenizer.
            teacher: the teacher's.
            prompts: the teacher's tokens of each prompt, and of what stands between the answers of a conversation, by
                the ids that `parts_before` gives the student's; None if sequences are plain text, which the teacher
                reads as it is.
            longest: the most tokens that the teacher reads; later ones are not compared.

        Raises:
            UserError: the tokens of one of them are no pieces of a text.
        """
        self._student, self._teacher = TokenBytes(student), TokenBytes(teacher)
        self._prompts, self._longest = prompts, longest
        self._pad = int(teacher.pad_token_id or 0)  # which is masked
        self._starts = begin_tokens(teacher)
        self._ends = dict(zip(self._student.ends, self._teacher.ends, strict=True))
        self._shared = shared_tokens(self._student, self._teacher)
        self.shared = torch.tensor([*self._shared]), torch.tensor([*self._shared.values()])

    def __call__(self, batch: Batch) -> tuple[Batch, OtherTokens]:
        """Return the teacher's batch, whose labels are the tokens that are compared, and what it is compared with.

        Its samples are known by the teacher's tokens and by which of them are compared, whatever the student's are. The
        head of the OtherTokens is still empty.
        """
        batch = batch.on_cpu()
        ids_BT, mask_BT, labels_BT = batch.input_ids.numpy(), batch.attention_mask.numpy(), batch.labels.numpy().copy()
        labels_BT[:, 0] = IGNORE_INDEX  # no token before it predicts it
        sequences = [
            self._translate_sequence(ids_T[mask_T == number], labels_T[mask_T == number] != IGNORE_INDEX)
            for ids_T, mask_T, labels_T in zip(ids_BT, mask_BT, labels_BT, strict=True)
            for number in range(1, int(mask_T.max()) + 1)  # a packed row numbers its sequences from 1
        ]
        columns: dict[str, list[np.ndarray]] = {name: [] for name in ("spans", "pairs", "student_spans", "starts")}
        rows, num_spans = 0, 0
        for sequence in sequences:
            spans_m = sequence.spans[sequence.spans >= 0]
            # Row of the teacher and number in the batch of each span; the last entry stands for no span.
            first_row = np.append(rows + np.searchsorted(spans_m, np.arange(len(sequence.pairs))), -1)
            number = np.append(np.where(sequence.pairs, -1, num_spans + np.cumsum(~sequence.pairs) - 1), -1)
            is_pair = np.append(sequence.pairs, False)
            spans_n = sequence.student_spans
            is_first = np.diff(spans_n, prepend=-1) != 0
            columns["spans"].append(number[spans_m])
            columns["pairs"].append(np.where(is_pair[spans_n], first_row[spans_n], -1))
            columns["student_spans"].append(number[spans_n])
            columns["starts"].append(np.where(is_first & ~is_pair[spans_n], first_row[spans_n], -1))
            rows, num_spans = rows + len(spans_m), num_spans + int((~sequence.pairs).sum())
        labels = [np.where(sequence.spans >= 0, sequence.ids, IGNORE_INDEX) for sequence in sequences]
        of_teacher = Batch(
            pad_rows([sequence.ids for sequence in sequences], self._pad),
            padding_mask([sequence.ids for sequence in sequences]),
            pad_rows(labels, IGNORE_INDEX),
            sample_ids=tuple((sample_id(sequence.ids, sequence.spans >= 0),) for sequence in sequences),
        )
        spans_of = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in columns.items()}
        compared = torch.from_numpy(np.concatenate([row_labels[row_labels != IGNORE_INDEX] for row_labels in labels]))
        empty = HeadInputs(torch.empty(0), None, None)
        return of_teacher, OtherTokens(head=empty, labels=compared, num_spans=num_spans, shared=self.shared, **spans_of)

    def _translate_sequence(self, ids: np.ndarray, labeled: np.ndarray) -> _Translated:
        """Translate one sequence; only spans of which both models predict all tokens are kept."""
        read, spans_of_parts, student_spans_of_parts, count = list[int](), list[np.ndarray](), list[np.ndarray](), 0
        for start, begin, end, context in self._parts(ids, labeled):
            tokens, of_student, of_teacher = self._translate_text(ids[begin:end].tolist())
            if not (read or context or tokens):
                context = [self._pad]  # a model reads one token at least
            read += [*context, *tokens]
            spans_of_parts += [np.full(len(context), -1), np.where(of_teacher >= 0, of_teacher + count, -1)]
            student_spans_of_parts += [np.full(begin - start, -1), np.where(of_student >= 0, of_student + count, -1)]
            count += int(max(of_teacher.max(initial=-1), of_student.max(initial=-1))) + 1
        theirs = np.array(read, dtype=np.int64)[: self._longest]
        spans, student_spans = np.concatenate(spans_of_parts), np.concatenate(student_spans_of_parts)

        # The first token that the teacher reads is predicted by none, and so are those beyond its positions.
        of_teacher, of_student = _count_tokens(spans, count), _count_tokens(student_spans, count)
        compared = (of_teacher > 0) & (of_teacher == _count_tokens(spans[1 : self._longest], count))
        compared &= (of_student > 0) & (of_student == _count_tokens(student_spans[labeled], count))
        # The spans that are compared, without gaps; the last entry is for no span.
        again = np.append(np.where(compared, np.cumsum(compared) - 1, -1), -1)
        spans, student_spans = again[spans][: self._longest], again[student_spans]

        last_theirs, last_ours = np.zeros(int(compared.sum()), np.int64), np.zeros(int(compared.sum()), np.int64)
        # Of several tokens in a span the last one stays, but only spans of one token become pairs.
        last_theirs[spans[spans >= 0]] = theirs[spans >= 0]
        last_ours[student_spans[student_spans >= 0]] = ids[student_spans >= 0]
        known = np.array([self._shared.get(index, -1) for index in last_ours.tolist()], np.int64)
        pairs = (of_teacher[compared] == 1) & (of_student[compared] == 1) & (known == last_theirs)
        return _Translated(theirs, spans, student_spans[labeled], pairs)

    def _parts(self, ids: np.ndarray, labeled: np.ndarray) -> list[tuple[int, int, int, Sequence[int]]]:
        """Split a sequence into parts (start, begin, end, context): the teacher reads the context instead of the tokens
        from start to begin, such as a prompt, and the text of those from begin to end.
        """
        if self._prompts is None:
            return [(0, 0, len(ids), self._starts)]
        # At these places labels begin and end, alternately.
        places = np.flatnonzero(np.diff(labeled, prepend=False, append=False)).tolist()
        begins: list[tuple[int, int, Sequence[int]]] = []
        for stop, begin in zip([0, *places[1::2]], places[::2] or [len(ids)], strict=False):
            context = self._prompts.get(sample_id(*([ids[:stop]] if stop else []), ids[stop:begin]))
            if context is not None:
                begins.append((stop, begin, context))
            elif stop == 0:
                # Without a prompt the first token of an answer is no label either.
                begins.append((0, 0, self._prompts.get(sample_id([]), self._starts)))
        ends = [*(start for start, _, _ in begins[1:]), len(ids)]
        return [(start, begin, end, context) for (start, begin, context), end in zip(begins, ends, strict=True)]

    def _translate_text(self, ids: list[int]) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Return the teacher's tokens of a text, and the spans of the student's tokens and of these.

        The text ends before the first byte that is no UTF-8, as where an answer is cut within a character. An end token
        becomes the teacher's; its other special tokens are not in the text.
        """
        tokens: list[int] = []
        student_spans: list[np.ndarray] = []
        spans: list[np.ndarray] = []
        count = 0
        for is_special, group in groupby(ids, self._student.special.__contains__):
            part = list(group)
            if is_special:
                for index in part:
                    end = self._ends.get(index)
                    student_spans.append(np.array([-1 if end is None else count]))
                    if end is not None:
                        tokens.append(end)
                        spans.append(np.array([count]))
                        count += 1
                continue
            pieces = self._student.split(part)
            if not student_spans:  # a window of a text may begin within a character, whose rest no text has
                # The bytes from 0x80 to 0xBF continue a character of UTF-8.
                rest = next((n for n, piece in enumerate(pieces) if not 0x80 <= (piece or b" ")[0] < 0xC0), len(pieces))
                student_spans.append(np.full(rest, -1))
                pieces = pieces[rest:]
            whole = b"".join(pieces)
            try:
                text = whole.decode("utf-8")
            except UnicodeDecodeError as error:
                text = whole[: error.start].decode("utf-8")
            theirs = self._teacher.encode(text)
            of_student, of_teacher = equal_spans(pieces, self._teacher.split(theirs, text))
            student_spans.append(np.where(of_student >= 0, of_student + count, -1))
            spans.append(np.where(of_teacher >= 0, of_teacher + count, -1))
            tokens += theirs
            count += int(of_student.max(initial=-1)) + 1
        nothing = np.array([], dtype=np.int64)
        return tokens, np.concatenate([nothing, *student_spans]), np.concatenate([nothing, *spans])


@dataclass(frozen=True)
class TranslatedExample:
    """One example of a training set, as a cache of the teacher's outputs knows it."""

    item: Any
    sample_id: int
    length: int

    def __len__(self) -> int:
        """The number of the teacher's tokens."""
        return self.length


def translate_examples(
    items: Sequence[Any], collate: Callable[[list[Any]], Batch], translation: Translation
) -> tuple[list[TranslatedExample], Callable[[list[TranslatedExample]], Batch]]:
    """Return the examples of a training set in the teacher's tokens, and what collates them."""

    def collate_translated(examples: list[Any]) -> Batch:
        return translation(collate(examples))[0]

    translated = []
    for item in progress(items, "Translating", "examples"):
        batch = collate_translated([item])
        translated.append(TranslatedExample(item, batch.sample_ids[0][0], batch.input_ids.shape[1]))
    return translated, lambda examples: collate_translated([example.item for example in examples])


def _count_tokens(spans: np.ndarray, count: int) -> np.ndarray:
    """The number of tokens in each of so many spans."""
    return np.bincount(spans[spans >= 0], minlength=count)


@dataclass
class TranslatedTeacher(Teacher):
    """Gives the outputs of a teacher that reads other tokens than the student."""

    teacher: Teacher
    translation: Translation
    say: Callable[[str], None]
    """Shows a note to the user."""
    _is_told: bool = field(default=False, init=False)

    @property
    def live(self) -> Mapping[str, TappedModel]:
        """The model of the teacher, if it runs here."""
        return self.teacher.live

    def retokenize(self, batch: Batch) -> Batch:
        """Return the text of a batch in the teacher's tokens."""
        return self.translation(batch)[0].with_positions(shift=True).to(batch.input_ids.device)

    def compute_targets(self, batch: Batch, *, lm_head: Sequence[Positions]) -> Outputs:
        """Run the teacher on the text of a batch; the note at the first one says how many labels are compared."""
        assert tuple(lm_head) == ("labels",), "the positions of other tokens are those of the labels"
        device = batch.input_ids.device
        of_teacher, others = self.translation(batch)
        if not self._is_told:
            self.say(
                f"Note        the teacher has another tokenizer; of the first batch's labels {describe_shares(others)}"
            )
            self._is_told = True
        outputs = self.teacher.compute_targets(of_teacher.with_positions(shift=True).to(device), lm_head=lm_head)
        head = outputs.lm_head["labels"]
        assert isinstance(head, HeadInputs), "a cache knows only its own tokens"
        labels_M = others.labels.to(device, non_blocking=True)
        return Outputs(logits=None, taps=Taps(), lm_head={"labels": others._replace(head=head, labels=labels_M)})


def describe_shares(others: OtherTokens) -> str:
    """Return how many of the labels are compared, and how, as words."""
    count = max(1, len(others.pairs))
    pairs, spans = (int((numbers >= 0).sum()) / count for numbers in (others.pairs, others.student_spans))
    missing = abs(1 - pairs - spans)  # not -0 %
    return f"{pairs:.0%} are compared token by token, {spans:.0%} within spans of several, {missing:.0%} not"


def make_translation(plan: TeacherPlan, data: TeacherData) -> Translation:
    """Return the translation from the batches of a run to those of its teacher with another tokenizer."""
    longest = max_positions(plan.models.teacher, sys.maxsize)
    return Translation(data.tokenizer, data.teacher_tokenizer(), prompts=data.teacher_prompts(), longest=longest)


@dataclass(frozen=True)
class TranslatedSource(ModelSource):
    """Reads the text of each batch in the tokens of the teacher of another source."""

    part: TeacherSource

    @property
    def needs_whole(self) -> bool:
        return True

    @property
    def runs_here(self) -> bool:
        return self.part.runs_here

    @property
    def is_scored(self) -> bool:
        return self.part.is_scored

    def build(self, context: TeacherContext) -> TranslatedTeacher:
        translation, first_batch = make_translation(context.plan, context.data), context.first_batch
        if first_batch is not None:
            context = replace(context, first_batch=lambda: translation(first_batch())[0].with_positions(shift=True))
        return TranslatedTeacher(self.part.build(context), translation, say=partial(print_main))

    def settings_of(self, teacher: TeacherConfig) -> Any:
        return self.part.settings_of(teacher)

    def describe(self, teacher: TeacherConfig) -> str:
        return self.part.describe(teacher)

    def check_plan(self, plan: TeacherPlan) -> None:
        self.part.check_plan(plan)
        if not self.part.gives.whole:  # `check_conditions` has refused a server
            raise UserError(
                f"teacher.source {plan.config.teacher.source} gives the most likely tokens alone, but teacher and "
                "student have different tokenizers: train with the teacher itself (teacher.source null)"
            )

    def check_available(self, plan: TeacherPlan) -> tuple[str, str] | None:
        return self.part.check_available(plan)

    def unforecast(self, teacher: TeacherConfig) -> str | None:
        return self.part.unforecast(teacher)

    def examples(
        self, plan: TeacherPlan, data: TeacherData, name: str
    ) -> tuple[Sequence[Any], Callable[[list[Any]], Batch]]:
        return translate_examples(*self.part.examples(plan, data, name), make_translation(plan, data))

    def cache_settings(self, plan: TeacherPlan, settings: CacheConfig) -> CacheConfig:
        return self.part.cache_settings(plan, settings)

    def scorer(self, plan: TeacherPlan) -> Callable[..., Any] | None:
        return self.part.scorer(plan)
