"""The old name of `llmdistill.students.modules`, for one version."""

import warnings

from llmdistill.students.modules import FactorizedEmbedding, FactorizedLinear, KroneckerLinear, LowRankLinear

__all__ = ["FactorizedEmbedding", "FactorizedLinear", "KroneckerLinear", "LowRankLinear"]
warnings.warn(
    "llmdistill.factorize.modules is llmdistill.students.modules now; the old name goes with the next version",
    FutureWarning,
    stacklevel=2,
)
