"""What a cache keeps of the teacher's outputs, and a step that reads it: on the meta device, without weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from llmdistill.batch import POSITIONS, Batch, HeadInputs, Outputs, Positions
from llmdistill.config.cache import CacheConfig
from llmdistill.methods import Method
from llmdistill.run.wiring import request_of, tapped
from llmdistill.runtime.tracing import Tracer, Work, on_gpu
from llmdistill.teacher.rows import Request, place_of, to_outputs, to_rows

_INDEX = 8 * (1 + len(POSITIONS))
"""Bytes of an example's entries in a shard: its id, and where its rows of each kind begin."""


@dataclass(frozen=True, kw_only=True)
class PositionCounts:
    """The number of positions of each kind in a training set, each example once."""

    sequences: int
    """Examples."""
    tokens: int
    labels: int

    def at(self, positions: Positions) -> int:
        """Return the number of one kind."""
        return int(getattr(self, positions))

    def times(self, number: int) -> PositionCounts:
        """Return the counts of so many equal sets."""
        return PositionCounts(
            sequences=number * self.sequences, tokens=number * self.tokens, labels=number * self.labels
        )

    @classmethod
    def of(cls, batch: Batch) -> PositionCounts:
        """Count a batch with `label_rows`, on any device."""
        tokens, labels = (len(batch.rows_at(place)) for place in ("tokens", "labels"))
        return cls(sequences=len(batch.input_ids), tokens=tokens, labels=labels)


@dataclass(frozen=True, kw_only=True)
class CacheTrace:
    """What `llmdistill cache` keeps of a micro batch; in a step it is the teacher that reads the cache."""

    settings: CacheConfig
    request: Request
    rows: Mapping[str, Tensor]
    """The kept tensors of one micro batch, on the meta device, by the names of `teacher.rows`."""
    head: HeadInputs | None
    """The LM head that a training from the cache loads; None if the cache needs none."""
    scaling: Mapping[int, float]
    micro_batch: PositionCounts
    """The micro batch that was traced."""
    work: Work
    """The teacher's pass over it."""
    peak: float
    """The bytes of this pass above the teacher's weights."""

    @property
    def head_bytes(self) -> int:
        """The bytes of the LM head that a training from the cache loads."""
        tensors = () if self.head is None else (self.head.weight, self.head.bias)
        return sum(each.numel() * each.element_size() for each in tensors if each is not None)

    def row_bytes(self, counts: PositionCounts) -> int:
        """Return the bytes of the rows of so many positions, which a training reads once an epoch."""
        return sum(
            counts.at(place_of(name)) * each[:1].numel() * each.element_size() for name, each in self.rows.items()
        )

    def shard_bytes(self, counts: PositionCounts) -> int:
        """Return the bytes of the shards of so many positions, without their headers of some hundred bytes each."""
        return self.row_bytes(counts) + _INDEX * counts.sequences

    def teach(self, batch: Batch, *, lm_head: Sequence[Positions]) -> Outputs:
        """Return the outputs for a batch on the meta device, made as `CachedTeacher` makes them."""
        counts = PositionCounts.of(batch)

        def read(name: str) -> Tensor:
            rows = self.rows[name]
            return rows.new_empty(counts.at(place_of(name)), *rows.shape[1:])

        return to_outputs(
            read, batch, self.request, top_k=self.settings.kept_top_k, head=self.head, scaling=self.scaling
        )


def trace_cache(
    teacher: PreTrainedModel, method: Method, batch: Batch, settings: CacheConfig, vocabulary: int | None = None
) -> CacheTrace:
    """Trace the teacher's pass over a micro batch of `llmdistill cache`, both on the meta device.

    `vocabulary` is the number of logits that both models share; None if their vocabularies are the same.
    """
    tracer, request = Tracer(), request_of(method)
    tracer.ignore([*teacher.parameters(), *teacher.buffers()])
    teacher.eval().requires_grad_(False)
    wired = tapped(method, "teacher", teacher, vocabulary=vocabulary)
    with on_gpu(), tracer, torch.no_grad():
        outputs = wired.teach(batch, lm_head=method.teacher_positions)
        rows = to_rows(outputs, batch, request, top_k=settings.kept_top_k, vocabulary=vocabulary)
    wired.remove()
    head = next((each for each in outputs.lm_head.values() if isinstance(each, HeadInputs)), None)
    return CacheTrace(
        settings=settings,
        request=request,
        rows=rows,
        head=None if settings.kept_top_k is not None else head,
        scaling=outputs.taps.scaling,
        micro_batch=PositionCounts.of(batch),
        work=tracer.work,
        peak=sum(tracer.take_peak().values()),
    )
