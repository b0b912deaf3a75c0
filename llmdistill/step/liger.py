"""Liger's kernels for RMSNorm, RoPE and SwiGLU in the layers of a model: one launch where transformers has several.

Only these three: what Liger has for the LM head and its loss is done by the losses of this package, which need the
inputs of the head. Factorized linears stay as they are, as Liger's feed-forward part calls its linears as modules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.losses.fused.triton import available
from llmdistill.models.general import layer_values

MODEL_TYPES = ("granite", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3")
"""Architectures with all three operations, whose outputs and gradients are tested against transformers' own."""
PARTS = {"rope": True, "rms_norm": True, "swiglu": True, "cross_entropy": False, "fused_linear_cross_entropy": False}


def fits(config: PreTrainedConfig) -> bool:
    """Whether Liger has the operations of a model with this config."""
    # Liger's SwiGLU multiplies by SiLU, whatever the config says.
    return config.model_type in MODEL_TYPES and set(layer_values(config, "hidden_act")) <= {"silu", "swish"}


def is_installed() -> bool:
    """Whether the library is there."""
    return find_spec("liger_kernel") is not None


def apply_liger(model: PreTrainedModel) -> None:
    """Let the layers of a model run Liger's kernels; the model must be on a GPU when it runs.

    Call it before hooks are set, and on no model whose layers are compiled: the compiled layers are copies, in which
    Liger's functions would read the weights of the original.
    """
    from transformers.integrations.liger import apply_liger_kernel

    # Liger also changes the architecture's module, and so every model of the process that runs or is made later.
    code = vars(sys.modules[type(model).__module__])
    before = dict(code)
    apply_liger_kernel(model, PARTS)
    for name, original in before.items():
        if code[name] is not original:
            is_class = isinstance(original, type) and issubclass(original, nn.Module)
            code[name] = original if is_class else partial(_on_device, code[name], original)


def _on_device(fused: Callable[..., Any], original: Callable[..., Any], query: Tensor, *more: Any, **named: Any) -> Any:
    """Call Liger's function on a GPU, and elsewhere that of transformers."""
    return (fused if available(query.device) else original)(query, *more, **named)
