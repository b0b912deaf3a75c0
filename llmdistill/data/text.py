"""Batches of plain text: next tokens for decoders; masked tokens, and next-sentence targets, for encoders."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from llmdistill.batch import IGNORE_INDEX, Batch
from llmdistill.data.collate import pad_rows, padding_mask
from llmdistill.data.corpus import Corpus
from llmdistill.data.masking import Masking, special_mask
from llmdistill.data.random_streams import SEQUENCE, STRIDE
from llmdistill.data.sampler import share_out
from llmdistill.data.sequences import TextSequence, cut_sequences
from llmdistill.errors import UserError


class TextSequences:
    """The sequences of a corpus as inputs of a model, each a pure function of seed, epoch and index."""

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        masking: Masking | None,
        pairs: bool = False,
        next_sentence: bool = False,
    ) -> None:
        """Find the places of the sequences; their tokens stay on disk until they are requested.

        An encoder predicts the tokens that the `masking` chooses; without one a decoder predicts each next token. With
        `pairs` each sequence has two segments; with `next_sentence` it also has the target whether they follow one
        another.

        Raises:
            UserError: as in `cut_sequences`.
        """
        self.max_length = max_length
        assert pairs or not next_sentence, "only a pair has a next sentence"
        self.next_sentence = next_sentence
        self._sequences = cut_sequences(corpus, tokenizer, max_length, masked=masking is not None, pairs=pairs)
        pads = (tokenizer.pad_token_id, tokenizer.sep_token_id, tokenizer.eos_token_id)
        # The mask hides padding, so any token will do.
        self._pad_token_id = next((pad for pad in pads if pad is not None), 0)
        # A decoder has no segments, whatever its tokenizer gives: GPT-2 would add the embedding of a token for each
        # segment id.
        self._token_types = masking is not None and "token_type_ids" in tokenizer.model_input_names
        self._special = special_mask(tokenizer)
        self._masking = masking

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> TextSequence:
        """Return a sequence of a decoder, which is the same in every epoch."""
        return self.read(0, 0, index)

    def length(self, place: int) -> int:
        """See `sampler.SequenceSet`: nearly all sequences are as long as they may be."""
        return self.max_length

    def key(self, place: int, seed: int) -> int:
        """See `sampler.SequenceSet`."""
        return place % len(self)

    def batch(self, places: Sequence[int], seed: int) -> Batch:
        """See `sampler.SequenceSet`: the sequences are padded on the right."""
        return self.collate([self.read(seed, *divmod(place, len(self))) for place in places])

    def collate(self, parts: Sequence[TextSequence]) -> Batch:
        """Collate sequences of `read`, also those of other texts with the same settings."""
        rows = [part.ids for part in parts]
        types = [np.arange(len(part)) >= part.second for part in parts]
        return Batch(
            input_ids=pad_rows(rows, self._pad_token_id),
            attention_mask=padding_mask(rows),
            labels=pad_rows([part.labels for part in parts], IGNORE_INDEX),
            token_type_ids=pad_rows(types, 0) if self._token_types else None,
            targets=torch.tensor([part.target for part in parts]) if self.next_sentence else None,
            sample_ids=tuple((part.sample_id,) for part in parts),
        )

    def read(self, seed: int, epoch: int, index: int, *part: int) -> TextSequence:
        """Return the sequence at an index in an epoch; `part` is the number of this text among several."""
        rng = np.random.default_rng((seed, epoch, index, SEQUENCE, *part))
        sequence = self._sequences.read(index, rng)
        if self._masking is None:
            return sequence
        special = self._special[sequence.ids]
        special[0] = True  # nearly always the start token; no loss uses the first label
        shown, labels = self._masking(sequence.ids, special, rng)
        return replace(sequence, ids=shown, labels=labels)


class MixedSequences:
    """The sequences of several texts; like those of one text, each is a pure function of seed, epoch and index.

    Text i with n_i of the N sequences is sampled with probability q_i = n_i^a / (n_1^a + n_2^a + ...) for the exponent
    a (XLM, Lample and Conneau 2019, section 3.1; XLM-R takes a = 0.3). An epoch has N sequences, of which N q_i are
    from text i, so that the shares are exact in every epoch and not only on average. Each text goes through all of its
    own sequences before one of them comes again, however many epochs that takes, and in an order of its own, so that
    also the first epoch sees all regions of a large text.
    """

    def __init__(
        self, parts: Mapping[str, TextSequences], exponent: float, weights: Sequence[float] | None = None
    ) -> None:
        """Choose the number of sequences of each part in an epoch; the parts have the same settings and tokenizer.

        With `weights` their shares are given, and the exponent has no effect.
        """
        self.names = list(parts)
        self.parts = list(parts.values())
        sizes = [len(part) for part in self.parts]
        self.counts = mixture_counts(sizes, exponent) if weights is None else share_out(sum(sizes), weights)
        self._ends = np.cumsum(self.counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def key(self, place: int, seed: int) -> tuple[int, int]:
        """See `sampler.SequenceSet`."""
        number, _, index = self._find(place, seed)
        return number, index

    def batch(self, places: Sequence[int], seed: int) -> Batch:
        found = [self._find(place, seed) for place in places]
        return self.parts[0].collate(
            [self.parts[number].read(seed, epoch, index, number) for number, epoch, index in found]
        )

    def _find(self, place: int, seed: int) -> tuple[int, int, int]:
        """Return the text of a place, the epoch of that text, and the index in it."""
        epoch, index = divmod(place, len(self))
        number = int(np.searchsorted(self._ends, index, side="right"))
        part, count = self.parts[number], self.counts[number]
        # The sequences of a text are counted through the epochs of the mixture without end.
        own_epoch, offset = divmod(epoch * count + index - int(self._ends[number] - count), len(part))
        # A step of about the golden ratio of the size spreads even the first few sequences over the whole text, and
        # needs no memory, unlike a permutation of a large text. Without a common divisor it reaches all of them.
        start = int(np.random.default_rng((seed, own_epoch, number, STRIDE)).integers(len(part)))
        stride = round(len(part) * 0.618)
        while math.gcd(stride, len(part)) != 1:
            stride += 1
        return number, own_epoch, (start + offset * stride) % len(part)

    def length(self, place: int) -> int:
        return self.parts[0].length(place)

    def report(self) -> str:
        """Return a sentence with the share of each text in the data and in the batches."""
        total = len(self)
        shares = [
            f"{name} {len(part) / total:.1%} of the text and {count / total:.1%} of the batches"
            for name, part, count in zip(self.names, self.parts, self.counts, strict=True)
        ]
        return f"{len(shares)} parts: {', '.join(shares)}"


def mixture_counts(sizes: Sequence[int], exponent: float) -> list[int]:
    """Return how many sequences of an epoch each text gives: `share_out` by its size to the power of the exponent."""
    return share_out(sum(sizes), [size**exponent for size in sizes])


def validation_batches(
    sequences: TextSequences, *, limit: int, batch_size: int, rank: int = 0, world_size: int = 1
) -> list[Batch]:
    """Return one rank's share of the first sequences of a text, whose masks and pairs are always the same.

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
    rounds = -(-size // (batch_size * world_size))  # rounded up
    if rounds * world_size > size:  # tiny batches: a few larger batches rather than an empty one
        rounds -= 1
    parts = np.array_split(np.arange(size), rounds * world_size)
    return [sequences.batch(part.tolist(), seed=0) for part in parts[rank::world_size]]
