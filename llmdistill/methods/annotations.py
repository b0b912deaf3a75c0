"""Types that methods need only for annotations. At run time they are placeholders, and nothing is imported.

jsonargparse runs the `if TYPE_CHECKING` blocks of a file that defines settings. Such a file imports the types from
here, so that `--help` waits for neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig
else:
    Tensor = PreTrainedConfig = Any

__all__ = ["PreTrainedConfig", "Tensor"]
