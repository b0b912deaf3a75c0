"""Several teachers as one: all of them teach every row, or each row names its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from llmdistill.batch import Batch, HeadInputs, Outputs, Positions, Taps
from llmdistill.config.teacher import TeacherConfig
from llmdistill.errors import UserError
from llmdistill.losses.several import SeveralHeads
from llmdistill.step.forward import TappedModel
from llmdistill.step.teacher import Teacher
from llmdistill.teachers.source import ModelSource, TeacherContext, TeacherData, TeacherPlan, TeacherSource


@dataclass(frozen=True, kw_only=True)
class AveragedTeachers(Teacher):
    """Teachers whose distributions over tokens are averaged at every position."""

    teachers: Mapping[str, Teacher]
    """By name; "" is `teacher.model`."""
    weights: Sequence[float]
    """Over 0, in the order of the teachers; only their proportions matter."""
    average: Literal["probabilities", "log_probabilities"]

    @property
    def live(self) -> Mapping[str, TappedModel]:
        """The models of the teachers that run here."""
        return _live(self.teachers)

    def compute_targets(self, batch: Batch, *, lm_head: Sequence[Positions]) -> Outputs:
        """Run every teacher on a batch."""
        total = sum(self.weights)
        weights = tuple(weight / total for weight in self.weights)
        outputs = [teacher.compute_targets(batch, lm_head=lm_head).lm_head for teacher in self.teachers.values()]
        heads = {place: tuple(_head(output, place) for output in outputs) for place in lm_head}
        several = {place: SeveralHeads(of, weights, self.average) for place, of in heads.items()}
        return Outputs(logits=None, taps=Taps(), lm_head=several)


@dataclass(frozen=True, kw_only=True)
class TeachersOfRows(Teacher):
    """Teachers of which each teaches the rows that ask for it by name."""

    teachers: Mapping[str, Teacher]
    """By name; "" is the one of the rows that name none."""
    together: frozenset[str]
    """The teachers whose forward pass needs every rank: they run even if no row of a batch asks for them."""

    @property
    def live(self) -> Mapping[str, TappedModel]:
        """The models of the teachers that run here."""
        return _live(self.teachers)

    def compute_targets(self, batch: Batch, *, lm_head: Sequence[Positions]) -> Outputs:
        """Run each teacher on its own rows of a decoder's batch."""
        assert tuple(lm_head) == ("labels",), "the positions of decoders are those of the labels"
        device, there = batch.input_ids.device, batch.on_cpu().with_positions(shift=True)
        # The row of each label, from its flat position b·T + t.
        row_N = there.flat_positions("labels") // there.input_ids.shape[1]
        unknown = set(batch.teachers) - set(self.teachers)
        if unknown:  # in a stream; the rows of other sets are checked before the training
            raise UserError(f"data.train: a row has the teacher {min(unknown)!r}: name it in teacher.others")
        whole = there.without_positions()
        heads, places = [], []
        for name, teacher in self.teachers.items():
            own = [row for row, asked in enumerate(batch.teachers) if asked == name]
            if not own and name not in self.together:
                continue
            # A rank without rows for a sharded teacher runs any row, so that all ranks take part, and drops its output.
            part = whole.select(own or [0]).with_positions(shift=True).to(device)
            head = _head(teacher.compute_targets(part, lm_head=lm_head).lm_head, "labels")
            heads.append(head if own else head._replace(rows=head.rows[:0]))
            places.append(torch.isin(row_N, torch.tensor(own, dtype=torch.long)).nonzero()[:, 0])
        return Outputs(logits=None, taps=Taps(), lm_head={"labels": SeveralHeads(tuple(heads), places=tuple(places))})


def _live(teachers: Mapping[str, Teacher]) -> dict[str, TappedModel]:
    live = {name: teacher.live for name, teacher in teachers.items()}
    return {f"teacher {name}".strip(): models["teacher"] for name, models in live.items() if models}


def _head(outputs: Mapping[Positions, object], place: Positions) -> HeadInputs:
    head = outputs[place]
    assert isinstance(head, HeadInputs), "several teachers give their whole distributions"
    return head


@dataclass(frozen=True)
class SeveralSource(ModelSource):
    """Joins sources of one teacher."""

    parts: Mapping[str, TeacherSource]
    """By name; "" is that of `teacher.model`."""

    @property
    def needs_whole(self) -> bool:
        return True

    @property
    def runs_here(self) -> bool:
        return self.parts[""].runs_here

    @property
    def is_scored(self) -> bool:
        return self.parts[""].is_scored

    def build(self, context: TeacherContext) -> Teacher:
        config = context.plan.config.teacher
        teachers = {name: part.build(context) for name, part in self.parts.items()}
        if config.average == "rows":
            sharded = {name for name, part in self.parts.items() if part.runs_here and config.everyone[name].is_sharded}
            return TeachersOfRows(teachers=teachers, together=frozenset(sharded))
        weights = [config.everyone[name].weight for name in teachers]
        return AveragedTeachers(teachers=teachers, weights=weights, average=config.average)

    def describe(self, teacher: TeacherConfig) -> str:
        text = self.parts[""].describe(teacher)
        for name, other in teacher.others.items():
            part = f"for the rows of {name}" if teacher.by_rows else f"weight {other.weight:g}"
            cache = "" if other.cache is None else f", read from {other.cache}"
            text += f"\n            {other.model}, {part}{cache}"
        if teacher.by_rows:
            return text
        average = teacher.average.replace("_", " ")
        return f"{text}\n            the average of {average}, the first with weight {teacher.weight:g}"

    def check_available(self, plan: TeacherPlan) -> None:
        for part in self.parts.values():
            part.check_available(plan)

    def examples(
        self, plan: TeacherPlan, data: TeacherData, name: str
    ) -> tuple[Sequence[Any], Callable[[list[Any]], Batch]]:
        items, collate = data.teacher_examples()
        if plan.config.teacher.by_rows:
            items = [item for item in items if item.teacher == name]
            if not items:
                raise UserError(
                    f"data.train: no row asks for the teacher {name!r}: name another one by --cache.teacher"
                )
        return items, collate
