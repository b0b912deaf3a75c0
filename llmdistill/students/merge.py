"""Multiplies a student's factors out, so that it is the stock architecture again."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llmdistill.students.experts import LowRankStack, merge_stack
from llmdistill.students.install import save_joined
from llmdistill.students.modules import FactorizedEmbedding, FactorizedLinear


@torch.no_grad()
def merge(model: PreTrainedModel) -> None:
    """Multiply all factors out, in place: the result is the stock architecture, in the same dtype.

    Products are computed in fp64. GPT-2's modules become Conv1D again; a tied head is tied again.
    """
    config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):  # says which modules the stock architecture has, such as GPT-2's Conv1D
        stock = type(model)(config)
    merged = []
    for name, module in list(model.named_modules()):
        if isinstance(module, FactorizedLinear | FactorizedEmbedding):
            merged.append(f"{name}.weight")
            dense: Any = stock.get_submodule(name).train(module.training)
            product = _product(module)
            dense.weight = nn.Parameter(product.T.contiguous() if type(dense) is Conv1D else product)
            if isinstance(module, FactorizedLinear):
                dense.bias = dict(module.named_parameters()).get(module.bias_name)
            else:
                for key, _ in list(dense.named_buffers(recurse=False)):  # Gemma's factor, without memory so far
                    dense.register_buffer(key, torch.tensor(module.scale, device=product.device), persistent=False)
            model.set_submodule(name, dense)
        elif isinstance(module, LowRankStack):
            merge_stack(model, name, _product(module))
    # `install` gave this instance ties of its own, which hide those of its class.
    vars(model).pop("_tied_weights_keys", None)
    vars(model.config).pop("quantization_config", None)
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    model.tie_weights()
    save_joined(model, merged)


def _product(module: FactorizedLinear | FactorizedEmbedding | LowRankStack) -> Tensor:
    # The product is computed in fp64, so that only the stored matrix is rounded.
    dense: Tensor = copy.deepcopy(module).double().dense()
    return dense.to(next(module.parameters()).dtype)
