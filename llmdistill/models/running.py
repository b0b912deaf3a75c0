"""Layer terms, computed during the student's forward pass, so that no tap is kept longer than a term needs it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from llmdistill.batch import LossSum, Taps
from llmdistill.losses.terms import LayerTerm, Tap, add_losses


class LayerLosses:
    """Computes each layer term as soon as the student's taps for it are available, and drops taps that no term needs.

    Memory: layer by layer, the closed-form gradients that a loss saves for the backward pass replace the teacher's
    tensors, instead of being added to all of them.
    """

    def __init__(self, terms: Sequence[LayerTerm], teacher: Taps | None, attention_mask: Tensor) -> None:
        """`teacher` loses its taps as the terms are computed; it may be None only if there are no terms."""
        assert teacher is not None or not terms, "terms of layers need a teacher"
        self._waiting = list(terms)
        self._teacher = Taps() if teacher is None else teacher
        self._mask = attention_mask
        self._came: set[Tap] = set()
        self.sums: dict[str, LossSum] = {}

    def offer(self, taps: Taps, tap: Tap) -> None:
        """Compute the terms that are ready now that the student's tap `tap` has been added to `taps`."""
        self._came.add(tap)
        ready = [term for term in self._waiting if term.student <= self._came]
        self._waiting = [term for term in self._waiting if not term.student <= self._came]
        for term in ready:
            with without_autocast(self._mask.device):
                loss = term.loss(taps, self._teacher, self._mask)
            self.sums[term.name] = add_losses(self.sums[term.name], loss) if term.name in self.sums else loss
        _drop(taps, {tap, *(each for term in ready for each in term.student)}, self._needed("student"))
        _drop(self._teacher, {each for term in ready for each in term.teacher}, self._needed("teacher"))

    def _needed(self, model: str) -> set[Tap]:
        return {tap for term in self._waiting for tap in getattr(term, model)}


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which operations keep their dtypes: a caller's autocast would round the sums of a loss to bf16."""
    if device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _drop(taps: Taps, done: set[Tap], needed: set[Tap]) -> None:
    for aspect, layer in done - needed:
        getattr(taps, aspect).pop(layer, None)
        taps.projected.get(aspect, {}).pop(layer, None)
