"""Measures which parts of a model matter on calibration data, and chooses those that a smaller student takes.

Channels, heads and feed-forward neurons are ranked by the size of their activations (Minitron, arXiv 2407.14679 §2.2),
layers by how much they change what they read (the block influence of ShortGPT, arXiv 2403.03853 eq. 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.models.families import base_name, family_of, has_rotary, layers_of, shape_of
from llmdistill.step.forward import TappedModel
from llmdistill.step.passes import HookSums, Passes, run_passes
from llmdistill.step.taps import Recorder
from llmdistill.students.shapes import Parts, largest, split_name


@dataclass(frozen=True, kw_only=True)
class Importance:
    """What the activations of a model say about its parts, as means over real tokens in fp64 on the CPU.

    L, W, H, G, D and F are the model's sizes, as in the legend of `llmdistill.batch`.
    """

    norms: Mapping[str, Tensor]
    """(W,) for each norm of the residual stream by its name in the base model: |output| of each channel."""
    spreads: Mapping[str, Tensor]
    """(W,) for each norm: the square of each channel of its input, without the token's mean in a LayerNorm."""
    heads_LH: Tensor
    """The length of each head's output before the output projection."""
    contexts_LHD: Tensor
    """The size |x| of each feature of these outputs."""
    scores_LGD: Tensor | None
    """Root of the mean squares of each feature of the keys times those of the queries that share them: the size of the
    feature's share in the attention scores. None for rotary positions, where heads take features by frequency."""
    neurons_LF: Tensor
    """The size |x| of each input of the down projection."""
    influence_L: Tensor
    """1 - the cosine between a layer's input and output."""
    tokens: int
    """The number of tokens."""


@torch.no_grad()
def measure_importance(
    model: PreTrainedModel,
    batches: Sequence[Batch],
    *,
    reduce: Callable[[Tensor], object] | None = None,
    rounds: int = 0,
) -> Importance:
    """Return the importance of a model's parts over the real tokens of batches.

    Args:
        model: the model, whose mode and weights stay as they are.
        batches: the batches of this rank, on any device; each rank needs at least one.
        reduce: sums a tensor over the ranks in place.
        rounds: the smallest number of passes, as in `Passes`.

    Raises:
        UserError: there is no token, or an activation is not finite.
    """
    sums = _Sums(model)
    # The layers whose queries and keys are measured: none with rotary positions, see `Importance.scores_LGD`.
    every = range(0 if has_rotary(model.config) else len(layers_of(model)))
    tapped = TappedModel(model, Recorder(model, {"query": frozenset(every), "key": frozenset(every)}))

    def step(batch: Batch) -> None:
        taps = tapped(batch).taps
        for layer in every:
            for aspect, tensor in (("query", taps.query[layer]), ("key", taps.key[layer])):
                # (B, H, T, D) -> (B, T, H, D), the axes that the mask of tokens selects from
                sums.add(f"{aspect} {layer}", tensor.transpose(1, 2), torch.square)

    try:
        run_passes(model, batches, sums, step, Passes(rounds=rounds, what="Importance"))
    finally:
        tapped.remove()
    return sums.importance(reduce)


