"""The old name of `llmdistill.tasks.item_outputs`, for one version."""

import warnings

from llmdistill.tasks.item_outputs import Forward, compute_values, scoring_forward

__all__ = ["Forward", "compute_values", "scoring_forward"]
warnings.warn(
    "llmdistill.tasks.forward is llmdistill.tasks.item_outputs now; the old name goes with the next version",
    FutureWarning,
    stacklevel=2,
)
