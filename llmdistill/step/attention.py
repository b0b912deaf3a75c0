"""The attention function that is registered in transformers, and its two applications: a tap and a mask mode."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from llmdistill.batch import Sequences
from llmdistill.errors import UserError
from llmdistill.internals.transformers_names import attention_implementation, set_attention
from llmdistill.models.families import family_of, layers_of
from llmdistill.step.packed import packed_attention

ATTENTION_NAME = "llmdistill_taps"
"""Name under which the tapping attention function is registered in transformers."""

GIVEN_MASK = "llmdistill_given_mask"
"""Name under which the same function is registered without a mask function. transformers then passes on the mask among
its arguments, or none, and does not read the values of masks and position ids, for which the host would wait."""

_SINK = "_llmdistill_sink"
"""Attribute of a tapped attention module that holds the recording function, so that both have the same lifetime."""


class AttentionTap:
    """Passes the queries, keys and values of a model's attention modules to a function.

    The model's attention function is replaced by one that does so and then calls the stock sdpa function, so the
    outputs stay bit-equal.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Collection[int],
        record: Callable[[int, Tensor, Tensor, Tensor, float], None],
    ) -> None:
        """Tap these layers: `record` gets the layer, query, key, value and the factor on query·key before the softmax.

        Raises UserError if the attention implementation is not sdpa.
        """
        implementation = attention_implementation(model)
        if implementation not in ("sdpa", ATTENTION_NAME):
            raise UserError(
                f"attention implementation {implementation!r} cannot be tapped: load the model with "
                'attn_implementation="sdpa"'
            )
        AttentionInterface.register(ATTENTION_NAME, _tapping_attention)
        AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)  # transformers makes no mask for an unknown name
        self._model, self._previous = model, implementation
        self._modules: list[nn.Module] = []
        for layer in sorted(layers):
            module = layers_of(model)[layer].get_submodule(family_of(model.config).attention)
            if hasattr(module, _SINK):
                raise UserError("the model is tapped already: call remove() of the other DistillationLoss or recorder")
            setattr(module, _SINK, partial(record, layer))
            self._modules.append(module)
        model.set_attn_implementation(ATTENTION_NAME)

    def remove(self) -> None:
        """Restore the attention implementation."""
        for module in self._modules:
            delattr(module, _SINK)
        self._model.set_attn_implementation(self._previous)


class MaskMode:
    """Switches a model between the attention mask that transformers makes and the mask among its arguments."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Leave the model as it is."""
        self._model = model
        self._own: str | None = None
        """The attention implementation to return to."""
        self.is_given = False
        """Whether the next forward pass uses the mask among its arguments."""

    def use_given(self) -> None:
        """Use the mask among the model's arguments, or none, from now on."""
        AttentionInterface.register(GIVEN_MASK, _tapping_attention)
        # After a pass whose layers are computed again the model still has GIVEN_MASK.
        self._own = self._own or attention_implementation(self._model)
        # Written to the config: set_attn_implementation walks all modules, and this runs in every step.
        set_attention(self._model, GIVEN_MASK)
        self.is_given = True

    def restore(self) -> None:
        """Use the mask that transformers makes again."""
        self.is_given = False
        if self._own is not None:
            set_attention(self._model, self._own)
            self._own = None


def _tapping_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sequences: Sequences | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Pass query (B, H, T, D), key and value (B, G, T, D) to the module's tap, if any, and compute the attention.

    With `sequences` tokens attend within their sequences, else the stock sdpa function is called.
    """
    sink = cast("Callable[[Tensor, Tensor, Tensor, float], None] | None", getattr(module, _SINK, None))
    if sink is not None:
        # Without a factor of its own a model gets that of sdpa, D^-0.5.
        sink(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling)
    if sequences is not None:
        return packed_attention(module, query, key, value, sequences, scaling=scaling, **kwargs)
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
