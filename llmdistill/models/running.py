"""Losses of layers, computed while the student runs, so that nothing is kept longer than a loss needs it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from llmdistill.batch import LossSum, Taps
from llmdistill.losses.terms import LayerTerm, Tap, add_losses


class LayerLosses:
    """Computes each term as soon as all it needs of the student has come, and drops what no other term waits for.

    What a loss must keep for the backward pass (its closed-form gradient) takes the place of the teacher's tensors
    layer by layer, instead of standing beside all of them.
    """

    def __init__(self, terms: Sequence[LayerTerm], teacher: Taps | None, attention_mask: Tensor) -> None:
        """`teacher` is emptied on the way; None only where there are no terms."""
        assert teacher is not None or not terms, "terms of layers need a teacher"
        self._waiting = list(terms)
        self._teacher = Taps() if teacher is None else teacher
        self._mask = attention_mask
        self._came: set[Tap] = set()
        self.sums: dict[str, LossSum] = {}

    def offer(self, taps: Taps, tap: Tap) -> None:
        """One more of the student's tensors has come; it stands in `taps`, with those that came before."""
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
    """Inside, operations keep their types: a caller's autocast would round the sums of a loss to bf16."""
    if device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _drop(taps: Taps, done: set[Tap], needed: set[Tap]) -> None:
    for aspect, layer in done - needed:
        getattr(taps, aspect).pop(layer, None)
        taps.projected.get(aspect, {}).pop(layer, None)
