"""Sources with a target text that an encoder learns to write: UniLM's sequence-to-sequence fine-tuning (§2.3, §3.3).

A row is [CLS] source [SEP] target [SEP]; a hint, such as the answer that a question asks for, follows the source as
[CLS] source [SEP] hint [SEP]. The tokens up to the first token of the target see all of these; a token of the target
sees them and the target up to itself. Source and hint are segment 0, the target is segment 1, as in BERT's pairs
(UniLM adds segments of its own, which a BERT does not have).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from transformers import PreTrainedTokenizerBase

from llmdistill.batch import IGNORE_INDEX, Batch
from llmdistill.data.collate import pad_rows, padding_mask, sample_id
from llmdistill.data.masking import Masking
from llmdistill.data.random_streams import SEQUENCE
from llmdistill.data.store import TOKEN_IDS, Schema
from llmdistill.errors import UserError
from llmdistill.models.unembedded import check_token_ids


@dataclass(frozen=True)
class TargetExample:
    """A text to write, and what it is written from."""

    source: str
    hint: str | None
    """A second text of the source that is never cut; None without one."""
    target: str


@dataclass(frozen=True)
class EncodedTarget:
    source_ids: list[int]
    """Source and hint with their special tokens."""
    target_ids: list[int]
    """Ends with the end token unless the target was cut."""

    def __len__(self) -> int:
        return len(self.source_ids) + len(self.target_ids)

    @property
    def ids(self) -> list[int]:
        return self.source_ids + self.target_ids

    @property
    def source_length(self) -> int:
        return len(self.source_ids)


TARGETS = Schema(
    make=lambda ids, source_length: EncodedTarget(ids[:source_length].tolist(), ids[source_length:].tolist()),
    columns={"ids": TOKEN_IDS, "source_length": pa.int32()},
)
"""How encoded targets are stored on disk."""


@dataclass(frozen=True)
class EncodedTargets:
    items: list[EncodedTarget]
    cut_sources: int
    """The number of sources whose end is left out."""
    cut_targets: int
    """The number of targets whose end is left out, the end token included."""


@dataclass(frozen=True)
class Marks:
    """The special tokens of a row."""

    start: int
    end: int
    """The separator, which also ends the target."""
    mask: int
    padding: int
    has_segments: bool
    """Whether the model reads segment ids."""
    unwritten: tuple[int, ...] = ()
    """The special tokens that are never in a text: all but the end, because no other one is ever a label."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Marks:
        """Return the special tokens of a tokenizer. Raises UserError if it lacks one, as all but encoders do."""
        names = ("cls_token", "sep_token", "mask_token", "pad_token")
        missing = [name for name in names if getattr(tokenizer, name) is None]
        if missing:
            raise UserError(
                f"the tokenizer has no {missing[0]}: an encoder that learns to write needs {', '.join(names)}; name "
                "them in tokenizer_config.json"
            )
        ids: list[Any] = [getattr(tokenizer, f"{name}_id") for name in names]
        start, end, mask, padding = ids
        unwritten = tuple(token for token in tokenizer.all_special_ids if token != end)
        return cls(start, end, mask, padding, "token_type_ids" in tokenizer.model_input_names, unwritten)


def encode_targets(
    examples: Sequence[TargetExample], tokenizer: PreTrainedTokenizerBase, *, max_source: int, max_target: int
) -> EncodedTargets:
    """Tokenize each example, and cut the end of a source or target that exceeds its limit.

    `max_source` counts the tokens of source and hint, special tokens included, `max_target` those of the target with
    its end token.

    Raises:
        UserError: a hint leaves no room for its source, or the tokenizer lacks a special token.
    """
    marks = Marks.of(tokenizer)
    sources = _tokenize([example.source for example in examples], tokenizer)
    hints = _tokenize([example.hint or "" for example in examples], tokenizer)
    targets = _tokenize([example.target for example in examples], tokenizer)
    items, cut_sources, cut_targets = [], 0, 0
    for example, source, hint, target in zip(examples, sources, hints, targets, strict=True):
        after_source = [marks.end] if example.hint is None else [marks.end, *hint, marks.end]
        room = max_source - 1 - len(after_source)  # 1 for the start token
        if room < 1:
            raise UserError(
                f"the source is cut to {max_source} tokens (data.max_length less data.task.writing.max_length), but "
                f"{example.hint!r} leaves no room in them: raise data.max_length"
            )
        cut_sources += len(source) > room
        cut_targets += len(target) > max_target - 1
        ids = [marks.start, *source[:room], *after_source]
        # Only a target that is complete has its end.
        items.append(EncodedTarget(ids, [*target, marks.end][:max_target]))
    return EncodedTargets(items, cut_sources, cut_targets)


def _tokenize(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    check_token_ids(tokenizer, ids, lambda number, _: texts[number])
    return ids


def collate_targets(items: Sequence[EncodedTarget], marks: Marks) -> Batch:
    """Collate sources with their targets as they are, (B, T), padded on the right, without labels."""
    rows = [np.array(item.ids) for item in items]
    input_ids = pad_rows(rows, marks.padding)
    types = [np.arange(len(item)) >= len(item.source_ids) for item in items]
    return Batch(
        input_ids=input_ids,
        attention_mask=padding_mask(rows),
        labels=torch.full_like(input_ids, IGNORE_INDEX),
        token_type_ids=pad_rows(types, 0) if marks.has_segments else None,
        # All of the source is seen, and the target up to the token itself.
        visible_until=pad_rows(
            [np.maximum(np.arange(1, len(item) + 1), len(item.source_ids)) for item in items], input_ids.shape[1]
        ),
        sample_ids=tuple((sample_id(row),) for row in rows),
    )


class MaskedTargets:
    """Sources with their targets as inputs of a model, each a pure function of seed, epoch and index.

    Some tokens of the target, the end token among them, are chosen anew in each epoch, to be predicted where they
    stand; of these most are masked, some replaced by random tokens, as in BERT (see `Masking`). The source stays.
    """

    def __init__(
        self, items: Sequence[EncodedTarget], tokenizer: PreTrainedTokenizerBase, *, mask_share: float
    ) -> None:
        """`mask_share` is the share of the tokens of each target that is predicted; at least one is."""
        self.items = items
        self._marks = Marks.of(tokenizer)
        self._masking = Masking.of(tokenizer, mask_share)

    def __len__(self) -> int:
        return len(self.items)

    def length(self, place: int) -> int:
        return len(self.items[place % len(self)])

    def key(self, place: int, seed: int) -> int:
        """See `sampler.SequenceSet`."""
        return place % len(self)

    def batch(self, places: Sequence[int], seed: int) -> Batch:
        """See `sampler.SequenceSet`: the sequences are padded on the right."""
        items = [self.items[place % len(self)] for place in places]
        rows, labels = [], []
        for item, place in zip(items, places, strict=True):
            ids = np.array(item.ids)
            # The source is what the model reads, so none of it is masked.
            in_source = np.arange(len(ids)) < len(item.source_ids)
            rng = np.random.default_rng((seed, *divmod(place, len(self)), SEQUENCE))  # seed, epoch, index
            row, row_labels = self._masking(ids, in_source, rng)
            rows.append(row)
            labels.append(row_labels)
        return replace(
            collate_targets(items, self._marks),
            input_ids=pad_rows(rows, self._marks.padding),
            labels=pad_rows(labels, IGNORE_INDEX),
            # Of the masked rows, which are what a teacher reads.
            sample_ids=tuple((sample_id(row),) for row in rows),
        )
