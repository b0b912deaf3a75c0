"""Parameters that ZeRO-3 shards over the ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from torch import Tensor


def gathered(*parameters: Tensor | None, write: bool = False) -> AbstractContextManager[Any]:
    """Context in which parameters are complete; if ZeRO-3 shards one of them, every rank must enter it.

    With `write`, what the block writes into them is kept; all ranks must write the same.
    """
    sharded = [each for each in parameters if each is not None and hasattr(each, "ds_id")]
    if not sharded:
        return nullcontext()
    import deepspeed

    whole = deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if write else None)
    return cast("AbstractContextManager[Any]", whole)
