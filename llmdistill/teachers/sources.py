"""The old name of `llmdistill.teachers.choice`, for one version."""

import warnings

from llmdistill.teachers.choice import TEACHERS, Capabilities, TeacherContext, TeacherSource, source_of

__all__ = ["TEACHERS", "Capabilities", "TeacherContext", "TeacherSource", "source_of"]
warnings.warn(
    "llmdistill.teachers.sources is llmdistill.teachers.choice now; the old name goes with the next version",
    FutureWarning,
    stacklevel=2,
)
