"""Checks at each step that the loss and the gradient are finite, skips a step or ends the run, and keeps the batch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from safetensors.torch import save_file
from torch import Tensor

from llmdistill.batch import Batch
from llmdistill.errors import UserError
from llmdistill.files import sync, write_json
from llmdistill.runtime.devices import to_host_later
from llmdistill.runtime.distributed import World, all_reduce_sum, gather_objects, on_every, on_main
from llmdistill.runtime.terminal import warn_main
from llmdistill.runtime.training_state import fragments
from llmdistill.training.callbacks.base import StepTerms, TrainState
from llmdistill.training.run_folder import ENDED, NOT_FINITE
from llmdistill.training.trainer import Trainer

LIMIT = 3
"""Skipped steps in a row that end the run."""
LOWER = "give the same command with a lower train.learning_rate, which goes on from the last checkpoint"
_SHOWN_SAMPLES = 4


class Cause(NamedTuple):
    """A term that is not finite in a micro batch."""

    rank: int
    term: str
    sample_ids: Sequence[int]
    """The samples of the micro batch."""


@dataclass(frozen=True)
class _Step:
    number: int
    batches: Sequence[Batch]
    losses: Tensor
    """This rank's terms of each micro batch, (micro batches, terms)."""
    figures: Callable[[], list[float]]
    """Returns the terms of the global batch and the norm of the gradient."""


