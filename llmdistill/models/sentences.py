"""The old name of `llmdistill.models.pooling`, for one version."""

import warnings

from llmdistill.models.pooling import pool_tokens as pooled
from llmdistill.models.pooling import read_sentence_settings

__all__ = ["pooled", "read_sentence_settings"]
warnings.warn(
    "llmdistill.models.sentences is llmdistill.models.pooling now; the old name goes with the next version",
    FutureWarning,
    stacklevel=2,
)
