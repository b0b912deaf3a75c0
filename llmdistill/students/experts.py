"""Low-rank factors for the experts of a layer, whose matrices transformers keeps as stacks (E, m, n).

Letters: E experts, n inputs, m outputs, k rank; T tokens, K experts for each of them, S = T K rows in the experts'
order, d width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from llmdistill.internals.transformers_names import mark_initialized, set_experts

EXPERTS_NAME = "llmdistill_low_rank"
"""Name under which the experts' function is registered in transformers."""
_STACKS = ("gate_up_proj", "up_proj", "down_proj")


class LowRankStack(nn.Module):
    """y = (x A_e) B_e for each row x and its expert e, which replaces y = x W_e.

    Both factors are parameters of this module, which is called once in a pass, so that ZeRO-3 gathers them together.
    """

    def __init__(self, experts: int, in_features: int, out_features: int, rank: int) -> None:
        """Set random weights in the scale of nn.Linear's."""
        super().__init__()
        self.sizes = f"experts={experts}, in_features={in_features}, out_features={out_features}, rank={rank}"
        self.in_factors = nn.Parameter(torch.empty(experts, rank, in_features))
        self.out_factors = nn.Parameter(torch.empty(experts, out_features, rank))
        for factors in (self.in_factors, self.out_factors):
            nn.init.uniform_(factors, -(factors.shape[2] ** -0.5), factors.shape[2] ** -0.5)

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """(S, n) -> (S, m), where `counts` has the number of rows of each expert."""
        # unbind, because the gradient of one expert's matrix by its number is as large as the stack
        factors = zip(x.split(counts), self.in_factors.unbind(), self.out_factors.unbind(), strict=True)
        return torch.cat([functional.linear(functional.linear(rows, a), b) for rows, a, b in factors if len(rows)])

    def dense(self) -> Tensor:
        """Return the products as transformers holds them, (E, m, n)."""
        return self.out_factors @ self.in_factors

    def extra_repr(self) -> str:
        return self.sizes  # ZeRO-3 leaves the parameters no shape


def stacks_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the stacks (E, m, n) of a module of experts that can be factorized, by name; none for every other module.

    Experts with biases, transposed matrices (GPT-OSS) or a norm, and those that do not use transformers' interface of
    experts, stay as they are.
    """
    stored: Any = module
    plain = getattr(stored, "is_transposed", None) is False and getattr(stored, "has_bias", None) is False
    if not plain or getattr(stored, "has_post_expert_norm", False) or not hasattr(stored, "_apply_gate"):
        return {}
    own = dict(module.named_parameters(recurse=False))
    return {name: own[name] for name in _STACKS if name in own and own[name].dim() == 3}


def has_experts(model: nn.Module) -> bool:
    """Return whether the layers of a model choose experts by transformers' interface."""
    return any(hasattr(module, "_apply_gate") for module in model.modules())


def factors_name(stack: str) -> str:
    """Return the name of the factors of a stack.

    It does not begin with the stack's: transformers cuts what is named like the stack into the experts when it saves.
    """
    return f"{stack.removesuffix('_proj')}_factors"


def stack_factors(of_experts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the parameters of a LowRankStack from those of a LowRankLinear for each expert."""
    names = {"in_factors": "A.weight", "out_factors": "B.weight"}
    return {name: torch.stack([expert[single] for expert in of_experts]) for name, single in names.items()}


def install_stack(experts: nn.Module, name: str, factors: LowRankStack) -> None:
    """Replace a stack by factors, in place, and let transformers run the experts of the model by them."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, low_rank_experts)
    delattr(experts, name)
    setattr(experts, factors_name(name), factors)
    set_experts(experts, EXPERTS_NAME)
    mark_initialized(experts)  # transformers initializes stacks by their names


def merge_stack(model: PreTrainedModel, name: str, products: Tensor) -> None:
    """Replace the factors with this name by their products (E, m, n), in place."""
    parent, _, leaf = name.rpartition(".")
    experts = model.get_submodule(parent)
    delattr(experts, leaf)
    setattr(experts, f"{leaf.removesuffix('_factors')}_proj", nn.Parameter(products))
    if not any(isinstance(module, LowRankStack) for module in model.modules()):
        model.set_experts_implementation(cast(Any, None))  # transformers' own choice


def low_rank_experts(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, **_kwargs: Any
) -> Tensor:
    """Run the experts `self` of a layer, of whose stacks any may be factorized, as transformers' own functions do.

    Args:
        self: the module of the experts.
        hidden_states: (T, d).
        top_k_index: (T, K), the experts of each token.
        top_k_weights: (T, K), their shares in the output.

    Returns:
        (T, d).
    """
    chosen = top_k_index.reshape(-1)
    order = chosen.argsort(stable=True)
    if chosen.is_meta:  # without numbers the rows are as even as they can be
        share, rest = divmod(chosen.numel(), self.num_experts)
        counts = [share + (expert < rest) for expert in range(self.num_experts)]
    else:
        # Sizes of slices must be on the CPU: this waits for the GPU once a layer.
        counts = cast("list[int]", chosen.bincount(minlength=self.num_experts).tolist())
    rows = hidden_states[order // top_k_index.shape[1]]
    if self.has_gate:
        inner = self._apply_gate(_product(self, "gate_up_proj", rows, counts))
    else:
        inner = self.act_fn(_product(self, "up_proj", rows, counts))
    outputs = _product(self, "down_proj", inner, counts) * top_k_weights.reshape(-1)[order, None]
    # argsort of a permutation is its inverse, back to the order of the tokens.
    of_tokens = outputs[order.argsort()].view(*top_k_index.shape, -1)
    # The shares may be fp32, which makes the products with them fp32 too.
    return of_tokens.sum(dim=1).to(hidden_states.dtype)


def _product(experts: Any, name: str, rows: Tensor, counts: list[int]) -> Tensor:
    factors: LowRankStack | None = getattr(experts, factors_name(name), None)
    if factors is not None:
        return cast(Tensor, factors(rows, counts))
    pieces = zip(rows.split(counts), getattr(experts, name).unbind(), strict=True)
    return torch.cat([functional.linear(piece, weight) for piece, weight in pieces if len(piece)])
