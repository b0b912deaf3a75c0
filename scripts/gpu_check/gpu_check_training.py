"""What gpu_check asks of training under DeepSpeed: ZeRO against plain fp32, waits of the host, memory.

All ranks do the same, on the same batch, so that the losses do not depend on their number.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from benching import Line
from small_training import Setting, batch_of, forecast, llama, make_trainer, measure
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from llmdistill.batch import IGNORE_INDEX, Batch
from llmdistill.runtime.devices import free_memory
from llmdistill.runtime.distributed import World

STAGES = (1, 2, 3)
AGREES = {"fp32": 1e-4, "bf16": 3e-2}
"""How far the losses of ZeRO may be from those of fp32 without DeepSpeed, as a share of these."""
FORECAST = 0.15
"""How far the forecast of the peak may be from what is measured."""

HEADS_OF_64 = llama(vocabulary=8192, width=512, heads=8, weight_std=0.06)
FULL = Setting(config=HEADS_OF_64, micro_batch_size=4, length=256, bucket=5_000_000)
SMALL = Setting(config=llama(depth=2, weight_std=0.1), micro_batch_size=2, length=32)
WIDE = llama(vocabulary=32_000, width=1024, heads=16, depth=8, weight_std=0.06)
LARGE = replace(FULL, config=WIDE, micro_batch_size=8, length=512, dtype="bf16")

Stack = tuple[str, ...]
"""module:function of each frame, the innermost last."""
ASKS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
ORIGINS = ("llmdistill.losses", "llmdistill", "transformers", "deepspeed")
"""The packages whose waits are told apart, inner packages first."""


def zero(world: World) -> Iterator[Line]:
    """The losses of ZeRO 1 to 3, in fp32 and in bf16, beside those of torch's AdamW in fp32 without DeepSpeed."""
    small = world.device.type == "cpu"
    setting, steps = replace(SMALL if small else FULL, factorized=False), 4 if small else 12
    exact = losses_of(replace(setting, stage=None), world, steps)
    fall = float(exact[-1] / exact[0])
    yield Line("loss without DeepSpeed, last step / first", fall, 0.95, f"{exact[0]:.4f} → {exact[-1]:.4f}")
    for dtype, limit in AGREES.items():
        for stage in STAGES:
            losses = losses_of(replace(setting, stage=stage, dtype=dtype), world, steps)
            worst = float(((losses - exact) / exact).abs().max())
            detail = f"{losses[0]:.4f} → {losses[-1]:.4f}; ranks: {world.size}"
            yield Line(f"ZeRO {stage} in {dtype}: loss of {steps} steps against fp32", worst, limit, detail)


def losses_of(setting: Setting, world: World, steps: int) -> Tensor:
    """The weighted loss of each step, (steps,), on the CPU."""
    trainer, batch = make_trainer(setting), batch_of(setting)
    weights = torch.tensor(list(trainer.method.weights.values()))
    rows = [trainer.train_step([batch])[0].sum(0) for _ in range(steps)]
    # A step gives this rank's share; all shares are alike.
    found: Tensor = torch.stack(rows).float().cpu() @ weights * world.size
    del trainer
    free_memory(world.device)
    return found


# Where the host waits for the device: on CUDA torch says so, on a CPU it is where a tensor's value is asked for


def waits(world: World) -> Iterator[Line]:
    """Places in a step at which the host waits for the device."""
    with watch(world.device) as places:
        torch.ones(1, device=world.device).item()
    assert places, "the watch sees no wait at all"
    for stage in STAGES:
        setting = replace(SMALL if world.device.type == "cpu" else FULL, stage=stage, dtype="bf16")
        trainer = make_trainer(setting)
        # As the thread prepares them that reads ahead; batches are on the CPU until the step moves them.
        batch, shorter = (
            each.with_positions(shift=trainer.method.shift) for each in (batch_of(setting), padded(batch_of(setting)))
        )
        for _ in range(2):  # ZeRO-3 compares the ranks' order of layers in the first steps
            trainer.train_step([batch])
        with watch(world.device) as places:
            for each in (batch, shorter):
                trainer.train_step([each])
        del trainer
        free_memory(world.device)
        theirs = {place for place in places if origin(place)[0] == "deepspeed"}
        norm = {place for place in theirs if is_norm(place)}
        # On a CPU a loss scales matrices by numbers, where a GPU has kernels that read them there, and a mask looks for
        # padding, as it does on no GPU.
        harmless = (
            {"llmdistill.losses", "llmdistill.attention_mask:is_one_segment"} if world.device.type == "cpu" else set()
        )
        ours = {place for place in places - theirs if harmless.isdisjoint(origin(place))}
        detail = f"DeepSpeed's look at the norm {len(norm)}, elsewhere in DeepSpeed {len(theirs - norm)}"
        for place in sorted({origin(each)[1] for each in ours | theirs - norm}):
            detail += f", {place}"
        yield Line(f"ZeRO {stage}: waits begun outside DeepSpeed", len(ours), 0, detail)


def padded(batch: Batch) -> Batch:
    """The same batch, with padding at the end of its first row."""
    mask, labels = batch.attention_mask.clone(), batch.labels.clone()
    first = 3 * mask.shape[1] // 4
    mask[0, first:] = 0
    labels[0, first:] = IGNORE_INDEX
    return replace(batch, attention_mask=mask, labels=labels)


@contextmanager
def watch(device: torch.device) -> Iterator[set[Stack]]:
    """Collects, within its block, where the host waits for a device.

    On CUDA by torch's own warnings; what NCCL and events wait for is not among them.
    """
    if device.type != "cuda":
        with AskedValues() as asked:
            yield asked.places
        return
    places: set[Stack] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if "called a synchronizing" in str(message):
            places.add(_stack())

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show  # is called where the warning arises
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)


class AskedValues(TorchDispatchMode):
    """Collects where the value of a tensor is asked for, on any device: a GPU would be waited for there."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[Stack] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ASKS:
            self.places.add(_stack())
        return func(*args, **(kwargs or {}))


def _stack() -> Stack:
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe())]
    return tuple(f"{frame.f_globals.get('__name__')}:{frame.f_code.co_name}" for frame in reversed(frames))


def origin(place: Stack) -> tuple[str | None, str]:
    """Which of ORIGINS the wait began in, by its innermost frame there, and this frame; None for none of them."""
    for frame in reversed(place):
        for name in ORIGINS:
            if frame.startswith((f"{name}.", f"{name}:")):
                return name, frame
    return None, place[0]


def is_norm(place: Stack) -> bool:
    """Whether DeepSpeed's engine looks at the norm of the gradients there, before it updates the weights."""
    return origin(place)[0] == "deepspeed" and any(frame.endswith(":_take_model_step") for frame in place)


# Memory


def memory(world: World) -> Iterator[Line]:
    """The peak of a step beside what `llmdistill plan` forecasts."""
    small = world.device.type == "cpu"
    base, stages = (Setting(), STAGES[:1]) if small else (LARGE, STAGES)
    for setting in [replace(base, checkpointing=True), *(replace(base, stage=stage) for stage in stages)]:
        measured = measure(setting)
        free_memory(world.device)
        peak, expected = sum(measured.values()), sum(forecast(setting, world.size).values())
        name = f"ZeRO {setting.stage}, MaKD {setting.micro_batch_size}×{setting.length}"
        name += ", activation checkpointing" if setting.checkpointing else ""
        detail = f"forecast {expected / 1e6:,.0f} MB, measured {peak / 1e6:,.0f} MB; ranks: {world.size}"
        yield Line(f"{name}: error of the forecast of the peak", abs(expected / peak - 1), FORECAST, detail)
