"""The contents of a cache for a micro batch, from a pass of the teacher on the meta device: their bytes, and a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llmdistill.batch import POSITIONS, Batch, HeadInputs, Outputs, Positions
from llmdistill.config.teacher import CacheConfig
from llmdistill.runtime.tracing import Tracer, Work, on_gpu
from llmdistill.step.method import Method
from llmdistill.step.tap_models import tap_teacher
from llmdistill.step.teacher import Teacher
from llmdistill.teachers.output_rows import Request, row_positions, to_outputs, to_rows

Counts = Mapping[Positions, int]
"""The number of positions of each kind in a batch or a training set."""
_INDEX = 8 * (1 + len(POSITIONS))
"""Bytes of an example's entries in a shard: its id, and where its rows of each kind begin."""


@dataclass(frozen=True, kw_only=True)
class CacheTrace(Teacher):
    """The contents of a cache for a micro batch; in a traced step it is the teacher that reads the cache."""

    settings: CacheConfig
    request: Request
    rows: Mapping[str, Tensor]
    """The kept tensors of one micro batch, on the meta device, by the names of `teachers.output_rows`."""
    head: HeadInputs | None
    """The LM head that a training from the cache loads; None if the cache needs none."""
    scaling: Mapping[int, float]
    micro_batch: Counts
    """The micro batch that was traced."""
    work: Work
    """The teacher's pass over it."""
    peak: float
    """The bytes of this pass above the teacher's weights."""

    @property
    def head_bytes(self) -> int:
        """The bytes of the LM head that a training from the cache loads."""
        tensors = () if self.head is None else (self.head.weight, self.head.bias)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    def row_bytes(self, counts: Counts) -> int:
        """Return the bytes of the rows of so many positions, which a training reads once an epoch."""
        return sum(
            counts[row_positions(name)] * rows[:1].numel() * rows.element_size() for name, rows in self.rows.items()
        )

    def shard_bytes(self, counts: Counts) -> int:
        """Return the bytes of the shards of so many positions, without their headers of some hundred bytes each."""
        return self.row_bytes(counts) + _INDEX * counts["sequences"]

    def compute_targets(self, batch: Batch, *, lm_head: Sequence[Positions]) -> Outputs:
        """Return the outputs for a batch on the meta device, made as `CachedTeacher` makes them."""
        counts = count_positions(batch)

        def read(name: str) -> Tensor:
            rows = self.rows[name]
            return rows.new_empty(counts[row_positions(name)], *rows.shape[1:])

        return to_outputs(
            read, batch, self.request, top_k=self.settings.stored_top_k, head=self.head, scaling=self.scaling
        )


def count_positions(batch: Batch, times: int = 1) -> Counts:
    """Count the positions in so many batches like one with `label_positions`, on any device."""
    tokens, labels = (times * len(batch.flat_positions(place)) for place in ("tokens", "labels"))
    return {"sequences": times * len(batch.input_ids), "tokens": tokens, "labels": labels}


def trace_cache(
    teacher: PreTrainedModel, method: Method, batch: Batch, settings: CacheConfig, vocabulary: int | None = None
) -> CacheTrace:
    """Trace the teacher's pass over a micro batch of `llmdistill cache`, both on the meta device."""
    tracer, request = Tracer(), Request.of(method)
    tracer.ignore([*teacher.parameters(), *teacher.buffers()])
    teacher.eval().requires_grad_(False)
    tapped_teacher = tap_teacher(method, teacher, vocabulary=vocabulary)
    with on_gpu(), tracer, torch.no_grad():
        outputs = tapped_teacher.compute_targets(batch, lm_head=method.teacher_positions)
        top_k, in_8_bits = settings.stored_top_k, settings.dtype == "int8"
        rows = to_rows(outputs, batch, request, top_k=top_k, vocabulary=vocabulary, in_8_bits=in_8_bits)
    tapped_teacher.remove()
    head = next((inputs for inputs in outputs.lm_head.values() if isinstance(inputs, HeadInputs)), None)
    return CacheTrace(
        settings=settings,
        request=request,
        rows=rows,
        head=None if settings.stored_top_k is not None else head,
        scaling=outputs.taps.scaling,
        micro_batch=count_positions(batch),
        work=tracer.work,
        peak=sum(tracer.take_peak().values()),
    )