@dataclass
class FiniteSteps:
    """Watches the steps of a run. Every rank must call its methods, and each of them with the same steps.

    A step that DeepSpeed has skipped is known at once. The numbers of an applied step are copied to the host while the
    next step runs, and are read after it: the device never waits for the host.
    """

    reads: ClassVar[tuple[str, ...]] = (
        "settings",
        "step",
        "micro_batches",
        "losses",
        "was_applied",
        "signal",
        "failure",
    )
    gives: ClassVar[tuple[str, ...]] = ("known_terms", "is_finite")

    trainer: Trainer
    folder: Path
    """The run's folder."""
    in_a_row: int = 0
    _last: _Step | None = None

    def after_step(self, state: TrainState) -> None:
        """See Callback: find the terms of the step before, or of this one if it is read now.

        Raises UserError, which ends the run, if the loss, the gradient or the student is not finite.
        """
        follow = self.record_applied if state.was_applied else self.report_skipped
        known = [follow(state.step, state.micro_batches, state.losses)]
        if state.is_read:
            known.append(self.check_last())
        state.known_terms = [terms for terms in known if terms is not None]
        if state.is_saved:
            self.check_student(state.step)
        state.is_finite = True

    def figures(self) -> dict[str, Any]:
        """See Accumulator; the figures of the last step have been read when a checkpoint is saved."""
        return {"in_a_row": self.in_a_row}

    def restore(self, figures: Mapping[str, Any]) -> None:
        """See Accumulator."""
        self.in_a_row = figures["in_a_row"]

    def report_skipped(self, step: int, batches: Sequence[Batch], losses: Tensor) -> StepTerms | None:
        """Report a step that DeepSpeed has skipped, because its gradient is not finite; the student is unchanged.

        Returns the figures of the applied step before it, if they were not read yet. Raises UserError if the policy is
        to stop, or it is the third such step in a row.
        """
        before = self.check_last()
        self.in_a_row += 1
        report = self._report(
            _Step(step, batches, losses, list), f"step {step} was skipped, because its gradient is not finite"
        )
        remedy = f"fix or remove these samples, or {LOWER}"
        stops = self.trainer.settings.not_finite == "stop"
        if stops or self.in_a_row == LIMIT:
            why = "train.not_finite is stop" if stops else f"it is the {LIMIT}rd in a row"
            end_run(self.trainer, self.folder, step, f"{report}; {why}: {remedy}; the student is as it was before")
        warn_main(f"{report}; the student is unchanged")
        return before

    def record_applied(self, step: int, batches: Sequence[Batch], losses: Tensor) -> StepTerms | None:
        """Remember an applied step, and check the one before it as `check_last` does; return its figures.

        `losses` are this rank's terms of each micro batch, (micro batches, terms), divided by the global counts.
        """
        before = self.check_last()
        self.in_a_row = 0
        norm = self.trainer.engine.get_global_grad_norm()
        # A norm of 0 stands for one that DeepSpeed has not computed.
        norm = norm if isinstance(norm, Tensor) else torch.full((), float(norm or 0.0), device=losses.device)
        # The divisors were global, so the sum over micro batches and ranks is the term of the whole batch.
        totals = all_reduce_sum(losses.detach().sum(0))
        figures = torch.cat([totals, norm.to(totals).reshape(1)])
        self._last = _Step(step, batches, losses, to_host_later(figures))  # the copy goes on while the next step runs
        return before

    def check_last(self) -> StepTerms | None:
        """Check the last applied step now, before its student is used; return its figures if they were not read yet."""
        step, self._last = self._last, None
        if step is None:
            return None
        *values, norm = step.figures()
        terms = dict(zip(self.trainer.method.weights, values, strict=True))
        if all(map(math.isfinite, (*values, norm))):
            return StepTerms(step.number, terms)
        named = (*((f"term {name}", value) for name, value in terms.items()), ("norm of the gradient", norm))
        name, value = next((name, value) for name, value in named if not math.isfinite(value))
        report = self._report(step, f"the {name} is {value} at step {step.number}")
        why = f"{report}; nothing is saved any more: fix or remove these samples, or {LOWER}"
        end_run(self.trainer, self.folder, step.number, why)

    def check_student(self, step: int) -> None:
        """Check what would be saved after a step: a finite step of a large learning rate can overflow the weights."""
        # What a checkpoint saves: weights in the precision of the optimizer, and moments.
        state = fragments(self.trainer.engine)
        is_finite = torch.stack([fragment.read().isfinite().all() for fragment in state]).tolist() if state else []
        broken = next((fragment for fragment, fine in zip(state, is_finite, strict=True) if not fine), None)
        of_ranks = gather_objects(None if broken is None else f"{broken.kind} of {broken.name}")
        wrong = next((name for name in of_ranks if name is not None), None)
        if wrong is not None:
            why = f"the {wrong} is not finite after step {step}, so nothing is saved any more: {LOWER}"
            end_run(self.trainer, self.folder, step, why)

    def _report(self, step: _Step, what: str) -> str:
        """Keep the batches of a step whose numbers are not finite, and say which they are and how it came to it."""
        # Such a step is rare, so the host may wait for the values of the terms here.
        is_wrong = (~step.losses.isfinite()).tolist()
        own = [
            Cause(World.current().rank, name, [sample_id for row in batch.sample_ids for sample_id in row])
            for batch, of_batch in zip(step.batches, is_wrong, strict=True)
            for name, wrong in zip(self.trainer.method.weights, of_batch, strict=True)
            if wrong
        ]
        causes = [cause for of_rank in gather_objects(own) for cause in of_rank]
        # On every rank, because the forward passes of a sharded model need all of them.
        origins = gather_objects(self.trainer.describe_origin(step.number, step.batches))
        guilty = causes[0].rank if causes else 0
        folder = self.folder / NOT_FINITE / f"step-{step.number}"
        saved = [batch for batch, of_batch in zip(step.batches, is_wrong, strict=True) if any(of_batch) or not causes]

        def save_batches() -> None:
            """Write the tensors of micro batches, each name with the number of its micro batch: "0/input_ids"."""
            tensors = {
                f"{number}/{part.name}": value.to("cpu", copy=True).contiguous()  # labels may be the ids themselves
                for number, batch in enumerate(saved)
                for part in fields(batch)
                if isinstance(value := getattr(batch, part.name), Tensor)
            }
            if tensors:
                folder.mkdir(parents=True, exist_ok=True)
                file = folder / f"rank-{World.current().rank:05d}.safetensors"
                ids = {f"{number}/sample_ids": json.dumps(batch.sample_ids) for number, batch in enumerate(saved)}
                save_file(tensors, file, metadata=ids)
                sync(file)

        on_every(save_batches)
        about = {"step": step.number, "causes": [cause._asdict() for cause in causes], "origins": origins}
        on_main(lambda: write_json(folder / "about.json", about))
        described = "every term is finite, so it became so in the backward pass"
        if causes:
            ranks = ", ".join(map(str, sorted({cause.rank for cause in causes})))
            terms = ", ".join(dict.fromkeys(cause.term for cause in causes))
            samples = list(dict.fromkeys(str(sample) for cause in causes for sample in cause.sample_ids))
            more = f" and {len(samples) - _SHOWN_SAMPLES} more" if len(samples) > _SHOWN_SAMPLES else ""
            described = (
                f"{terms} on rank {ranks}, in the micro batches of the samples "
                f"{', '.join(samples[:_SHOWN_SAMPLES])}{more}"
            )
        return f"{what}: {described}; {origins[guilty]}; its batch is in {folder}"


def end_run(trainer: Trainer, folder: Path, step: int, why: str) -> NoReturn:
    """End a run by a UserError on every rank, so that the same command goes on with a lower learning rate."""
    record = {"step": step, "learning_rate": trainer.settings.peak_learning_rate}
    on_main(lambda: write_json(folder / NOT_FINITE / ENDED, record))
    error = UserError(why)
    # All ranks raise it, so rank 0 alone says it.
    error.everywhere = True
    raise error
