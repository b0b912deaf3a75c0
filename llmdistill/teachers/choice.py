"""Which source gives the outputs of a run's teacher: one of this folder, or an entry point of another package."""

from __future__ import annotations

from llmdistill.config.strict import did_you_mean
from llmdistill.config.teacher import TeacherConfig
from llmdistill.errors import UserError
from llmdistill.plugins import load_plugins
from llmdistill.teachers.cache.teacher import CachedSource
from llmdistill.teachers.few_bits import RoundedSource
from llmdistill.teachers.live import LiveSource
from llmdistill.teachers.remote import ServerSource
from llmdistill.teachers.several import SeveralSource
from llmdistill.teachers.source import Capabilities, TeacherContext, TeacherSource
from llmdistill.teachers.tensor_parallel import TensorParallelSource
from llmdistill.teachers.translated import TranslatedSource

TEACHERS: dict[str, TeacherSource] = {}
"""Sources of other packages, by the name that teacher.source has; `source_of` chooses among ours."""

__all__ = ["TEACHERS", "Capabilities", "TeacherContext", "TeacherSource", "source_of"]


def source_of(teacher: TeacherConfig, *, translates: bool = False) -> TeacherSource:
    """Return the source that settings choose; with `translates` the teacher has another tokenizer than the student."""
    source: TeacherSource
    if teacher.source is not None:
        if teacher.source not in TEACHERS:
            raise UserError(
                f"teacher.source {teacher.source}: no source of this name is registered, by an entry point in "
                f"llmdistill.teachers or in TEACHERS{did_you_mean(teacher.source, TEACHERS)}"
            )
        source = TEACHERS[teacher.source]
    elif teacher.url is not None:
        source = ServerSource()
    else:
        parts = dict[str, TeacherSource]()
        for name, one in teacher.everyone.items():
            if one.cache is not None:
                parts[name] = CachedSource(name)
            elif one.sharding == "tensor":
                parts[name] = TensorParallelSource()
            else:
                parts[name] = LiveSource(name) if one.quantize == "none" else RoundedSource(name)
        source = parts[""] if len(parts) == 1 else SeveralSource(parts)
    return TranslatedSource(source) if translates else source


# Last, because the packages import the names above. "server" was the name of ServerSource in this table, before
# teacher.url alone chose it; a package may not give it to something else.
TEACHERS |= load_plugins("llmdistill.teachers", ("server",))
