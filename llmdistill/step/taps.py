"""Taps: records inner tensors of a forward pass without changing the model's modules.

Queries, keys and values come from transformers' attention interface: the model's attention function is replaced by a
function that records them and then calls the stock sdpa function, so the outputs stay bit-equal. Feed-forward outputs
and hidden states come from forward hooks, and so do queries, keys and values where a family names their projections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from llmdistill.batch import Aspect, Sequences, TapRequest, Taps
from llmdistill.errors import UserError
from llmdistill.losses.terms import Tap
from llmdistill.models.families import family_of, layers_of, shape_of
from llmdistill.step.packed import packed_attention

ATTENTION_NAME = "llmdistill_taps"
"""Name under which the tapping attention function is registered in transformers."""

GIVEN_MASK = "llmdistill_given_mask"
"""Name under which the same function is registered without a mask function. transformers then passes on the mask that
it is given, or none, and does not look at the values of masks and position ids, for which the host would wait."""

_SINK = "_llmdistill_sink"
"""Attribute of a tapped attention module that holds the recording function, so that both have the same lifetime."""

_ATTENTION_ASPECTS: tuple[Aspect, ...] = ("query", "key", "value")


class Collected(NamedTuple):
    """A tensor that was tapped while a compiled part of the model ran."""

    aspect: Aspect
    layer: int
    tensor: Tensor
    scaling: float | None
    """Factor on query·key before the softmax, for queries; None for other aspects."""


class Recorder:
    """Records the requested inner tensors of a model's forward pass.

    The recorder is active only inside `recording()`, and only during a forward pass of the whole model. So generation
    and validation record nothing, nor do layers that activation checkpointing recomputes in the backward pass: the
    recomputed tensors must not replace the first ones, which a loss may already have used (see `recording`):

        recorder = Recorder(model, {"query": frozenset({0, 1}), "hidden": frozenset({3})})
        with recorder.recording():
            logits = model(**inputs).logits
        taps = recorder.take()

    Build the recorder when the modules are final: after factorization, and after `deepspeed.initialize`. The hooks of
    ZeRO-3 wrap the outputs of modules, so that their parameters are gathered in the backward pass, and the taps must
    record the wrapped outputs. For the same reason a loss under ZeRO-3 must also depend on the model's output, if only
    with weight 0.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        request: TapRequest,
        projectors: nn.ModuleDict | None = None,
        *,
        recomputes: bool = False,
    ) -> None:
        """Install the taps.

        Args:
            model: the model itself, not the engine around it; its attention implementation must be sdpa.
            request: the aspects to record, and for each aspect the layers (0-based); empty sets are allowed.
            projectors: aspect -> module that maps the tensors of this aspect to another width; one module for all
                layers. The projectors run inside the model's forward pass, where ZeRO-3 can gather their parameters.
            recomputes: layers may be computed again in the backward pass by other means than the model's own activation
                checkpointing.

        Raises UserError if the architecture is not supported, or if the attention implementation is not sdpa.
        """
        self.model = model
        self._request = {aspect: layers for aspect, layers in request.items() if layers}
        self._projectors = nn.ModuleDict() if projectors is None else projectors
        self.is_recording = False
        """Whether a `recording()` block is active."""
        self._in_forward = False
        self._recomputes = self._recomputes_always = recomputes
        self._offer: Callable[[Taps, Tap], None] | None = None
        self._visible_until: Tensor | None = None
        self._came: set[Tap] = set()
        self._places: torch.Size | None = None
        self._taps: Taps | None = None
        self._collected: list[Collected] | None = None
        self._handles: list[Any] = []
        self._tapped_attention: list[nn.Module] = []
        self._previous_attention: str | None = None
        self._masked_attention: str | None = None
        self._is_given_mask = False
        self._check_request()
        self._install_attention()
        self._install_hooks()

    @contextmanager
    def recording(
        self, offer: Callable[[Taps, Tap], None] | None = None, *, visible_until: Tensor | None = None
    ) -> Iterator[None]:
        """Record the forward passes inside this block; `take` returns the taps of the last one.

        `offer` is called after each tensor is recorded; it may remove tensors from the taps. They keep `visible_until`,
        which is that of the batch.
        """
        self.is_recording, self._offer, self._visible_until = True, offer, visible_until
        try:
            yield
        finally:
            self.is_recording = self._in_forward = False
            self._offer = self._visible_until = None

    @contextmanager
    def given_mask(self) -> Iterator[None]:
        """Block in which a forward pass uses the attention mask that it is given: a (B, 1, T, T) mask, or none.

        Without a mask a decoder is causal, and attention runs on flash kernels with grouped queries; it stays within
        the `sequences` that a forward pass is given. Layers that are recomputed in the backward pass find the same
        attention; the next forward pass outside of such a block does not.
        """
        AttentionInterface.register(GIVEN_MASK, _tapping_attention)
        self._masked_attention = self._masked_attention or self.model.config._attn_implementation
        self.model.config._attn_implementation = GIVEN_MASK
        self._is_given_mask = True
        try:
            yield
        finally:
            self._is_given_mask = False
            if not self._recomputes:
                self._restore_attention()

    def _restore_attention(self) -> None:
        if self._masked_attention is not None:
            self.model.config._attn_implementation = self._masked_attention
            self._masked_attention = None

    def collecting(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[Collected]]:
        """Run a part of the model; returns its result and the tapped tensors, which the caller passes to `keep`.

        This way a compiled graph only returns its inner tensors, and they are used outside the graph.
        """
        collected: list[Collected] = []
        self._collected = collected
        result = run(*args, **kwargs)
        self._collected = None
        return result, collected

    def keep(self, collected: list[Collected]) -> None:
        """Record the tensors from `collecting` as if they were tapped now."""
        for one in collected:
            self._keep(one)

    def take(self) -> Taps:
        """Return the taps of the last recorded forward pass, and remove them from the recorder.

        Raises RuntimeError if no forward pass was recorded, or if a requested tensor is missing.
        """
        taps, self._taps = self._taps, None
        if taps is None:
            raise RuntimeError("nothing was recorded: run the model inside `with recorder.recording():` first")
        for aspect, layers in self._request.items():
            missing = {layer for layer in layers if (aspect, layer) not in self._came}
            if missing:
                raise RuntimeError(
                    f"no {aspect} came from layers {sorted(missing)}: the model's attention implementation or "
                    "modules were changed after the recorder was built"
                )
        return taps

    def remove(self) -> None:
        """Remove the taps and restore the attention implementation; the recorder cannot be used afterwards."""
        self._restore_attention()
        for handle in self._handles:
            handle.remove()
        for module in self._tapped_attention:
            delattr(module, _SINK)
        if self._previous_attention is not None:
            self.model.set_attn_implementation(self._previous_attention)
        self._handles, self._tapped_attention, self._previous_attention, self._taps = [], [], None, None

    def _check_request(self) -> None:
        feed_forward = [aspect for aspect in self._request if aspect.startswith("ffn_")]
        if feed_forward and getattr(self.model.config, "chunk_size_feed_forward", None):
            raise UserError(
                "config.json: chunk_size_feed_forward cuts the feed-forward layers into pieces, "
                f"which cannot be distilled ({feed_forward[0]}): set it to 0"
            )

    def _install_attention(self) -> None:
        layers_wanted = frozenset[int]().union(*(self._request.get(a, frozenset()) for a in _ATTENTION_ASPECTS))
        if not layers_wanted or family_of(self.model.config).projections is not None:
            return
        implementation = self.model.config._attn_implementation
        if implementation not in ("sdpa", ATTENTION_NAME):
            raise UserError(
                f"attention implementation {implementation!r} cannot be tapped: load the model with "
                'attn_implementation="sdpa"'
            )
        AttentionInterface.register(ATTENTION_NAME, _tapping_attention)
        AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
        name = family_of(self.model.config).attention
        for index in sorted(layers_wanted):
            module = layers_of(self.model)[index].get_submodule(name)
            if hasattr(module, _SINK):
                raise UserError("the model is tapped already: call remove() of the other DistillationLoss or recorder")
            setattr(module, _SINK, partial(self._keep_attention, index))
            self._tapped_attention.append(module)
        self._previous_attention = implementation
        self.model.set_attn_implementation(ATTENTION_NAME)

    def _install_hooks(self) -> None:
        for aspect, layers in self._request.items():
            if aspect == "embedding" and family_of(self.model.config).embedding is None:
                hook = partial(self._keep_input, aspect)
                self._handles.append(layers_of(self.model)[0].register_forward_pre_hook(hook, with_kwargs=True))
            elif aspect not in _ATTENTION_ASPECTS or family_of(self.model.config).projections is not None:
                for index in sorted(layers):
                    hook = partial(self._keep_output, aspect, index)
                    self._handles.append(self._tapped_module(aspect, index).register_forward_hook(hook))
        self._handles.append(self.model.register_forward_pre_hook(self._start, with_kwargs=True))
        self._handles.append(self.model.register_forward_hook(self._end))

    def _tapped_module(self, aspect: Aspect, index: int) -> nn.Module:
        """The module whose output is tapped; a family names those of the feed-forward part as the aspects."""
        layer = layers_of(self.model)[index]
        if aspect == "hidden":
            return layer
        family = family_of(self.model.config)
        if aspect == "embedding":
            assert family.embedding is not None, "it has no module"
            return self.model.base_model.get_submodule(family.embedding)
        if aspect in _ATTENTION_ASPECTS:
            assert family.projections is not None, "the attention function gives it"
            name = family.projections[_ATTENTION_ASPECTS.index(aspect)]
            return layer.get_submodule(family.attention).get_submodule(name)
        return layer.get_submodule(getattr(family, aspect))

    def _start(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        self._places = tokens.shape if isinstance(tokens, Tensor) else None
        if not self._is_given_mask:
            self._restore_attention()
        if self.is_recording:
            self._recomputes = self._recomputes_always or self._is_checkpointed()
            self._taps, self._in_forward = Taps(visible_until=self._visible_until), True
            self._came, self._collected = set(), None

    def _end(self, *_: object) -> None:
        self._in_forward = False

    def _keep_attention(self, index: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        tensors: dict[Aspect, Tensor] = {"query": query, "key": key, "value": value}
        for aspect, tensor in tensors.items():
            if index in self._request.get(aspect, ()):
                self._offered(Collected(aspect, index, tensor, scaling if aspect == "query" else None))

    def _keep_output(self, aspect: Aspect, index: int, _module: nn.Module, _args: object, output: Any) -> None:
        tensor: Tensor = output[0] if isinstance(output, tuple) else output
        if aspect in _ATTENTION_ASPECTS:
            if (aspect, index) in self._came:  # DeBERTa may project its distances by the same matrices, after tokens
                return
            tensor = tensor.unflatten(-1, (-1, shape_of(self.model.config).head_dim)).transpose(1, 2)
        if tensor.dim() == 2 and self._places is not None:  # OPT flattens batch and tokens
            tensor = tensor.unflatten(0, self._places)
        self._offered(Collected(aspect, index, tensor, None))

    def _keep_input(self, aspect: Aspect, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._offered(Collected(aspect, 0, args[0] if args else kwargs["hidden_states"], None))

    def _offered(self, one: Collected) -> None:
        # While collecting, read no other state: a compiled graph is recompiled when a value that it reads changes.
        if self._collected is not None:
            self._collected.append(one)
        else:
            self._keep(one)

    def _keep(self, one: Collected) -> None:
        if not self._in_forward:
            return
        assert self._taps is not None
        aspect, index, tensor, scaling = one
        assert (aspect, index) not in self._came, f"{aspect} of layer {index} came twice in one forward pass"
        self._came.add((aspect, index))
        if scaling is not None:
            self._taps.scaling[index] = scaling
        getattr(self._taps, aspect)[index] = tensor
        # The computation below is not repeated when a checkpointed layer is recomputed, so its saved tensors must be
        # kept: the identity hooks replace the hooks of checkpointing.
        with saved_tensors_hooks(lambda kept: kept, lambda kept: kept) if self._recomputes else nullcontext():
            if aspect in self._projectors:
                # concatenate the heads: (B, G, T, D) to (B, T, G·D)
                flat = tensor.transpose(1, 2).flatten(2) if tensor.dim() == 4 else tensor
                self._taps.projected.setdefault(aspect, {})[index] = self._projectors[aspect](flat)
            if self._offer is not None:
                self._offer(self._taps, (aspect, index))

    def _is_checkpointed(self) -> bool:
        """Whether activation checkpointing recomputes layers in the backward pass.

        Raises UserError if it is reentrant: it then runs the layers without an autograd graph, so the gradients of the
        taps would silently be lost.
        """
        layers = [layer for layer in layers_of(self.model) if getattr(layer, "gradient_checkpointing", False)]
        functions = [getattr(layer, "_gradient_checkpointing_func", None) for layer in layers if layer.training]
        if not torch.is_grad_enabled() or not functions:
            return False
        if any(getattr(function, "keywords", {}).get("use_reentrant") is not False for function in functions):
            raise UserError(
                "activation checkpointing with use_reentrant=True loses the gradients of tapped tensors: "
                'enable it with {"use_reentrant": False}'
            )
        return True


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
    """Pass query (B, H, T, D), key and value (B, G, T, D) to the module's recorder, if any, and compute the attention.

    With `sequences` tokens attend within their sequences, else the stock sdpa function is called.
    """
    sink = cast("Callable[[Tensor, Tensor, Tensor, float], None] | None", getattr(module, _SINK, None))
    if sink is not None:
        sink(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling)
    if sequences is not None:
        return packed_attention(module, query, key, value, sequences, scaling=scaling, **kwargs)
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
