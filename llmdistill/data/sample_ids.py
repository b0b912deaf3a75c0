"""Identifiers of samples: the same tokens have the same id in every run, whatever their order, batch or rank is."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np


def sample_id(*parts: Sequence[int] | np.ndarray) -> int:
    """The id of a sample: a hash of its tokens, from 0 to 2^63 - 1.

    Args:
        parts: token ids in order, such as those of the prompt and those of the response; the hash also depends on where
            one part ends and the next begins.
    """
    digest = blake2b(digest_size=8)
    for part in parts:
        tokens = np.asarray(part, dtype=np.int64)
        digest.update(len(tokens).to_bytes(8, "little"))
        digest.update(tokens.tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1
