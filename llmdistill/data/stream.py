"""Reads training data during training, for sets that do not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from llmdistill.batch import Batch
from llmdistill.data.collate import collate
from llmdistill.data.examples import Example, parse_row
from llmdistill.data.instruct import Encoded, LongPrompts, check_encodable, encode_each, none_left
from llmdistill.data.sampler import bucket, rank_micro_batches
from llmdistill.data.sources import no_example, stream_rows
from llmdistill.errors import UserError

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


def check_stream(reference: str | Path) -> None:
    """Check that a set can be read: read its first row.

    Raises:
        UserError: the set is missing or empty, or the row is malformed.
    """
    first = next(stream_rows(reference), None)
    if first is None:
        raise no_example(reference)
    parse_row(*first)


class StreamLoader:
    """The batches of one rank, by step, from a set that is read as a stream and never held in memory.

    Like TrainLoader it gives the same batches for the same seed and step, whatever was requested before, and the same
    global order for any number of ranks and any micro batch size. Every rank reads and tokenises the whole stream and
    takes its share. To reach a later step the loader skips the steps before it; to reach an earlier step it starts
    again from the beginning. Each epoch has its own order, drawn from seed and epoch; a batch may contain examples of
    two epochs. The loader holds the shuffle buffer and the examples that are sorted by length together.
    """

    def __init__(
        self,
        reference: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_length: int,
        max_length: int,
        long_prompts: LongPrompts = "error",
        shuffle_buffer: int,
        pad_token_id: int,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        collate: Callable[[Sequence[Encoded], int], Batch] = collate,
        bucket_steps: int = 1,
        spread: bool = False,
    ) -> None:
        """Check the settings and the first row of the set; the last three arguments are those of TrainLoader.

        Raises:
            UserError: a limit or the tokenizer does not fit, or the set is missing, empty or malformed.
        """
        check_encodable(tokenizer, max_prompt_length, max_length)
        if shuffle_buffer < 1:
            raise UserError(f"data.shuffle_buffer is {shuffle_buffer}: give 1 or more (1 keeps the order of the set)")
        self.reference = reference
        self.tokenizer = tokenizer
        self.max_prompt_length = max_prompt_length
        self.max_length = max_length
        self.long_prompts: LongPrompts = long_prompts
        self.shuffle_buffer = shuffle_buffer
        self.pad_token_id = pad_token_id
        self.seed = seed
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size
        self.collate = collate
        self.bucket_steps = bucket_steps
        self.spread = spread
        self._restart()
        check_stream(reference)

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's micro batches of a step (from 0), each (B, T) with B = micro_batch_size, fewer rows if packed."""
        return [self.collate(items, self.pad_token_id) for items in self.micro_batch_items(step)]

    def micro_batch_items(self, step: int) -> list[list[Encoded]]:
        """The examples of each of this rank's micro batches of a step, in order.

        Raises:
            UserError: before this step is reached, a row is malformed or, if data.long_prompts is "error", a prompt is
                over the limit; or no prompt of the set is within the limit.
        """
        window = self._read_window(step // self.bucket_steps)
        return rank_micro_batches(
            bucket(window, seed=self.seed, step=step, bucket_steps=self.bucket_steps),
            rank=self.rank,
            world_size=self.world_size,
            micro_batch_size=self.micro_batch_size,
            spread=self.spread,
        )

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
                self._window = list(islice(self._walk, self.bucket_steps * self.global_batch_size))
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
            rng = np.random.default_rng((self.seed, epoch))
            # Texts are shuffled, not tokens, because texts are smaller; each text is tokenised when its turn comes.
            for example in shuffled(self._examples(), self.shuffle_buffer, rng):
                read += 1
                item = self._encode(example)
                if item is not None:
                    kept += 1
                    yield item
            if read == 0:
                raise no_example(self.reference)
            if kept == 0:
                raise none_left(read, self.max_prompt_length)

    def _examples(self) -> Iterator[Example]:
        return (parse_row(row, source) for row, source in stream_rows(self.reference))

    def _encode(self, example: Example) -> Encoded | None:
        """The tokens of an example; None if it is dropped."""
        data = encode_each(
            [example],
            self.tokenizer,
            max_prompt_length=self.max_prompt_length,
            max_length=self.max_length,
            long_prompts=self.long_prompts,
        )
        self.dropped += data.dropped
        self.truncated_prompts += data.truncated_prompts
        self.truncated_responses += data.truncated_responses
        return data.items[0] if data.items else None
