"""The teacher one micro batch ahead of the student, on a CUDA stream of its own, where that pays.

While the student's backward pass of micro batch i runs, the teacher's forward pass of micro batch i+1 fills what the
student leaves idle. It costs the memory of the teacher's outputs and activations beside the student's. Whether both
fit, and whether the steps become faster, is measured in the first steps of a run.

Not yet run on a GPU: the deciding logic and the order of the calls are tested, the gain is not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from llmdistill.batch import Batch, Outputs

_WARM_UP = 3
"""Steps that are not timed: the allocator and the libraries are still settling."""

_TRIALS = 5
"""Steps with the teacher ahead, and as many without."""

_LEAST_GAIN = 0.02
"""What a step must win, as a share of its time; less is noise."""

_SPARE = 0.05
"""Share of the device's memory that stays free: for fragments, and for batches longer than those of the trial."""


class Teacher(Protocol):
    """The model that is learnt from."""

    def teach(self, batch: Batch, *, lm_head: bool) -> Outputs:
        """Run it on a batch; `lm_head` asks for its output at the labels."""
        ...


@dataclass
class AheadTrial:
    """Decides from the first steps whether the teacher runs ahead. Pure: it is told what was measured.

    Steps without come first, and tell how much memory a step and the teacher alone take; those with follow only if
    both together fit.
    """

    total_bytes: int
    """Of the device, for this process."""
    agree: Callable[[bool], bool] = lambda wanted: wanted
    """Whether all ranks want it; every rank calls it after the same steps."""
    warm_up: int = _WARM_UP
    trials: int = _TRIALS
    ahead: bool = False
    """Whether the next step runs with the teacher ahead."""
    report: str | None = None
    """What was decided and why, in one line; None until then."""
    _seconds: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    _peak: int = 0
    _steps: int = 0

    @property
    def is_decided(self) -> bool:
        """Whether nothing needs to be measured any more."""
        return self.report is not None

    def step_done(self, seconds: float, peak_bytes: int, teacher_bytes: int) -> None:
        """One more step.

        Args:
            seconds: it took, with the device at rest before and after.
            peak_bytes: most that was allocated in it.
            teacher_bytes: most that one forward pass of the teacher allocated above what was there before it.
        """
        if self.is_decided:
            return
        self._steps += 1
        if self._steps <= self.warm_up:
            return
        self._seconds[self.ahead].append(seconds)
        self._peak = max(self._peak, peak_bytes)
        if len(self._seconds[self.ahead]) < self.trials:
            return
        if self.ahead:
            self._decide()
        else:
            need, room = self._peak + teacher_bytes, int(self.total_bytes * (1 - _SPARE))
            self.ahead = self.agree(need <= room)
            self._steps = self.warm_up - 1  # the first step with another order of allocations is not timed either
            if not self.ahead:
                self.report = (
                    f"the teacher runs on the student's stream: ahead it would need up to {_gib(need)} of the "
                    f"{_gib(room)} that may be used on each GPU"
                )

    def _decide(self) -> None:
        without, beside = median(self._seconds[False]), median(self._seconds[True])
        pays = beside <= (1 - _LEAST_GAIN) * without and self._peak <= self.total_bytes * (1 - _SPARE)
        self.ahead = self.agree(pays)
        where = "ahead on a stream of its own" if self.ahead else "on the student's stream"
        self.report = (
            f"the teacher runs {where}: steps of {1000 * beside:.0f} ms with it ahead, {1000 * without:.0f} ms without"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


@dataclass
class _Started:
    """A forward pass under way."""

    batch: Batch
    outputs: Outputs
    done: torch.cuda.Event


class StreamedTeacher:
    """A teacher whose next forward pass can be started on a stream of its own; of use where there is a next one, that
    is with several micro batches a step.

    `teach` gives what was started for the same batch, and waits for it on the device, not on the host; without that it
    runs the teacher where it is. Not for a sharded teacher: its collectives would run on two streams at once, in an
    order that ranks need not share.
    """

    def __init__(self, teacher: Teacher, device: torch.device, trial: AheadTrial) -> None:
        """Wrap a teacher that lives, whole, on a CUDA device."""
        self._teacher = teacher
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._trial = trial
        self._started: _Started | None = None
        self._teacher_bytes = 0
        self._step_begins = False

    def teach(self, batch: Batch, *, lm_head: bool) -> Outputs:
        """The teacher's outputs for a batch, ready for the current stream."""
        started, self._started = self._started, None
        if started is None or started.batch is not batch:
            return self._measured(batch, lm_head)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(started.done)
        for tensor in tensors_of(started.outputs):
            # Their memory belongs to the other stream, which must not take it back before this one has read it.
            tensor.record_stream(current)
        return started.outputs

    def start(self, batch: Batch | None, *, lm_head: bool) -> None:
        """Begin with the next batch, if there is one and the teacher is to run ahead.

        Call it between the student's forward and backward pass: it starts when the device has come so far.
        """
        if batch is None or not self._trial.ahead:
            return
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), torch.no_grad():
            outputs = self._teacher.teach(batch, lm_head=lm_head)
            done = torch.cuda.Event()
            done.record(self._stream)
        for tensor in tensors_of(batch):
            tensor.record_stream(self._stream)
        self._started = _Started(batch, outputs, done)

    def step(self, run: Callable[[], Any]) -> tuple[Any, str | None]:
        """One optimizer step, measured as long as nothing is decided.

        Returns its result, and the decision after the step that brought it.
        """
        if self._trial.is_decided:
            return run(), None
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._step_begins = True
        began = time.perf_counter()
        result = run()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        self._trial.step_done(time.perf_counter() - began, peak, self._teacher_bytes)
        return result, self._trial.report

    def _measured(self, batch: Batch, lm_head: bool) -> Outputs:
        """A forward pass on the current stream; while the trial goes on, what it allocates is noted.

        Only the first of a step, before which the peak was set back: afterwards the peak is the student's. Allocations
        are counted on the host, so nothing waits.
        """
        measures, self._step_begins = self._step_begins, False
        before = torch.cuda.memory_allocated(self._device)
        outputs = self._teacher.teach(batch, lm_head=lm_head)
        if measures:
            self._teacher_bytes = max(self._teacher_bytes, torch.cuda.max_memory_allocated(self._device) - before)
        return outputs


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in an object of dataclasses, mappings and tuples."""
    if torch.is_tensor(value):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from tensors_of(getattr(value, each.name))
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_of(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_of(each)
