"""Batches of plain text: next tokens for decoders; masked tokens, and next-sentence targets, for encoders."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from llmdistill.batch import IGNORE_INDEX, Batch
from llmdistill.data.corpus import Corpus
from llmdistill.data.layouts import Objective, TextSequence, lay_out
from llmdistill.data.masking import mask_tokens, word_starts
from llmdistill.data.sample_ids import sample_id
from llmdistill.data.sampler import global_batch_indices, rank_micro_batches
from llmdistill.errors import UserError


class _Sequences:
    """The sequences of a corpus as inputs of a model, each a pure function of seed, epoch and index."""

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: PreTrainedTokenizerBase,
        *,
        objective: Objective,
        max_length: int,
        mask_share: float,
        whole_words: bool,
        next_sentence: bool,
    ) -> None:
        self.max_length = max_length
        self.masked = objective == "masked"
        self.next_sentence = next_sentence
        self.layout = lay_out(corpus, tokenizer, objective, max_length, next_sentence)
        self._mask_share = mask_share
        self._mask_token_id = tokenizer.mask_token_id
        pads = (tokenizer.pad_token_id, tokenizer.sep_token_id, tokenizer.eos_token_id)
        self._pad_token_id = next((pad for pad in pads if pad is not None), 0)
        # A decoder has no segments, whatever its tokenizer gives: GPT-2 would add the embedding of a token for each
        # segment id.
        self._token_types = self.masked and "token_type_ids" in tokenizer.model_input_names
        every = np.array(sorted(tokenizer.get_vocab().values()))
        self._special = np.zeros(every[-1] + 1, dtype=bool)
        self._special[tokenizer.all_special_ids] = True
        self._vocabulary = every[~self._special[every]]
        self._word_starts = word_starts(tokenizer) if self.masked and whole_words else None

    def __len__(self) -> int:
        return len(self.layout)

    def batch(self, places: Sequence[int], seed: int) -> Batch:
        """The sequences at these places, padded on the right; places count through the epochs without end.

        A place is epoch * len(self) + index.
        """
        parts = [self._read(seed, *divmod(place, len(self))) for place in places]
        width = max(len(sequence.ids) for sequence, _, _ in parts)

        def padded(rows: list[np.ndarray], padding: int) -> Tensor:
            filled = np.full((len(rows), width), padding, np.int64)
            for row, values in enumerate(rows):
                filled[row, : len(values)] = values
            return torch.from_numpy(filled)

        types = [(np.arange(len(sequence.ids)) >= sequence.second).astype(np.int64) for sequence, _, _ in parts]
        return Batch(
            input_ids=padded([shown for _, shown, _ in parts], self._pad_token_id),
            attention_mask=padded([np.ones(len(shown), np.int64) for _, shown, _ in parts], 0),
            labels=padded([labels for _, _, labels in parts], IGNORE_INDEX),
            token_type_ids=padded(types, 0) if self._token_types else None,
            targets=torch.tensor([sequence.target for sequence, _, _ in parts]) if self.next_sentence else None,
            sample_ids=tuple((sample_id(shown),) for _, shown, _ in parts),
        )

    def _read(self, seed: int, epoch: int, index: int) -> tuple[TextSequence, np.ndarray, np.ndarray]:
        """A sequence, its input tokens, and its labels."""
        # The last number separates index 0 from the random numbers of (seed, epoch) alone, which decide the order of
        # the epoch.
        rng = np.random.default_rng((seed, epoch, index, 1))
        sequence = self.layout.read(index, rng)
        if not self.masked:
            return sequence, sequence.ids, sequence.ids
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
        return sequence, shown, labels


class TextLoader:
    """The batches of one rank, by step, from a corpus. The loader has no state, so a resumed run needs only the step.

    Each epoch has its own order of the sequences, its own masks and its own pairs, all drawn from seed, epoch and index
    of the sequence. So the global order is the same for any number of ranks and any micro batch size. A batch may
    contain sequences of two epochs.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: PreTrainedTokenizerBase,
        *,
        objective: Objective,
        max_length: int,
        mask_share: float = 0.15,
        whole_words: bool = False,
        next_sentence: bool = False,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Find the places of the sequences; their tokens stay on disk until they are requested.

        Raises:
            UserError: the text is too short, or the tokenizer lacks a token that the objective needs.
        """
        self._sequences = _Sequences(
            corpus,
            tokenizer,
            objective=objective,
            max_length=max_length,
            mask_share=mask_share,
            whole_words=whole_words,
            next_sentence=next_sentence,
        )
        self.seed = seed
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size

    def __len__(self) -> int:
        """The number of sequences of an epoch."""
        return len(self._sequences)

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's micro batches of a step (from 0), each (B, T) with B = micro_batch_size, T at most max_length."""
        size = len(self._sequences)
        indices = global_batch_indices(
            seed=self.seed, step=step, dataset_size=size, global_batch_size=self.global_batch_size
        )
        first = step * self.global_batch_size
        places = [(first + offset) // size * size + index for offset, index in enumerate(indices)]
        parts = rank_micro_batches(
            places, rank=self.rank, world_size=self.world_size, micro_batch_size=self.micro_batch_size
        )
        return [self._sequences.batch(part, self.seed) for part in parts]

    def report(self) -> str:
        """Report in one sentence how many sequences an epoch has, and how much of them is padding."""
        sequences = self._sequences
        return (
            f"{len(sequences):,} sequences of up to {sequences.max_length} tokens, {sequences.layout.filled:.0%} filled"
        )


def validation_batches(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerBase,
    *,
    objective: Objective,
    max_length: int,
    mask_share: float,
    whole_words: bool,
    next_sentence: bool,
    limit: int,
    batch_size: int,
    rank: int,
    world_size: int,
) -> list[Batch]:
    """One rank's share of the first sequences of a text, whose masks and pairs are always the same.

    All ranks get the same number of batches (a sharded model needs all ranks in every forward pass), and each sequence
    is in exactly one batch, so that every token counts once. The size of a batch is about `batch_size`.

    Raises:
        UserError: as in TextLoader, or there are fewer sequences than ranks.
    """
    sequences = _Sequences(
        corpus,
        tokenizer,
        objective=objective,
        max_length=max_length,
        mask_share=mask_share,
        whole_words=whole_words,
        next_sentence=next_sentence,
    )
    size = min(len(sequences), limit)
    if size < world_size:
        raise UserError(
            f"data.valid has {size} sequences of {max_length} tokens (at most data.text.valid_sequences {limit}) for "
            f"{world_size} ranks: give a longer text, or data.text.valid_sequences of {world_size} or more"
        )
    rounds = -(-size // (batch_size * world_size))
    if rounds * world_size > size:  # tiny batches: a few larger batches rather than an empty one
        rounds -= 1
    parts = np.array_split(np.arange(size), rounds * world_size)
    return [sequences.batch(part.tolist(), seed=0) for part in parts[rank::world_size]]
