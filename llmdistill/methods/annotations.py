"""Types that only the annotations of method files need; at run time they stand for anything, and nothing is loaded.

jsonargparse runs the `if TYPE_CHECKING` blocks of a file that holds settings. Such a file takes them from here, so that
`--help` waits for neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig
else:
    Tensor = PreTrainedConfig = Any

__all__ = ["PreTrainedConfig", "Tensor"]
