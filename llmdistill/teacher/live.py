"""A teacher that runs beside the student: in evaluation mode, its own dtype, whole on every rank or sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from llmdistill.models.load import Head, load_model
from llmdistill.runtime.distributed import World


@dataclass(frozen=True)
class LiveTeacher:
    """A loaded teacher."""

    model: PreTrainedModel
    forward: Callable[..., Any]
    """The forward pass to call: the model itself, or the engine that gathers its shards."""


def load_teacher(
    path: str,
    *,
    dtype: torch.dtype,
    sharding: Literal["replicated", "zero3"],
    world: World,
    head: Head = "lm_head",
) -> LiveTeacher:
    """Load a teacher with a head; every rank must call it.

    With zero3 no rank ever holds the whole of it, whatever the student's ZeRO stage is.
    """
    if sharding == "replicated":
        model = load_model(path, dtype=dtype, device=world.device, head=head)
        model.eval().requires_grad_(False)
        return LiveTeacher(model, model)
    return _load_sharded(path, dtype, world, head)


def _load_sharded(path: str, dtype: torch.dtype, world: World, head: Head) -> LiveTeacher:
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    ds_config = {
        "train_batch_size": world.size,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": 3},
    }
    # While this object lives, from_pretrained shards what it loads. It must be gone before the student is built:
    # the student's ZeRO stage is its own.
    alive = HfDeepSpeedConfig(ds_config)
    try:
        model = load_model(path, dtype=dtype, head=head)
    finally:
        del alive
        _forget_hf_config()
    model.eval().requires_grad_(False)
    engine, *_ = deepspeed.initialize(model=model, config=ds_config)
    engine.eval()
    return LiveTeacher(engine.module, engine)


def _forget_hf_config() -> None:
    """The reference that transformers keeps is weak; make sure that it is dead."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    assert not is_deepspeed_zero3_enabled(), "the teacher's ZeRO-3 configuration outlived its loading"
