"""A teacher that is a file: its outputs are read from a cache by the ids of a batch's examples; no body is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llmdistill.batch import Batch, Outputs, Positions
from llmdistill.config.teacher import TeacherConfig
from llmdistill.errors import UserError
from llmdistill.runtime.devices import to_device_later
from llmdistill.runtime.distributed import World
from llmdistill.step.teacher import Teacher
from llmdistill.teachers.cache.folder import CacheFolder
from llmdistill.teachers.output_rows import Request, row_positions, to_outputs
from llmdistill.teachers.source import ModelSource, TeacherContext


class CachedTeacher(Teacher):
    """Gives the outputs that the live teacher would give: equal up to rounding for hidden states.

    The live teacher rounds differently in batches of other shapes; so do both of them, the one that wrote the cache
    and the one that it replaces.
    """

    def __init__(self, folder: CacheFolder, request: Request, *, shift: bool, device: torch.device) -> None:
        """Read the head, if the cache has hidden states, and the index.

        Args:
            folder: a cache that holds all that the request needs.
            request: the outputs that are needed.
            shift: whether the label of a position is that of the next token (decoders).
            device: the device of the outputs.
        """
        self._folder = folder
        self._request = request
        self._shift = shift
        self._device = device
        self._top_k: int | None = folder.record["held"]["top_k"]
        self._head = folder.head(device)

    def compute_targets(self, batch: Batch, *, lm_head: Sequence[Positions]) -> Outputs:
        """Return the outputs for the examples of a batch, which must be in the cache.

        Raises:
            UserError: the cache has no example with an id of the batch, or other rows for it.
        """
        batch = batch.with_positions(shift=self._shift)
        assert set(lm_head) <= set(self._request.positions), f"{lm_head} was not asked for"
        assert batch.sample_ids, "the student wrote the text, so nothing about it is in a cache"
        places = self._folder.find([sample_id for row in batch.sample_ids for sample_id in row])

        def read(name: str) -> Tensor:
            rows, kind = self._folder.rows(name, places), row_positions(name)
            expected = len(batch.sample_ids) if kind == "sequences" else len(batch.flat_positions(kind))
            if len(rows) != expected:
                raise UserError(
                    f"{self._folder.folder}: the teacher's cache holds {len(rows)} rows of {name} for a batch with "
                    f"{expected} {kind}, so its examples are others; make it again with `llmdistill cache`"
                )
            return to_device_later(rows, self._device)

        head, scaling = self._head, self._folder.scaling
        return to_outputs(read, batch, self._request, top_k=self._top_k, head=head, scaling=scaling)


@dataclass(frozen=True)
class CachedSource(ModelSource):
    """Reads the cache of a teacher."""

    name: str = ""
    """One of the run's teachers."""

    def build(self, context: TeacherContext) -> CachedTeacher:
        method, folder = context.plan.method, context.plan.models.teachers[self.name].settings.cache
        device = World.current().device
        return CachedTeacher(CacheFolder(Path(str(folder))), Request.of(method), shift=method.shift, device=device)

    def describe(self, teacher: TeacherConfig) -> str:
        return f", read from {teacher.cache}; it is not scored"
