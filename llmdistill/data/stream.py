"""Reads training data during training, for sets that do not fit into memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from llmdistill.batch import Batch
from llmdistill.data.collate import Encoded
from llmdistill.data.examples import Example, all_empty, no_answer
from llmdistill.data.exchange import ALONE, Exchange
from llmdistill.data.instruct import EncodedCounts, InstructData, Limits, encode, none_left
from llmdistill.data.rows import describe_left_out, parse_rows
from llmdistill.data.sampler import Share, StepLoader, bucket
from llmdistill.data.sources import no_example, open_rows
from llmdistill.errors import UserError

Item = TypeVar("Item")

_TOO_MANY_EMPTY = 100
"""A set is refused as one without answers if none of so many first examples has one."""


def shuffle(items: Iterable[Item], size: int, rng: np.random.Generator) -> Iterator[Item]:
    """Yield a permutation of items that holds no more than size of them at a time.

    A loader that starts at any step fills this buffer as it was, so the same step has the same examples. The buffer of
    datasets.IterableDataset is not in its `state_dict`: it is filled anew, with other examples, and a resumed run would
    not be the uninterrupted one.

    Each new item replaces a random item of the buffer, which is yielded; at the end the items that are still in the
    buffer are yielded.
    """
    buffer: list[Item] = []
    for item in items:
        if len(buffer) < size:
            buffer.append(item)
            continue
        place = int(rng.integers(size))
        out, buffer[place] = buffer[place], item
        yield out
    for place in rng.permutation(len(buffer)):
        yield buffer[place]


def check_stream(reference: str | Path, tokenizer: PreTrainedTokenizerBase, limits: Limits) -> None:
    """Read and tokenize the first example of a set. Raises UserError if there is none, or as in `encode`."""
    left_out = Counter[str]()
    first = next(parse_rows(open_rows(reference, streaming=True), left_out), None)
    if first is None:
        raise no_example(reference, left_out)
    encode([first], tokenizer, limits, may_be_empty=True)


@dataclass(frozen=True)
class ExampleStream:
    """The examples of a set, which is read and shuffled epoch after epoch; only a buffer of them is in memory."""

    reference: str | Path
    seed: int
    shuffle_buffer: int

    def walk(self, left_out: Counter[str]) -> Iterator[tuple[int, Example]]:
        """Yield every example with its epoch, without end; `left_out` is that of `parse_rows`."""
        for epoch in count():
            is_empty = True
            rng = np.random.default_rng((self.seed, epoch))
            examples = parse_rows(open_rows(self.reference, streaming=True), left_out)
            # Texts are shuffled, not tokens, because texts are smaller; each text is tokenized when its turn comes.
            for example in shuffle(examples, self.shuffle_buffer, rng):
                is_empty = False
                yield epoch, example
            if is_empty:
                raise no_example(self.reference, left_out)


class _Part(NamedTuple):
    """What rank 0 sends each rank of a block of the stream."""

    epochs: list[int]
    """Of all examples of the block."""
    examples: list[Example]
    """The examples that this rank tokenizes."""


class _Failed(NamedTuple):
    """What a rank reports of its examples of a block if one of them is malformed."""

    place: int
    """The index of the first such example in the block."""
    message: str


class StreamLoader(StepLoader[Encoded]):
    """The batches of one rank, by step, from a set that is read as a stream and never held in memory.

    Like TrainLoader it gives the same batches for the same seed and step, whatever was requested before, on any number
    of ranks. Rank 0 of the exchange alone reads the set and holds the shuffle buffer. It deals the examples out, each
    rank tokenizes its share, and the ranks exchange the tokens, because the length of every example decides which rank
    gets it. To reach a later step the loader skips the steps before it; to reach an earlier step it starts again from
    the beginning. Each epoch has its own order, drawn from seed and epoch; a batch may contain examples of two epochs.
    The loader holds the examples that are sorted by length together.
    """

    def __init__(
        self,
        examples: ExampleStream,
        tokenizer: PreTrainedTokenizerBase,
        limits: Limits,
        share: Share,
        collate: Callable[[list[Encoded]], Batch],
        *,
        exchange: Exchange = ALONE,
    ) -> None:
        """Store the settings. With an exchange, all its ranks must ask for the same steps in the same order."""
        super().__init__(share, collate)
        self.examples = examples
        self.tokenizer = tokenizer
        self.limits = limits
        self.exchange = exchange
        self._restart()

    def global_batch(self, step: int) -> list[Encoded]:
        """See StepLoader.

        Raises:
            UserError: before this step is reached, a row is malformed or, if data.long_prompts is "error", a prompt is
                over the limit; or no prompt of the set is within the limit.
        """
        # The steps whose examples are sorted together have one window.
        number = step // self.share.bucket_steps
        if number < self._number:
            self._restart()
        size = self.share.bucket_steps * self.share.global_batch_size
        try:
            while self._number < number:
                window = list[Encoded]()
                while len(window) < size:
                    # Some may be dropped, and exactly those that are needed are read.
                    window += self._next_block(size - len(window))
                self._window = window
                self._number += 1
        except BaseException:
            # A generator that has failed ends silently when it is used again.
            self._restart()
            raise
        return bucket(self._window, seed=self.share.seed, step=step, bucket_steps=self.share.bucket_steps)

    def keys(self, step: int) -> Sequence[Hashable]:
        """See StepLoader: equal examples count as one."""
        return [item.sample_id for item in self.global_batch(step)]

    def ended(self, examples: int, fresh: int) -> bool:
        return fresh == 0  # the number of the examples is unknown

    def report(self) -> str:
        """Report the source of the examples, and how many were dropped or cut up to the last requested step."""
        counts, examples = self.counts, self.examples
        return (
            f"streamed from {examples.reference}, shuffled among {examples.shuffle_buffer} examples; so far "
            f"{counts.dropped} dropped for a long prompt, {counts.truncated_prompts} prompts and "
            f"{counts.truncated_responses} responses truncated.{describe_left_out(self.left_out)}"
        )

    def _restart(self) -> None:
        self.counts, self.left_out = EncodedCounts(), Counter[str]()
        self._walk = self.examples.walk(self.left_out)
        self._number, self._window = -1, list[Encoded]()
        """The examples of the steps that are sorted together, over all ranks, and the number of this window."""
        self._epoch = self._read = self._fitting = 0
        """The epoch of the last example, and how many of this epoch were read and were within the limits so far."""
        self._unanswered: int | None = 0
        """The number of examples that were read, if none of them had an answer; None as soon as one had."""

    def _next_block(self, size: int) -> list[Encoded]:
        """Read `size` examples of the stream, and return those that the limits leave."""
        exchange = self.exchange
        # A text in place of a part is an error, which all ranks then raise.
        part = exchange.deal(self._read_parts(size) if exchange.rank == 0 else None)
        if isinstance(part, str):
            raise self._make_error(part)
        encoded_parts = exchange.collect(self._tokenize(part.examples))
        failures = [part for part in encoded_parts if isinstance(part, _Failed)]
        # The first one in the block, so that all ranks, and any number of them, raise the same error.
        if failures:
            raise self._make_error(min(failures).message)
        items: dict[int, Encoded] = {}
        for rank, data in enumerate(encoded_parts):
            assert isinstance(data, InstructData)
            # Rank r has the examples r, r + size, r + 2 size ... of the block.
            items.update(zip((rank + place * exchange.size for place in data.indices), data.items, strict=True))
            self.counts = self.counts.plus(data.counts)
        for place, epoch in enumerate(part.epochs):
            if epoch != self._epoch:
                if self._fitting == 0:  # and the next epochs would be no better
                    raise self._make_error(str(none_left(self._read, self.limits)))
                self._epoch, self._read, self._fitting = epoch, 0, 0
            self._read, self._fitting = self._read + 1, self._fitting + (place in items)
        return [items[place] for place in sorted(items)]

    def _read_parts(self, size: int) -> list[_Part | str]:
        """Read a block, and return the parts of the ranks; or for each rank the message of what is wrong with it."""
        ranks = self.exchange.size
        try:
            block = list(islice(self._walk, size))
        except UserError as error:
            return [str(error)] * ranks
        if self._unanswered is not None:
            read = self._unanswered + len(block)
            self._unanswered = read if all_empty([example for _, example in block]) else None
            if self._unanswered is not None and read >= _TOO_MANY_EMPTY:
                return [str(no_answer(self.examples.reference, read, which="the first"))] * ranks
        epochs = [epoch for epoch, _ in block]
        return [_Part(epochs, [example for _, example in block[rank::ranks]]) for rank in range(ranks)]

    def _tokenize(self, examples: list[Example]) -> InstructData | _Failed:
        try:
            return encode(examples, self.tokenizer, self.limits, may_be_empty=True)
        except UserError:
            for place, example in enumerate(examples):
                try:  # alone, so that the message is the same on any number of ranks
                    encode([example], self.tokenizer, self.limits, may_be_empty=True)
                except UserError as error:
                    return _Failed(self.exchange.rank + place * self.exchange.size, str(error))
            raise

    def _make_error(self, message: str) -> UserError:
        error = UserError(message)
        # All ranks raise it, so that rank 0 alone prints it.
        error.everywhere = self.exchange.size > 1
        return error
