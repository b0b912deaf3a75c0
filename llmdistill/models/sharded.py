"""Parameters that ZeRO-3 shards over the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from torch import Tensor


def gathered(*parameters: Tensor | None, write: bool = False) -> AbstractContextManager[Any]:
    """Return a context in which parameters are complete; if ZeRO-3 shards one of them, every rank must enter it.

    With `write`, the values that the block writes into them stay; all ranks must write the same.
    """
    sharded: list[Any] = [
        parameter for parameter in parameters if parameter is not None and hasattr(parameter, "ds_id")
    ]
    # Frozen parameters that DeepSpeed keeps on every rank need no gathering, which would cost a collective each time.
    stay_gathered = all(
        parameter.ds_persist and parameter.ds_status.name == "AVAILABLE" and not parameter.requires_grad
        for parameter in sharded
    )
    if stay_gathered and not (write and sharded):
        return nullcontext()
    import deepspeed

    # DeepSpeed sends rank 0's values to all ranks before it shards them again; None drops what the block wrote.
    context = deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if write else None)
    return cast("AbstractContextManager[Any]", context)


def keep_gathered(parameters: Iterable[Tensor]) -> None:
    """Let DeepSpeed keep sharded parameters complete from the next forward pass on; they must not change."""
    for parameter in parameters:
        assert not parameter.requires_grad, "a parameter that is trained changes in its shards"
        parameter.ds_persist = True  # type: ignore[attr-defined]
