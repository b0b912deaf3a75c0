"""Gives methods whose training texts differ in length the same number of training tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import count, islice
from pathlib import Path

import numpy as np

from llmdistill.config import RunConfig
from llmdistill.data.instruct import Limits, encode
from llmdistill.data.sampler import global_batch_indices
from llmdistill.data.sources import read_examples
from llmdistill.embedded import locate
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.run.plan import tokenizer_path


def steps_for_equal_tokens(config: RunConfig, other: Path, seed: int) -> int:
    """Return the number of steps after which a run on `other` has seen as many tokens as the run on its own data.

    The loader is a pure function of seed and step, so the token counts of both runs are known before the training.
    They are unknown for a streamed set and if `other` does not exist; then the number of steps is unchanged.
    """
    if config.data.streaming or not other.is_file():
        return config.train.steps
    budget = sum(islice(_step_tokens(config, config.data.train, seed), config.train.steps))
    seen = 0
    for step, tokens in enumerate(_step_tokens(config, str(other), seed)):
        if seen + tokens >= budget:
            is_nearer = seen + tokens - budget <= budget - seen
            return max(1, step + is_nearer)
        seen += tokens
    raise AssertionError("the loader has no end")


def _step_tokens(config: RunConfig, reference: str, seed: int) -> Iterator[int]:
    """Yield the number of tokens without padding in the global batch of each step, endlessly."""
    data, size = config.data, config.train.global_batch_size
    lengths = _lengths(tokenizer_path(config), reference, Limits.of(data, []))
    for step in count():
        batch = global_batch_indices(seed=seed, step=step, dataset_size=len(lengths), global_batch_size=size)
        yield int(lengths[batch].sum())


@cache
def _lengths(tokenizer: Path, reference: str, limits: Limits) -> np.ndarray:
    """Return the number of tokens of each example of a training set, (examples,)."""
    data = encode(read_examples(locate(reference)), load_tokenizer(tokenizer), limits)
    return np.array([len(item) for item in data.items])
