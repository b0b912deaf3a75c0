"""The old name of `llmdistill.tasks.glue`, for one version."""

import warnings

from llmdistill.tasks.glue import GLUE_TASKS, GlueTask, PairSet

__all__ = ["GLUE_TASKS", "GlueTask", "PairSet"]
warnings.warn(
    "llmdistill.tasks.glue_files is llmdistill.tasks.glue now; the old name goes with the next version",
    FutureWarning,
    stacklevel=2,
)
