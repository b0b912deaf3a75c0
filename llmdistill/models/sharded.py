"""Parameters that ZeRO-3 shards over the ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from torch import Tensor


def gathered(*parameters: Tensor | None) -> AbstractContextManager[Any]:
    """Context in which parameters are complete; if ZeRO-3 shards one of them, every rank must enter it."""
    sharded = [each for each in parameters if each is not None and hasattr(each, "ds_id")]
    if not sharded:
        return nullcontext()
    import deepspeed

    return cast("AbstractContextManager[Any]", deepspeed.zero.GatheredParameters(sharded))