def important_parts(
    importance: Importance, student: PreTrainedConfig, teacher: PreTrainedConfig, layers: list[int]
) -> Parts:
    """Return the parts of a teacher with the largest importance, for a student of sizes that `check_sizes` allows.

    Narrower heads: with rotary positions, queries and keys take the pairs of features whose frequencies are nearest to
    those of the student's heads, because another pair would see positions at another scale; else they take the features
    with the largest share in the attention scores. Values take those with the largest outputs.

    A norm divides by the size of its input, which changes with the channels that are left. Its weight is multiplied by
    what that changes on average.
    """
    sizes, whole = shape_of(student), shape_of(teacher)
    # Query heads that share keys and values go together, so a group is worth the sum of its heads.
    grouped = (sizes.num_layers, whole.num_kv_heads, -1)
    groups_LG = largest(importance.heads_LH[layers].reshape(grouped).sum(-1), sizes.num_kv_heads)

    def of_groups(values_LGD: Tensor) -> Tensor:
        return values_LGD.gather(1, groups_LG[..., None].expand(-1, -1, values_LGD.shape[-1]))

    if has_rotary(teacher):
        # Pair i of D turns at the frequency base^(-2i/D), so pair j of D' is nearest to i = j D / D'.
        pairs = (torch.arange(sizes.head_dim // 2) * whole.head_dim / sizes.head_dim).round().long()
        # The second feature of a pair is half a head behind the first.
        matched_LGD = torch.cat([pairs, whole.head_dim // 2 + pairs]).expand(*groups_LG.shape, -1)
    else:
        assert importance.scores_LGD is not None
        matched_LGD = largest(of_groups(importance.scores_LGD[layers]), sizes.head_dim)
    contexts_LGD = importance.contexts_LHD[layers].reshape(*grouped, whole.head_dim).sum(2)
    family, used = family_of(teacher), {None, *layers}
    norms = [values for name, values in importance.norms.items() if split_name(name, family)[0] in used]
    hidden_W = largest(torch.stack(norms).sum(0), sizes.hidden_size)
    return Parts(
        layers=layers,
        hidden_W=hidden_W,
        groups_LG=groups_LG,
        matched_LGD=matched_LGD,
        values_LGD=largest(of_groups(contexts_LGD), sizes.head_dim),
        neurons_LF=largest(importance.neurons_LF[layers], sizes.intermediate_size),
        norm_factors={
            name: float((values[hidden_W].mean() / values.mean()).sqrt())
            for name, values in importance.spreads.items()
            if len(hidden_W) < len(values) and values[hidden_W].any()
        },
    )


class _Sums(HookSums):
    """Adds up functions of activations over real tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model.device)
        self._model = model
        self._sums: dict[str, Tensor] = {}
        self.handles = _hooks(model, self)

    def add(self, name: str, values: Tensor, of: Callable[[Tensor], Tensor] = torch.abs) -> None:
        """Add a function of the values (B, T, ...), which it gets as (N, ...) in fp32."""
        # fp32 first, because a square may be too large for fp16; fp64 for the sum over all tokens of the data.
        total = of(values.detach()[self.mask].float()).sum(0, dtype=torch.float64)
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def importance(self, reduce: Callable[[Tensor], object] | None) -> Importance:
        """Return the means over the tokens of all ranks."""
        if reduce is not None:
            for total in (self.tokens, *self._sums.values()):
                reduce(total)
        tokens = self.count_tokens((f"the activations of {name}", total.sum()) for name, total in self._sums.items())
        means = {name: (total / self.tokens).cpu() for name, total in self._sums.items()}

        def all_layers(what: str) -> Tensor:
            return torch.stack([means[f"{what} {layer}"] for layer in range(len(layers_of(self._model)))])

        def of_norms(what: str) -> dict[str, Tensor]:
            return {name.partition(" ")[2]: mean for name, mean in means.items() if name.startswith(f"{what} ")}

        scores_LGD = None
        if not has_rotary(self._model.config):
            kv_heads = shape_of(self._model.config).num_kv_heads
            # (L, H, D) -> (L, G, D): a key is read by all query heads of its group.
            query_LGD = all_layers("query").unflatten(1, (kv_heads, -1)).sum(2)
            scores_LGD = (query_LGD * all_layers("key")).sqrt()
        return Importance(
            norms=of_norms("norm"),
            spreads=of_norms("spread"),
            heads_LH=all_layers("heads"),
            contexts_LHD=all_layers("contexts"),
            scores_LGD=scores_LGD,
            neurons_LF=all_layers("neurons"),
            influence_L=all_layers("influence"),
            tokens=tokens,
        )


def _hooks(model: PreTrainedModel, sums: _Sums) -> list[RemovableHandle]:
    """Hooks that add up what the norms, heads, feed-forward parts and layers of a model read and return."""
    family, sizes, handles = family_of(model.config), shape_of(model.config), []
    assert family.layer_axes is not None, "a student of this architecture has no shape of its own"

    def of_norm(name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        centered = args[0] - args[0].mean(-1, keepdim=True) if isinstance(module, nn.LayerNorm) else args[0]
        sums.add(f"norm {name}", output)
        sums.add(f"spread {name}", centered, torch.square)

    def of_output_projection(layer: int, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        heads = args[0].unflatten(-1, (sizes.num_heads, sizes.head_dim))
        sums.add(f"heads {layer}", heads, lambda x: x.norm(dim=-1))
        sums.add(f"contexts {layer}", heads)

    def of_down(layer: int, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        sums.add(f"neurons {layer}", args[0])

    def of_layer(layer: int, _: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        # (B, T, 2, W): in one tensor, so that the mask of tokens selects from both
        both = torch.stack([args[0], output[0] if isinstance(output, tuple) else output], 2)
        sums.add(f"influence {layer}", both, lambda x: 1 - torch.cosine_similarity(x[:, 0], x[:, 1], dim=-1))

    for name, module in model.named_modules():
        layer, inner = split_name(base_name(model, name), family)
        weight = getattr(module, "weight", None)
        shape = getattr(weight, "ds_shape", getattr(weight, "shape", ()))  # ds_shape: ZeRO-3 shards it
        is_norm = len(shape) == 1
        # Norms with axes of their own are within heads, not on the residual stream.
        if is_norm and (layer is None or inner not in family.layer_axes):
            handles.append(module.register_forward_hook(partial(of_norm, base_name(model, name))))
    for layer, block in enumerate(layers_of(model)):
        # The output projection, whose input is the output of all heads
        outwards = next(name for name, axes in family.layer_axes.items() if axes[-1] == "context")
        handles.append(block.get_submodule(outwards).register_forward_pre_hook(partial(of_output_projection, layer)))
        handles.append(block.get_submodule(family.ffn_down).register_forward_pre_hook(partial(of_down, layer)))
        handles.append(block.register_forward_hook(partial(of_layer, layer)))
    return handles
