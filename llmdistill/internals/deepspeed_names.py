"""What a run needs of DeepSpeed that is not public: mostly the training state, of the engine.

DeepSpeed's universal checkpoint reads and writes folders of its own format, of pickles, so it is no way to the tensors.
Its `safe_get_local_*` functions are used where they reach: at ZeRO-3, once the optimizer has its state. Tried with
DeepSpeed 0.19.8; `tests/unit/test_internals.py` says which name is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor


class Partition(NamedTuple):
    """Where a part of a parameter lies in the flat tensor of a rank, at ZeRO-1 and 2."""

    group: int
    """Number of the parameter group."""
    start: int
    """Index of its first element in the flattened parameter."""
    place: int
    """Index of its first element in the flat tensor."""
    numel: int


class Shard(NamedTuple):
    """The part of a parameter that this rank has at ZeRO-3, without the padding."""

    start: int
    numel: int


def leave_out_shared_memory() -> None:
    """Keep DeepSpeed from compiling its sum over shared memory, for over a minute, when ranks on a CPU join.

    Only its layers for tensor parallelism call it, never a training step, and gloo replaces it there. Without it a
    run on CPUs needs no compiler, and no rank has 66 MB of shared memory that DeepSpeed never frees.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def judge_by_norm(engine: Any, *, in_fp32: bool) -> None:
    """Let ZeRO-1 and 2 tell by the norm of a gradient alone whether it is finite; they compute the norm anyway.

    Left alone, they first search each tensor for its greatest and least value, which takes 14 operations a tensor, and
    then the host waits for the GPU. With `in_fp32` the norm is summed without the fp64 copy that DeepSpeed makes of the
    gradient, and 16 bytes a parameter are not moved. `scripts/bench/bench_zero.py` counts both.
    """
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() not in (1, 2) or optimizer.cpu_offload or not optimizer.compute_grad_norm:
        return
    optimizer.check_overflow = lambda *_, **__: None  # the step takes the norm next, and skips if it is not finite

    def norm(gradients: Iterable[Tensor], parameters: object, norm_type: float = 2) -> Tensor:
        # Squares that overflow fp32 make it inf, as they do where DeepSpeed combines the norms of its groups.
        own = [gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False)]
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in own]
        squares = torch.stack(norms).square().sum() if norms else torch.zeros((), device=optimizer.device)
        dist.all_reduce(squares, group=optimizer.dp_process_group)
        return squares.sqrt()

    if in_fp32:
        optimizer.get_grad_norm_direct = norm


def optimizer_of(engine: Any) -> torch.optim.Optimizer:
    """Return the optimizer that ZeRO wraps."""
    return cast(torch.optim.Optimizer, getattr(engine.optimizer, "optimizer", engine.optimizer))


def stepped_tensors(engine: Any) -> list[list[Tensor]]:
    """Return the tensors that the optimizer steps, for each of its parameter groups."""
    groups: list[list[Tensor]] = [list(group["params"]) for group in optimizer_of(engine).param_groups]
    if engine.zero_optimization_stage() == 3:  # a group has its tensors only during the step
        for number, flat in enumerate(engine.optimizer.fp32_partitioned_groups_flat):
            groups[engine.optimizer.sub_group_to_group_id[number]].append(flat)
    return groups


def master_weights(engine: Any) -> dict[Tensor, tuple[Tensor, int]]:
    """Return the tensor that the optimizer steps in place of each parameter, and where the parameter begins in it.

    Without ZeRO a model in bf16 has fp32 weights beside it: in a tensor for each parameter, or with a fused Adam laid
    end to end in one for each group. Empty if the optimizer steps the parameters themselves.
    """
    optimizer, places = engine.optimizer, dict[Tensor, tuple[Tensor, int]]()
    if engine.zero_optimization_stage() > 0 or not hasattr(optimizer, "fp16_groups"):
        return places
    if hasattr(optimizer, "fp32_groups_flat"):
        for parameters, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            ends = torch.tensor([0, *(parameter.numel() for parameter in parameters)]).cumsum(0).tolist()
            places |= {parameter: (flat, start) for parameter, start in zip(parameters, ends, strict=False)}
        return places
    for parameters, exact in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        places |= {parameter: (weight, 0) for parameter, weight in zip(parameters, exact, strict=True)}
    return places


def partition(parameter: Any) -> Partition | None:
    """Return this rank's part of a parameter at ZeRO-1 and 2; None if it lies with other ranks.

    DeepSpeed's own links to the optimizer's state are not used: it makes them after the step of the first group, when
    the other groups have no state yet.
    """
    part = parameter._hp_mapping
    if part is None:
        return None
    place = part.hp_fragment_address
    return Partition(part.param_group_index, part.lp_fragment_address.start, place.start, place.numel)


def shard(parameter: Any) -> Shard:
    """Return this rank's part of a parameter at ZeRO-3: it is split over all ranks, and padded to equal shards."""
    size = parameter.ds_tensor.numel()
    start = size * dist.get_rank(parameter.ds_process_group)
    # The number is 0 or less on a rank whose share is padding alone.
    return Shard(start, min(size, parameter.ds_numel - start))


def before_writing(engine: Any) -> None:
    """Prepare the optimizer for new weights."""
    if engine.zero_optimization_stage() == 3:
        # ZeRO-3 keeps small parameters whole on every rank: these copies go, and the epilogue gathers new ones.
        engine.optimizer.checkpoint_event_prologue()


def after_writing(engine: Any) -> None:
    """Let the model compute with the new weights of the optimizer."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        for model, exact in zip(
            optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True
        ):
            model.data.copy_(exact.data)
        optimizer.checkpoint_event_epilogue()
    elif stage > 0:
        optimizer.update_lp_params()
    for parameter, (exact, start) in master_weights(engine).items():
        parameter.data.copy_(exact.data.view(-1).narrow(0, start, parameter.numel()).view_as(parameter))
