"""Where a teacher's outputs come from if no model gives them in this process, a file each."""

from __future__ import annotations

from llmdistill.config.strict import did_you_mean
from llmdistill.config.teacher import TeacherConfig
from llmdistill.errors import UserError
from llmdistill.plugins import load_plugins
from llmdistill.training.sources.entry import TeacherSource
from llmdistill.training.sources.server import ServerSource

OWN: dict[str, TeacherSource] = {"server": ServerSource()}
"""Those of llmdistill, which settings of their own choose."""
TEACHERS: dict[str, TeacherSource] = {}
"""Those of other packages, by the name that teacher.source has."""

__all__ = ["OWN", "TEACHERS", "TeacherSource", "source_of"]


def source_of(teacher: TeacherConfig) -> TeacherSource | None:
    """Return the source that settings choose; None where a model or a cache gives the outputs."""
    if teacher.source is None:
        return next((each for each in OWN.values() if each.is_chosen(teacher)), None)
    if teacher.source not in TEACHERS:
        raise UserError(
            f"teacher.source {teacher.source}: no installed package has an entry point of this name in "
            f"llmdistill.teachers{did_you_mean(teacher.source, TEACHERS)}"
        )
    return TEACHERS[teacher.source]


TEACHERS |= load_plugins("llmdistill.teachers", OWN)  # last, because the packages import the names above
