"""What a training costs: tokens, operations, time and memory, estimated before it begins."""

from __future__ import annotations

import torch

from llmdistill.config import RunConfig
from llmdistill.config.machine import MachineConfig, find_gpu
from llmdistill.files import byte_size
from llmdistill.messages import say
from llmdistill.progress import duration
from llmdistill.runtime.distributed import World
from llmdistill.training.disk import STATE_BYTES
from llmdistill.training.plan import Plan
from llmdistill.training.written_data import describe_writing, written_data_exist

_LITTLE = 1e13
"""Operations below which a run does not say what it will take, a minute or two of two cores."""
_SOON = 120
"""Nor does one of fewer seconds: it is done before anybody would ask."""


def estimate_cost(plan: Plan) -> dict[str, float] | None:
    """Estimate the cost of the training for sequences of full length; None if train.epochs leaves the steps open.

    The student's forward and backward pass cost three forward passes, the teacher's forward pass 2 FLOP per parameter
    and token, at 30 % of the 312 TFLOP/s of an A100 in bf16.
    """
    train = plan.config.train
    if train.epochs is not None:
        return None
    tokens = train.steps * train.global_batch_size * plan.config.data.max_length
    teacher_flops = 2 * plan.models.sizes["teacher_params"] if plan.runs_teacher else 0
    # The backward pass costs two forward passes: one product for the inputs, one for the weights.
    flops = tokens * (3 * plan.models.sizes["forward_flops"] + teacher_flops)
    return {"tokens": tokens, "flops": flops, "a100_hours": flops / (0.3 * 312e12) / 3600}


def forecast(plan: Plan, device: torch.device) -> str | None:
    """Say what the training will take on this machine; None if that is little, or if nothing is to be trained.

    The time is that of the products of matrices of sequences of full length, so it is an upper bound of these. The
    memory leaves out activations, which `llmdistill plan` counts.
    """
    estimated = estimate_cost(plan) if plan.trains else None
    if estimated is None or estimated["flops"] < _LITTLE:
        return None
    seconds = time_here(plan, estimated["flops"], device)
    if seconds is not None and seconds < _SOON:
        return None
    sizes, item = plan.models.sizes, plan.models.dtype.itemsize
    held = sizes["student_params"] * (2 * item + STATE_BYTES) + plan.runs_teacher * sizes["teacher_params"] * item
    text = f"{estimated['tokens']:,} tokens of training at most"
    if seconds is not None:
        text += f", some {duration(seconds)} on this machine"
    return f"{text}; up to {byte_size(held)} for weights, gradients and optimizer. The start and the scores come on top"


def tell_before_writing(config: RunConfig, plan: Plan) -> None:
    """Say on this rank what a run will take if its teacher first writes the data, which takes long too.

    Any other run says so when it begins.
    """
    if not written_data_exist(config):
        cost = forecast(plan, World.current().device)
        if cost is not None:
            say(f"Cost        {cost}")
        say(f"Before      {describe_writing(config)}")


def time_here(plan: Plan, flops: float, device: torch.device) -> float | None:
    """Return the seconds that so many operations take on the ranks of a plan, each a device such as this one.

    None for a GPU that is not known.
    """
    from llmdistill.runtime.speed import measure_cpu

    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):  # the run's own random numbers stay as they are
            tflops = float(measure_cpu()["tflops"])
    else:
        properties = torch.cuda.get_device_properties(device)
        kind = find_gpu(properties.name, properties.total_memory)
        if kind is None:
            return None
        tflops = MachineConfig().of_kind(kind, set()).tflops
    return flops / (1e12 * tflops * MachineConfig().product_share * plan.world_size)
