"""Taps: records inner tensors of a forward pass without changing the model's modules.

They come from the attention function (`AttentionTap`) and from forward hooks (`hook_modules`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from llmdistill.attention_mask import AttentionMask
from llmdistill.batch import Aspect, TapRequest, Taps
from llmdistill.errors import UserError
from llmdistill.internals.transformers_names import checkpointing_function
from llmdistill.losses.terms import Tap
from llmdistill.models.families import family_of, layers_of, shape_of
from llmdistill.step.attention import AttentionTap, MaskMode
from llmdistill.step.hooks import ATTENTION_ASPECTS, hook_modules


class Collected(NamedTuple):
    """A tensor that was tapped while a compiled part of the model ran."""

    aspect: Aspect
    layer: int
    tensor: Tensor
    scaling: float | None
    """Factor on query·key before the softmax, for queries; None for other aspects."""


class Recording(NamedTuple):
    """The arguments of a block of `Recorder.recording` for the forward passes inside it."""

    on_tap: Callable[[Taps, Tap], None] | None
    mask: AttentionMask | None


@dataclass
class ForwardPass:
    """One forward pass of the whole model, and what has been recorded of it."""

    rows: torch.Size | None
    """The shape of the token ids, (B, T)."""
    recomputes: bool
    """Whether layers are computed again in the backward pass."""
    recording: Recording | None
    taps: Taps | None
    """None if the pass is not recorded, and once `pop_taps` has returned the taps."""
    arrived: set[Tap] = field(default_factory=set)
    """The taps that were recorded; a loss may have removed their tensors since."""
    is_running: bool = True


class Recorder:
    """Records the requested inner tensors of a model's forward pass.

    The recorder is active only inside `recording()`, and only during a forward pass of the whole model. So generation
    and validation record nothing, nor do layers that activation checkpointing recomputes in the backward pass: the
    recomputed tensors must not replace the first ones, which a loss may already have used (see `recording`):

        recorder = Recorder(model, {"query": frozenset({0, 1}), "hidden": frozenset({3})})
        with recorder.recording():
            logits = model(**inputs).logits
        taps = recorder.pop_taps()

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
        self._recomputes = recomputes
        self._recording: Recording | None = None
        self._forward: ForwardPass | None = None
        self._collected: list[Collected] | None = None
        # A layer that runs its feed-forward part in chunks calls each module several times, and a tap expects one call.
        feed_forward = [aspect for aspect in self._request if aspect.startswith("ffn_")]
        if feed_forward and getattr(model.config, "chunk_size_feed_forward", None):
            raise UserError(
                "config.json: chunk_size_feed_forward cuts the feed-forward layers into pieces, "
                f"which cannot be distilled ({feed_forward[0]}): set it to 0"
            )
        self._mask = MaskMode(model)
        self._attention: AttentionTap | None = None
        layers = frozenset[int]().union(*(self._request.get(aspect, frozenset()) for aspect in ATTENTION_ASPECTS))
        if layers and family_of(model.config).projections is None:
            self._attention = AttentionTap(model, layers, self._record_attention)
        self._hooks = hook_modules(model, self._request, self._record_output)
        self._hooks.append(model.register_forward_pre_hook(self._start_pass, with_kwargs=True))
        self._hooks.append(model.register_forward_hook(self._end_pass))

    @property
    def is_recording(self) -> bool:
        """Whether a `recording()` block is active."""
        return self._recording is not None

    def aspects_of(self, layer: int) -> frozenset[Aspect]:
        """Return the aspects that are recorded of a layer."""
        return frozenset(aspect for aspect, layers in self._request.items() if layer in layers)

    @contextmanager
    def recording(
        self, on_tap: Callable[[Taps, Tap], None] | None = None, *, mask: AttentionMask | None = None
    ) -> Iterator[None]:
        """Record the forward passes inside this block; `pop_taps` returns the taps of the last one.

        `on_tap` is called after each tensor is recorded; it may remove tensors from the taps. They keep `mask`, which
        is that of the batch.
        """
        self._recording = Recording(on_tap, mask)
        try:
            yield
        finally:
            self._recording = None
            self._end_pass()  # its hook does not run after an exception
            if self._forward is not None:
                # It holds the losses of the taps, with their graph, and a copy of the model would copy them.
                self._forward.recording = None

    @contextmanager
    def given_mask(self) -> Iterator[None]:
        """Within this block a forward pass uses the attention mask among its arguments: a (B, 1, T, T) mask, or none.

        Without a mask a decoder is causal, and attention runs on flash kernels with grouped queries; it stays within
        the `sequences` among the arguments. Layers that are recomputed in the backward pass still use it; the next
        forward pass outside of such a block does not.
        """
        self._mask.use_given()
        try:
            yield
        finally:
            self._mask.is_given = False
            if self._forward is None or not self._forward.recomputes:
                self._mask.restore()

    def collect(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[Collected]]:
        """Run a part of the model; return its result and the tapped tensors, which the caller passes to `record`.

        A compiled graph thus only returns its inner tensors, and the losses on them run outside the graph.
        """
        collected: list[Collected] = []
        self._collected = collected
        result = run(*args, **kwargs)
        self._collected = None
        return result, collected

    def record(self, collected: list[Collected]) -> None:
        """Record the tensors from `collect` as if they were tapped now."""
        forward = self._forward
        if forward is None or forward.taps is None or not forward.is_running:
            return
        taps = forward.taps
        for aspect, layer, tensor, scaling in collected:
            assert (aspect, layer) not in forward.arrived, f"{aspect} of layer {layer} came twice in one forward pass"
            forward.arrived.add((aspect, layer))
            if scaling is not None:
                taps.scaling[layer] = scaling
            getattr(taps, aspect)[layer] = tensor
            # The computation below is not repeated when a checkpointed layer is recomputed, so its saved tensors must
            # be kept: the identity hooks replace the hooks of checkpointing.
            with saved_tensors_hooks(lambda saved: saved, lambda saved: saved) if forward.recomputes else nullcontext():
                if aspect in self._projectors:
                    # concatenate the heads: (B, G, T, D) to (B, T, G·D)
                    flat = tensor.transpose(1, 2).flatten(2) if tensor.dim() == 4 else tensor
                    taps.projected.setdefault(aspect, {})[layer] = self._projectors[aspect](flat)
                if forward.recording is not None and forward.recording.on_tap is not None:
                    forward.recording.on_tap(taps, (aspect, layer))

    def pop_taps(self) -> Taps:
        """Return the taps of the last recorded forward pass, and remove them from the recorder.

        Raises RuntimeError if no forward pass was recorded, or if a requested tensor is missing.
        """
        forward = self._forward
        if forward is None or forward.taps is None:
            raise RuntimeError("nothing was recorded: run the model inside `with recorder.recording():` first")
        for aspect, layers in self._request.items():
            missing = {layer for layer in layers if (aspect, layer) not in forward.arrived}
            if missing:
                raise RuntimeError(
                    f"no {aspect} came from layers {sorted(missing)}: the model's attention implementation or "
                    "modules were changed after the recorder was built"
                )
        taps, forward.taps = forward.taps, None
        return taps

    def remove(self) -> None:
        """Remove the taps and restore the attention implementation; the recorder cannot be used afterwards."""
        self._mask.restore()
        for hook in self._hooks:
            hook.remove()
        if self._attention is not None:
            self._attention.remove()
        self._forward = None

    def _start_pass(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if not self._mask.is_given:
            self._mask.restore()
        self._forward = ForwardPass(
            rows=tokens.shape if isinstance(tokens, Tensor) else None,
            recomputes=self._recomputes or (self.is_recording and self._is_checkpointed()),
            recording=self._recording,
            taps=None if self._recording is None else Taps(mask=self._recording.mask),
        )
        # An exception within `collect` leaves it set.
        self._collected = None

    def _end_pass(self, *_: object) -> None:
        if self._forward is not None:
            self._forward.is_running = False

    def _record_attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        tensors: dict[Aspect, Tensor] = {"query": query, "key": key, "value": value}
        for aspect, tensor in tensors.items():
            if layer in self._request.get(aspect, ()):
                self._record(Collected(aspect, layer, tensor, scaling if aspect == "query" else None))

    def _record_output(self, aspect: Aspect, layer: int, tensor: Tensor) -> None:
        forward = self._forward
        if aspect in ATTENTION_ASPECTS:
            # DeBERTa may project its distances by the same matrices, after tokens
            if forward is not None and (aspect, layer) in forward.arrived:
                return
            # (B, T, H·D) to (B, H, T, D)
            tensor = tensor.unflatten(-1, (-1, shape_of(self.model.config).head_dim)).transpose(1, 2)
        if tensor.dim() == 2 and forward is not None and forward.rows is not None:  # OPT flattens batch and tokens
            tensor = tensor.unflatten(0, forward.rows)
        self._record(Collected(aspect, layer, tensor, None))

    def _record(self, tapped: Collected) -> None:
        # While collecting, read no other state: a compiled graph is recompiled when a value that it reads changes.
        if self._collected is not None:
            self._collected.append(tapped)
        else:
            self.record([tapped])

    def _is_checkpointed(self) -> bool:
        """Whether activation checkpointing recomputes layers in the backward pass.

        Raises UserError if it is reentrant: it then runs the layers without an autograd graph, so the gradients of the
        taps would silently be lost.
        """
        layers = [layer for layer in layers_of(self.model) if getattr(layer, "gradient_checkpointing", False)]
        functions = [checkpointing_function(layer) for layer in layers if layer.training]
        # Checkpointing acts in training mode alone, and transformers sets the function on the layer itself.
        if not torch.is_grad_enabled() or not functions:
            return False
        if any(getattr(function, "keywords", {}).get("use_reentrant") is not False for function in functions):
            raise UserError(
                "activation checkpointing with use_reentrant=True loses the gradients of tapped tensors: "
                'enable it with {"use_reentrant": False}'
            )
        return True
