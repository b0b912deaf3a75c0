"""Batches of plain text: next tokens for decoders; masked tokens, and next-sentence targets, for encoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from llmdistill.batch import IGNORE_INDEX, Batch
from llmdistill.data.collate import padded, padding_mask, sample_id
from llmdistill.data.corpus import Corpus
from llmdistill.data.layouts import Objective, TextSequence, lay_out
from llmdistill.data.masking import mask_tokens, ordinary_tokens, vocabulary_mask, word_starts
from llmdistill.errors import UserError


@dataclass(frozen=True)
class TextInputs:
    """A sequence as a model sees it."""

    sequence: TextSequence
    shown: np.ndarray
    """(T,) int64, the input tokens."""
    labels: np.ndarray
    """(T,) int64."""

    @cached_property
    def sample_id(self) -> int:
        """The id of the sample; see the function `sample_id`."""
        return sample_id(self.shown)

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.shown)


class TextSequences:
    """The sequences of a corpus as inputs of a model, each a pure function of seed, epoch and index."""

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: PreTrainedTokenizerBase,
        *,
        objective: Objective,
        max_length: int,
        mask_share: float = 0.15,
        whole_words: bool = False,
        pairs: bool = False,
        next_sentence: bool = False,
    ) -> None:
        """Find the places of the sequences; their tokens stay on disk until they are requested.

        With `pairs` each sequence has two segments; with `next_sentence` it also has the target whether they follow
        one another.

        Raises:
            UserError: the text is too short, or the tokenizer lacks a token that the objective needs.
        """
        self.max_length = max_length
        self.masked = objective == "masked"
        assert pairs or not next_sentence, "only a pair has a next sentence"
        self.next_sentence = next_sentence
        self.layout = lay_out(corpus, tokenizer, objective, max_length, pairs)
        self._mask_share = mask_share
        self._mask_token_id = tokenizer.mask_token_id
        pads = (tokenizer.pad_token_id, tokenizer.sep_token_id, tokenizer.eos_token_id)
        self._pad_token_id = next((pad for pad in pads if pad is not None), 0)
        # A decoder has no segments, whatever its tokenizer gives: GPT-2 would add the embedding of a token for each
        # segment id.
        self._token_types = self.masked and "token_type_ids" in tokenizer.model_input_names
        self._vocabulary = ordinary_tokens(tokenizer)
        self._special = vocabulary_mask(tokenizer, lambda _: False)
        self._special[tokenizer.all_special_ids] = True
        self._word_starts = word_starts(tokenizer) if self.masked and whole_words else None

    def __len__(self) -> int:
        """The number of sequences of an epoch."""
        return len(self.layout)

    def length(self, place: int) -> int:
        """See `sampler.SequenceSource`: nearly all sequences are as long as they may be."""
        return self.max_length

    def batch(self, places: Sequence[int], seed: int) -> Batch:
        """The sequences at these places, padded on the right; places count through the epochs without end.

        A place is epoch * len(self) + index.
        """
        return self.collate([self.read(seed, *divmod(place, len(self))) for place in places])

    def collate(self, parts: Sequence[TextInputs]) -> Batch:
        """The batch of sequences that `read` has made, also those of other texts with the same settings."""
        rows = [part.shown for part in parts]
        types = [np.arange(len(part)) >= part.sequence.second for part in parts]
        return Batch(
            input_ids=padded(rows, self._pad_token_id),
            attention_mask=padding_mask(rows),
            labels=padded([part.labels for part in parts], IGNORE_INDEX),
            token_type_ids=padded(types, 0) if self._token_types else None,
            targets=torch.tensor([part.sequence.target for part in parts]) if self.next_sentence else None,
            sample_ids=tuple((part.sample_id,) for part in parts),
        )

    def read(self, seed: int, epoch: int, index: int, *part: int) -> TextInputs:
        """The sequence at an index, as an epoch sees it; `part` is the number of this text among several."""
        # The 1 separates index 0 from the random numbers of (seed, epoch) alone: the order of the epoch.
        rng = np.random.default_rng((seed, epoch, index, 1, *part))
        sequence = self.layout.read(index, rng)
        if not self.masked:
            return TextInputs(sequence, sequence.ids, sequence.ids)
        special = self._special[sequence.ids]
        special[0] = True  # nearly always the start token; no loss uses the first label
        shown, labels = mask_tokens(
            sequence.ids,
            special,
            rng=rng,
            mask_share=self._mask_share,
            mask_token_id=self._mask_token_id,
            vocabulary=self._vocabulary,
            word_starts=self._word_starts,
        )
        return TextInputs(sequence, shown, labels)


class FixedSequences:
    """The sequences of a text for a decoder, the same in every epoch; they are read when they are requested."""

    def __init__(self, text: TextSequences, limit: int | None = None) -> None:
        """`limit` keeps the first ones."""
        assert not text.masked, "the masks of an encoder are drawn in every epoch"
        self._text = text
        self._size = len(text) if limit is None else min(len(text), limit)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> TextInputs:
        return self._text.read(0, 0, index)


def validation_batches(
    sequences: TextSequences, *, limit: int, batch_size: int, rank: int = 0, world_size: int = 1
) -> list[Batch]:
    """One rank's share of the first sequences of a text, whose masks and pairs are always the same.

    All ranks get the same number of batches (a sharded model needs all ranks in every forward pass), and each sequence
    is in exactly one batch, so that every token counts once. The size of a batch is about `batch_size`.

    Raises:
        UserError: there are fewer sequences than ranks.
    """
    size = min(len(sequences), limit)
    if size < world_size:
        raise UserError(
            f"data.valid has {size} sequences of {sequences.max_length} tokens (at most data.text.valid_sequences "
            f"{limit}) for {world_size} ranks: give a longer text, or data.text.valid_sequences of {world_size} or more"
        )
    rounds = -(-size // (batch_size * world_size))
    if rounds * world_size > size:  # tiny batches: a few larger batches rather than an empty one
        rounds -= 1
    parts = np.array_split(np.arange(size), rounds * world_size)
    return [sequences.batch(part.tolist(), seed=0) for part in parts[rank::world_size]]
