"""The old name of `llmdistill.data.pairs`, for one version."""

import warnings

from llmdistill.data.pairs import read_sentences

__all__ = ["read_sentences"]
warnings.warn(
    "llmdistill.data.sentences is llmdistill.data.pairs now; the old name goes with the next version",
    FutureWarning,
    stacklevel=2,
)
