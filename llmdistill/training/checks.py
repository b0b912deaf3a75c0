"""Checks of a plan that need neither weights nor data."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch

from llmdistill.errors import UserError, install_command
from llmdistill.losses.fused.triton import available
from llmdistill.models.forms import chosen_forms
from llmdistill.step import liger
from llmdistill.step.compile import check_compilers
from llmdistill.students.sizes import build_planned
from llmdistill.teachers.source import TeacherPlan
from llmdistill.training.resolved import RunModels
from llmdistill.training.rules import COMPILE, PlanFacts, check_conditions, clash

_WORTH_COMPILING = 500
"""Steps of a run from which on it compiles by itself: a shorter one would hardly win back the time."""


class CheckedPlan(PlanFacts, TeacherPlan, Protocol):
    """What the checks read of a run's plan; see `training.plan.Plan`."""

    @property
    def models(self) -> RunModels: ...


def check_plan(plan: CheckedPlan) -> None:
    """Raise a UserError if the settings of a run do not fit its models, data or method, or each other."""
    check_conditions(plan)
    for form, settings in chosen_forms(plan.config.student):
        form.check(settings, partial(build_planned, plan.models.student, plan.config.student))
    if plan.source is not None:
        plan.source.settings_of(plan.config.teacher)
        plan.source.check_plan(plan)


def compiles(plan: CheckedPlan, device: torch.device) -> bool:
    """Whether a run compiles its layers: if it is told to, or by itself if that is possible and worth the time."""
    chosen = plan.config.train.compile
    if chosen != "auto":
        return chosen
    if device.type != "cuda" or plan.config.train.steps < _WORTH_COMPILING or clash(plan, COMPILE) is not None:
        return False
    try:
        check_compilers(device)
    except UserError:
        return False
    return True


def runs_liger(plan: CheckedPlan, device: torch.device) -> bool:
    """Whether a run takes Liger's kernels for the models that they fit: if it is told to, or by itself if it can."""
    chosen = plan.config.train.liger
    if chosen != "auto":
        return chosen
    return available(device) and liger.is_installed() and not compiles(plan, device)


def check_liger(plan: CheckedPlan, device: torch.device) -> None:
    """Raise a UserError if Liger's kernels cannot run on a device, are missing, or do not fit the student of a run."""
    if not available(device):
        raise UserError("train.liger is true, but its kernels need a GPU, A100 or later: set it to auto or false")
    if not liger.is_installed():
        raise UserError(f"train.liger is true, but Liger is missing: {install_command('liger')}")
    if not liger.fits(plan.models.student):
        raise UserError(
            f"train.liger is true, but it is for {', '.join(liger.MODEL_TYPES)} with SiLU, and the student is "
            f"{plan.models.student.model_type}: set it to auto or false"
        )


def can_cache(plan: CheckedPlan) -> bool:
    """Whether a cache can take the place of a run's teacher, and the same command does not make this teacher first."""
    return plan.teacher_plan is None and plan.cache_obstacle is None
