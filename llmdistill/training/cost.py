"""What a training costs: tokens, operations, time and memory, estimated before it begins."""

from __future__ import annotations

import math

import torch

from llmdistill.config import RunConfig
from llmdistill.config.machine import MachineConfig, find_gpu
from llmdistill.files import byte_size
from llmdistill.messages import say
from llmdistill.progress import duration
from llmdistill.runtime.distributed import World
from llmdistill.students.counting import build_reference, layer_linears
from llmdistill.students.start.measure import GIB, LOSS_EXAMPLES, LOSS_SHARE, LOSS_TOKENS
from llmdistill.training.disk import STATE_BYTES
from llmdistill.training.plan import Plan
from llmdistill.training.written_data import describe_writing

_LITTLE = 1e13
"""Operations below which a run does not say what it will take, a minute or two of two cores."""
_SOON = 120
"""Nor does one of fewer seconds: it is done before anybody would ask."""
_DECOMPOSITION = 10
"""Operations of the decomposition of a moment of n × n, over n³."""


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


def start_flops(plan: Plan) -> float:
    """Estimate the operations of a start that data weight, for sequences of full length; 0 for any other student.

    The passes over the data compute each layer forward, once more, and backward without gradients of the weights.
    Moments are symmetric: half of their entries are computed, with two operations for each token.
    """
    student, settings = plan.config.student, plan.config.student.factorize
    if not (student.is_factorized and settings.is_weighted):
        return 0
    shapes, length = layer_linears(build_reference(plan.models.teacher)).values(), plan.config.data.max_length
    in_pass = 6 * plan.models.sizes["teacher_params"]
    entries = sum(n**2 + (m**2 if settings.weighting == "gradients" else 0) for m, n in shapes)
    passes = math.ceil(4 * entries / (settings.calibration.memory * GIB))
    flops = settings.calibration.count * length * (passes * in_pass + entries)
    flops += _DECOMPOSITION * sum(m**3 + n**3 for m, n in shapes)
    if settings.allocation == "loss":
        projections = sum(2 * min(m, n) * (m + n) for m, n in shapes)
        rows = max(LOSS_EXAMPLES, settings.calibration.count // LOSS_SHARE)
        flops += rows * min(length, LOSS_TOKENS) * (in_pass + projections)
    return flops


def forecast(plan: Plan, device: torch.device) -> str | None:
    """Say what start and training will take on this machine; None if that is little, or if nothing is to be trained.

    The time is that of the products of matrices of sequences of full length, so it is an upper bound of these. The
    memory leaves out activations, which `llmdistill plan` counts.
    """
    estimated = estimate_cost(plan) if plan.trains else None
    if estimated is None:
        return None
    start = start_flops(plan)
    if estimated["flops"] + start < _LITTLE:
        return None
    times = times_here(plan, estimated["flops"], start, device)
    if times is not None and sum(times) < _SOON:
        return None
    sizes, item = plan.models.sizes, plan.models.dtype.itemsize
    held = sizes["student_params"] * (2 * item + STATE_BYTES) + plan.runs_teacher * sizes["teacher_params"] * item
    text = f"{estimated['tokens']:,} tokens of training at most{describe_times(times)}"
    others = "The scores come" if times is not None and times[1] else "The start and the scores come"
    return f"{text}; up to {byte_size(held)} for weights, gradients and optimizer. {others} on top"


def describe_times(times: tuple[float, float] | None) -> str:
    """Put what `times_here` returns into words that go on after the tokens of the training."""
    if times is None:
        return ""
    start = f" after {duration(times[1])} for the start" if times[1] else ""
    return f", some {duration(times[0])} on this machine{start}"


def tell_before_writing(config: RunConfig, plan: Plan) -> None:
    """Say on this rank what a run will take if its teacher first writes the data; others say so as they begin."""
    cost = forecast(plan, World.current().device)
    if cost is not None:
        say(f"Cost        {cost}")
    say(f"Before      {describe_writing(config)}")


def times_here(plan: Plan, flops: float, start: float, device: torch.device) -> tuple[float, float] | None:
    """Return the seconds that the operations of training and start take on the ranks of a plan, each such a device.

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
    speed = 1e12 * tflops * MachineConfig().product_share * plan.world_size
    return flops / speed, start / speed
