"""Counts parameters and FLOPs, and finds the linears that can be factorized; works on the meta device."""

from __future__ import annotations

import copy

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.errors import UserError
from llmdistill.models.config_check import install_saved
from llmdistill.models.general import in_lists, is_linear
from llmdistill.models.heads import HeadName
from llmdistill.models.load import build_meta
from llmdistill.students.experts import stacks_of
from llmdistill.students.install import features
from llmdistill.students.kronecker import kronecker_flops, kronecker_params
from llmdistill.students.modules import KroneckerLinear

Shape = tuple[int, int]
"""Outputs m and inputs n of a matrix."""


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, where tied ones count once; also on the meta device or partitioned by ZeRO-3."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())


def forward_flops(model: nn.Module) -> int:
    """Return the FLOPs of a forward pass for one token: 2 for each parameter, and eq. 7 for Kronecker products.

    The parameters of Kronecker products are used many times for a token. The products inside the attention, which grow
    with the length, are left out. An embedding table, which is only looked up, counts as much as a head that is tied to
    it.
    """
    products = [module for module in model.modules() if isinstance(module, KroneckerLinear)]
    sizes = [(product.out_features, product.in_features, product.shape) for product in products]
    of_products = sum(kronecker_flops(*size) for size in sizes)
    factors = sum(kronecker_params(*size) for size in sizes)
    return 2 * (count_parameters(model) - factors) + of_products


def build_reference(config: PreTrainedConfig, head: HeadName = "none") -> PreTrainedModel:
    """Build a model on the meta device, factorized if its config says so; by default the one that papers count.

    That is the base model (with pooler) for encoders, and the causal LM for decoders. `config` stays as it is. Raises
    UserError if the architecture is not supported.
    """
    model = build_meta(copy.deepcopy(config), head)
    install_saved(model)
    return model


def layer_linears(model: PreTrainedModel) -> dict[str, Shape]:
    """Return the name and shape of each linear of the layers: nn.Linear and Conv1D in an nn.ModuleList of the base.

    Every architecture keeps its layers in a list. The modules that must not be factorized with them (embeddings,
    pooler, lm_head, classifier) are outside of this list or outside of the base model, so no table of architectures is
    needed. What layers share with each other is left out. Raises UserError if there is no such linear.
    """
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    tied = {*ties.keys(), *ties.values()}  # between layers in Zamba's attention
    linears = {
        name: features(module) for name, module in in_lists(model) if is_linear(module) and f"{name}.weight" not in tied
    }
    if not linears:
        raise UserError(
            f"{type(model).__name__} holds no nn.Linear or Conv1D in a list of layers, so there is nothing to "
            "factorize: a smaller model of its kind as student.model learns from it by kd, sft and seqkd"
        )
    return linears


def layer_stacks(model: PreTrainedModel) -> dict[str, tuple[int, Shape]]:
    """Name, number and shape of the matrices of each stack of experts that can be factorized (`stacks_of`)."""
    return {
        f"{name}.{stack}": (weight.shape[0], (weight.shape[1], weight.shape[2]))
        for name, module in in_lists(model)
        for stack, weight in stacks_of(module).items()
    }
