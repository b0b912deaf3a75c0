"""Computes the terms of a loss while the student's forward pass runs, where the tensors that they need appear."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from llmdistill.batch import Batch, HeadInputs, LossSum, Positions, Taps
from llmdistill.losses.head import token_losses
from llmdistill.losses.terms import BoundTerms, LayerTerm, Tap, add_losses
from llmdistill.models.sharded import gathered


class LayerLosses:
    """Computes each layer term as soon as the student's taps for it are available, and drops taps that no term needs.

    Memory: layer by layer, the closed-form gradients that a loss saves for the backward pass replace the teacher's
    tensors, instead of being added to all of them.
    """

    def __init__(self, terms: Sequence[LayerTerm], teacher: Taps, attention_mask: Tensor) -> None:
        """`teacher` loses its taps as the terms are computed."""
        self._teacher = teacher
        self._mask = attention_mask
        # How many taps each term waits for, which terms wait for a tap, and how many terms still read it.
        self._missing = [len(term.student) for term in terms]
        self._readers: dict[Tap, list[tuple[int, LayerTerm]]] = {}
        for number, term in enumerate(terms):
            for tap in term.student:
                self._readers.setdefault(tap, []).append((number, term))
        self._needed = Counter(chain.from_iterable(term.student for term in terms))
        self._needed_of_teacher = Counter(chain.from_iterable(term.teacher for term in terms))
        self._losses: dict[str, list[LossSum]] = {}

    @property
    def sums(self) -> dict[str, LossSum]:
        """The sums so far, by the name of their term; those of several layers are added."""
        return {name: add_losses(*losses) for name, losses in self._losses.items()}

    def compute_ready(self, taps: Taps, tap: Tap) -> None:
        """Compute the terms that are ready now that the student's tap `tap` has been added to `taps`."""
        for number, term in self._readers.get(tap, ()):
            self._missing[number] -= 1
            if self._missing[number] == 0:
                with without_autocast(self._mask.device):
                    loss = term.loss(taps, self._teacher, self._mask)
                self._losses.setdefault(term.name, []).append(loss)
                _drop_unneeded(taps, term.student, self._needed)
                _drop_unneeded(self._teacher, term.teacher, self._needed_of_teacher)
        if tap not in self._readers:
            _drop(taps, tap)


def _drop_unneeded(taps: Taps, read: Collection[Tap], needed: Counter[Tap]) -> None:
    """Drop the taps that a term has read, if no other term needs them."""
    for tap in read:
        needed[tap] -= 1
        if needed[tap] == 0:
            _drop(taps, tap)


def _drop(taps: Taps, tap: Tap) -> None:
    aspect, layer = tap
    getattr(taps, aspect).pop(layer, None)
    taps.projected.get(aspect, {}).pop(layer, None)


class HeadLosses:
    """Computes the token terms from the inputs of the LM head's last linear, chunk by chunk, and their gradients.

    It is called inside the LM head, whose product it replaces: there ZeRO-3 has gathered the parameters.
    """

    def __init__(self, terms: BoundTerms, batch: Batch, *, shift: bool, vocabulary: int | None) -> None:
        """See `TappedModel` for `shift` and `vocabulary`."""
        self._terms, self._batch, self._shift, self._vocabulary = terms, batch, shift, vocabulary
        self.positions: tuple[Positions, ...] = tuple(dict.fromkeys(term.positions for term in terms.token_terms))
        """The kinds of positions whose predictions are compared."""
        self.sums: dict[str, LossSum] = {}

    def __call__(self, head: HeadInputs) -> Tensor:
        """Return the weighted total of the terms; the rows are those of `places`, one kind after the other."""
        counts, totals = self._batch.counts(), []
        for place, rows in split_by_positions(head, self._batch, self.positions).items():
            terms = [term for term in self._terms.token_terms if term.positions == place]
            if place == "labels":
                labels_N = self._batch.row_labels(shift=self._shift)
            else:  # only divergences sum over other positions, and they read no label
                labels_N = torch.zeros_like(self._batch.flat_positions(place))
            factors = torch.stack(
                [
                    # full() launches a kernel; torch.tensor() would copy, and the host would wait for the device
                    factor.float() if isinstance(factor, Tensor) else torch.full((), factor, device=labels_N.device)
                    for factor in (self._terms.factors[term.name] for term in terms)
                ]
            )
            teacher = None if self._terms.teacher is None else self._terms.teacher.lm_head.get(place)
            with ExitStack() as gathered_heads, without_autocast(labels_N.device):
                # The losses multiply by the head of a sharded teacher, which must be whole for that.
                for teacher_head in () if teacher is None else teacher.heads:
                    gathered_heads.enter_context(gathered(teacher_head.weight, teacher_head.bias))
                losses = token_losses(rows, teacher, labels_N, terms, factors, vocabulary=self._vocabulary)
            self.sums |= {
                term.name: LossSum(total, counts[place]) for term, total in zip(terms, losses.sums, strict=True)
            }
            totals.append(losses.total)
        return torch.stack(totals).sum()


def split_by_positions(head: HeadInputs, batch: Batch, places: Sequence[Positions]) -> dict[Positions, HeadInputs]:
    """Split the rows of an LM head that ran on several kinds of positions, one after the other, by kind."""
    parts = head.rows.split([len(batch.flat_positions(place)) for place in places])
    return {place: head._replace(rows=rows) for place, rows in zip(places, parts, strict=True)}


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which operations keep their dtypes: a caller's autocast would round the sums of a loss to bf16."""
    if device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
