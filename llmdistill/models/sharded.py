"""Parameters that ZeRO-3 shards over the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from torch import Tensor


def gathered(*parameters: Tensor | None, write: bool = False) -> AbstractContextManager[Any]:
    """Context in which parameters are complete; if ZeRO-3 shards one of them, every rank must enter it.

    With `write`, what the block writes into them is kept; all ranks must write the same.
    """
    sharded: list[Any] = [each for each in parameters if each is not None and hasattr(each, "ds_id")]
    stay_gathered = all(
        each.ds_persist and each.ds_status.name == "AVAILABLE" and not each.requires_grad for each in sharded
    )
    if stay_gathered and not (write and sharded):
        return nullcontext()
    import deepspeed

    whole = deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if write else None)
    return cast("AbstractContextManager[Any]", whole)


def keep_gathered(parameters: Iterable[Tensor]) -> None:
    """Let DeepSpeed keep parameters that ZeRO-3 shards complete from the next forward pass on; they must not change."""
    for each in parameters:
        assert not each.requires_grad, "a parameter that is trained changes in its shards"
        each.ds_persist = True  # type: ignore[attr-defined]
