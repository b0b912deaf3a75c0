"""Forward hooks on the modules of a model whose inputs or outputs are tapped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from llmdistill.batch import Aspect, TapRequest
from llmdistill.models.families import family_of, layers_of

ATTENTION_ASPECTS: tuple[Aspect, ...] = ("query", "key", "value")


def hook_modules(
    model: PreTrainedModel, request: TapRequest, record: Callable[[Aspect, int, Tensor], None]
) -> list[RemovableHandle]:
    """Pass the inner tensors of modules to `record`, with aspect and layer, whenever a module runs.

    These are feed-forward outputs, hidden states and embeddings, and queries, keys and values where a family names
    their projections. Elsewhere the attention function passes them on (`AttentionTap`).
    """
    handles = list[RemovableHandle]()

    def record_input(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record("embedding", 0, args[0] if args else kwargs["hidden_states"])

    def record_output(aspect: Aspect, layer: int, _module: nn.Module, _args: object, output: Any) -> None:
        # Some layers return their attention weights or router logits beside the hidden states.
        record(aspect, layer, output[0] if isinstance(output, tuple) else output)

    for aspect, layers in request.items():
        if aspect == "hidden":  # an architecture without a family has layers too
            hooked = {layer: partial(record_output, aspect, layer) for layer in sorted(layers)}
            handles += [layers_of(model)[layer].register_forward_hook(hook) for layer, hook in hooked.items()]
            continue
        family = family_of(model.config)
        if aspect == "embedding" and family.embedding is None:
            # No single module computes what the first layer reads.
            handles.append(layers_of(model)[0].register_forward_pre_hook(record_input, with_kwargs=True))
            continue
        if aspect in ATTENTION_ASPECTS and family.projections is None:
            continue
        for layer in sorted(layers):
            module: nn.Module = layers_of(model)[layer]
            if aspect == "embedding":
                assert family.embedding is not None
                module = model.base_model.get_submodule(family.embedding)
            elif aspect in ATTENTION_ASPECTS:
                assert family.projections is not None
                name = family.projections[ATTENTION_ASPECTS.index(aspect)]
                module = module.get_submodule(family.attention).get_submodule(name)
            else:  # a family names the modules of the feed-forward part as the aspects
                module = module.get_submodule(getattr(family, aspect))
            handles.append(module.register_forward_hook(partial(record_output, aspect, layer)))
    return handles
