"""The kernels' tests run on a GPU where there is one, and elsewhere in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so that needs a process of its own: see test_in_the_interpreter.py.
"""

import os
from importlib.util import find_spec

import pytest
import torch

from llmdistill.losses.fused.triton import available

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

ON_GPU = available("cuda")

collect_ignore = []
if not (INTERPRETED or ON_GPU):
    collect_ignore += ["test_head.py", "test_attention.py", "test_features.py"]
if not INTERPRETED:
    collect_ignore += ["test_launches.py"]
if INTERPRETED or ON_GPU or find_spec("triton") is None:
    collect_ignore += ["test_compilation.py"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(autouse=True)
def products_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bf16 as its bits in a uint16, and would multiply those."""
    if not INTERPRETED:
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    product = interpreter_builder.create_dot

    def widened(side):
        if side.dtype.scalar != tl.bfloat16:
            return side
        return TensorHandle((side.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    monkeypatch.setattr(interpreter_builder, "create_dot", lambda a, b, *rest: product(widened(a), widened(b), *rest))
