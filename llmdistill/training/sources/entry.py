"""The protocol of what gives the outputs of a run's teacher when no model does so in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmdistill.config.cache import CacheConfig
from llmdistill.config.teacher import TeacherConfig
from llmdistill.errors import UserError
from llmdistill.step.teacher import Teacher

if TYPE_CHECKING:
    from llmdistill.training.plan import Plan


class TeacherSource:
    """A source of a teacher's outputs. Only `build` must be its own; the other methods then say and check nothing.

    Of `teacher.model` a run still reads the configuration and the tokenizer, and its weights where the student is made
    from them.
    """

    def is_chosen(self, teacher: TeacherConfig) -> bool:
        """Whether settings of llmdistill's own ask for it; one of another package is named by teacher.source."""
        return False

    def build(self, plan: Plan) -> Teacher:
        """Return the teacher of a run's steps; every rank calls it."""
        raise NotImplementedError

    def describe(self, teacher: TeacherConfig) -> str:
        """What the first lines of a run add to the teacher."""
        return f", its outputs come from {teacher.source}; it is not scored"

    def check_plan(self, plan: Plan) -> None:
        """Raise a UserError if it cannot give what the method of a run compares."""

    def check_there(self, plan: Plan) -> tuple[str, str]:
        """Raise a UserError if it does not answer; return the setting that names it, and what was found."""
        return "teacher.source", f"{plan.config.teacher.source} is there"

    def unforecast(self, teacher: TeacherConfig) -> str:
        """Say why `llmdistill plan` cannot forecast it, with a remedy."""
        return f"teacher.source is {teacher.source}, and what it costs is not forecast: leave it out"

    def cache_settings(self, plan: Plan, settings: CacheConfig) -> CacheConfig:
        """Return the settings of a cache that it fills, once it is found to be there; a UserError if it cannot."""
        raise UserError(f"teacher.source {plan.config.teacher.source} fills no cache: train with it itself")

    def scorer(self, plan: Plan) -> Callable[..., Any]:
        """Return what scores the texts of a cache, as `write_by_scorer` calls it."""
        raise NotImplementedError
