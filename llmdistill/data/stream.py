"""Reads training data during training, for sets that do not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from llmdistill.batch import Batch
from llmdistill.data.collate import Encoded
from llmdistill.data.examples import parse_row
from llmdistill.data.instruct import Limits, encode, none_left
from llmdistill.data.sampler import Share, StepLoader, bucket
from llmdistill.data.sources import no_example, stream_rows

Item = TypeVar("Item")


def shuffled(items: Iterable[Item], size: int, rng: np.random.Generator) -> Iterator[Item]:
    """Yield a permutation of items that holds no more than size of them at a time.

    Each new item replaces a random item of the buffer, which is yielded; at the end the items that are still in the
    buffer are yielded.
    """
    held: list[Item] = []
    for item in items:
        if len(held) < size:
            held.append(item)
            continue
        place = int(rng.integers(size))
        out, held[place] = held[place], item
        yield out
    for place in rng.permutation(len(held)):
        yield held[place]


def check_stream(reference: str | Path, tokenizer: PreTrainedTokenizerBase, limits: Limits) -> None:
    """Check that a set can be read: read and tokenise its first row.

    Raises:
        UserError: the set is missing or empty, or the row is malformed; or as in `encode`.
    """
    first = next(stream_rows(reference), None)
    if first is None:
        raise no_example(reference)
    encode([parse_row(*first)], tokenizer, limits, may_be_empty=True)


class StreamLoader(StepLoader[Encoded]):
    """The batches of one rank, by step, from a set that is read as a stream and never held in memory.

    Like TrainLoader it gives the same batches for the same seed and step, whatever was requested before. Every rank
    reads and tokenises the whole stream and takes its share. To reach a later step the loader skips the steps before
    it; to reach an earlier step it starts again from the beginning. Each epoch has its own order, drawn from seed and
    epoch; a batch may contain examples of two epochs. The loader holds the shuffle buffer and the examples that are
    sorted by length together.
    """

    def __init__(
        self,
        reference: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        limits: Limits,
        share: Share,
        collate: Callable[[list[Encoded]], Batch],
        *,
        shuffle_buffer: int,
        bucket_steps: int = 1,
        spread: bool = False,
    ) -> None:
        """Store the settings; bucket_steps and spread are those of TrainLoader."""
        super().__init__(share, collate, spread=spread)
        self.reference = reference
        self.tokenizer = tokenizer
        self.limits = limits
        self.shuffle_buffer = shuffle_buffer
        self.bucket_steps = bucket_steps
        self._restart()

    def global_batch(self, step: int) -> list[Encoded]:
        """See StepLoader; the longest example comes first.

        Raises:
            UserError: before this step is reached, a row is malformed or, if data.long_prompts is "error", a prompt is
                over the limit; or no prompt of the set is within the limit.
        """
        window = self._read_window(step // self.bucket_steps)
        return bucket(window, seed=self.share.seed, step=step, bucket_steps=self.bucket_steps)

    def report(self) -> str:
        """Report the source of the examples, and how many were dropped or cut up to the last requested step."""
        return (
            f"streamed from {self.reference}, shuffled among {self.shuffle_buffer} examples; so far {self.dropped} "
            f"dropped for a long prompt, {self.truncated_prompts} prompts and {self.truncated_responses} responses "
            "truncated."
        )

    def _restart(self) -> None:
        self._walk = self._encoded()
        self._number, self._window = -1, list[Encoded]()
        self.dropped = self.truncated_prompts = self.truncated_responses = 0

    def _read_window(self, number: int) -> list[Encoded]:
        """The examples of the steps that are sorted together, over all ranks; kept until other steps are requested."""
        assert number >= 0
        if number < self._number:
            self._restart()
        try:
            while self._number < number:
                self._window = list(islice(self._walk, self.bucket_steps * self.share.global_batch_size))
                self._number += 1
        except BaseException:
            # A generator that has failed ends silently when it is used again.
            self._restart()
            raise
        return self._window

    def _encoded(self) -> Iterator[Encoded]:
        """Yield every example within the limits, epoch after epoch, without end."""
        for epoch in count():
            read, kept = 0, 0
            rng = np.random.default_rng((self.share.seed, epoch))
            examples = (parse_row(row, source) for row, source in stream_rows(self.reference))
            # Texts are shuffled, not tokens, because texts are smaller; each text is tokenised when its turn comes.
            for example in shuffled(examples, self.shuffle_buffer, rng):
                read += 1
                data = encode([example], self.tokenizer, self.limits, may_be_empty=True)
                self.dropped += data.dropped
                self.truncated_prompts += data.truncated_prompts
                self.truncated_responses += data.truncated_responses
                kept += len(data.items)
                yield from data.items
            if read == 0:
                raise no_example(self.reference)
            if kept == 0:
                raise none_left(read, self.limits)
