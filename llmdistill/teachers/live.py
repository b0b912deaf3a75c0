"""A teacher that runs during training: in evaluation mode, in its own dtype, replicated on every rank or sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from llmdistill.models.heads import HeadName
from llmdistill.models.load import load_model
from llmdistill.models.sharded import keep_gathered
from llmdistill.models.sharded_load import Sharding, load_sharded
from llmdistill.runtime.distributed import World, node_group, node_ranks
from llmdistill.runtime.ds_config import NO_TIMERS
from llmdistill.step.lm_head import lm_head_parameters


@dataclass(frozen=True)
class LiveTeacher:
    """A loaded teacher."""

    model: PreTrainedModel
    forward: Callable[..., Any]
    """The forward pass to call: the model itself, or the DeepSpeed engine that gathers the model's shards."""

    @property
    def sharded(self) -> bool:
        """Whether a forward pass needs every rank."""
        return self.forward is not self.model


def load_teacher(
    path: str,
    *,
    dtype: torch.dtype,
    sharding: Literal["replicated", "node", "zero3"],
    zero: Mapping[str, Any] | None = None,
    head: HeadName = "lm_head",
) -> LiveTeacher:
    """Load a teacher with a head; every rank must call this function.

    With sharding zero3 no rank ever holds the whole teacher, independent of the student's ZeRO stage. With node this is
    so if a node has several ranks, and each node has a whole one in shards. The LM head stays gathered: the losses need
    it whole after each forward pass. `zero` has more settings of DeepSpeed's zero_optimization.
    """
    world = World.current()
    ranks = node_ranks() if sharding == "node" else range(world.size)
    if sharding == "replicated" or (sharding == "node" and len(ranks) == 1):
        model = load_model(path, dtype=dtype, device=world.device, head=head)
        model.eval().requires_grad_(False)
        return LiveTeacher(model, model)
    import deepspeed

    ds_config = {
        "train_batch_size": world.size,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {**(zero or {}), "stage": 3},
        **NO_TIMERS,
    }
    group = node_group() if len(ranks) < world.size else None
    model = load_sharded(path, sharding=Sharding(ds_config, group), dtype=dtype, head=head)
    model.eval().requires_grad_(False)
    engine, *_ = deepspeed.initialize(model=model, config=ds_config)
    engine.eval()
    keep_gathered(lm_head_parameters(engine.module))
    return LiveTeacher(engine.module, engine)
