"""Which keys each query of a batch sees: one mask from the batch to the losses on attention and their kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # batches are also described before torch is imported
    from torch import Tensor


@dataclass(frozen=True)
class AttentionMask:
    """Which keys each query sees. That of a batch says nothing of layers, which add `causal` and `window`.

    What follows from the tokens is computed once for all layers: beside the few operations of a loss it would count.
    """

    segments_BT: Tensor
    """(B, T) int: 0 at padding, elsewhere the number (from 1) of the token's sequence. A token sees only tokens with
    the same number."""
    causal: bool = False
    """If True, a token sees only itself and the tokens before it."""
    window: int | None = None
    """A token sees only the last `window` positions, including its own; None for no limit."""
    visible_until_BT: Tensor | None = None
    """(B, T) int: a token sees only the positions before this one; None for no limit."""

    @property
    def has_limits(self) -> bool:
        """Whether tokens have limits of their own, which neither padding nor the layer explains."""
        return self.visible_until_BT is not None

    @cached_property
    def real_BT(self) -> Tensor:
        """(B, T) bool: True at real tokens."""
        return self.segments_BT != 0

    @cached_property
    def count(self) -> Tensor:
        """The number of real tokens, on the device."""
        return self.real_BT.sum()

    @cached_property
    def is_one_segment(self) -> bool:
        """Whether there is no padding, and one sequence per row; False on a GPU, which the host would wait for."""
        return self.segments_BT.device.type == "cpu" and bool((self.segments_BT == 1).all())

    @cached_property
    def _of_layers(self) -> dict[tuple[bool, int | None], AttentionMask]:
        return {}

    def of_layer(self, *, causal: bool, window: int | None) -> AttentionMask:
        """Return the mask in a layer of this kind, the same for all of them."""
        if (causal, window) not in self._of_layers:
            self._of_layers[causal, window] = replace(self, causal=causal, window=window)
        return self._of_layers[causal, window]

    def of_sequences(self, sequences: slice) -> AttentionMask:
        """Return the mask of some rows of the batch."""
        if sequences == slice(0, len(self.segments_BT)):
            return self
        limits = None if self.visible_until_BT is None else self.visible_until_BT[sequences]
        return replace(self, segments_BT=self.segments_BT[sequences], visible_until_BT=limits)

    def dense(self) -> Tensor:
        """Return the mask of an encoder's layer as attention functions take it.

        Returns (B, 1, T, T), True where a query (third axis) sees a key. Padding sees all, so that its softmax is a
        number.
        """
        import torch

        assert not self.causal, "a causal layer needs no dense mask"
        assert self.window is None, "an encoder's windows are its own code's"
        real_BT = self.segments_BT != 0
        seen_BTT = (self.segments_BT[:, :, None] == self.segments_BT[:, None, :]) & real_BT[:, None, :]
        if self.visible_until_BT is not None:
            key_T = torch.arange(self.segments_BT.shape[1], device=self.segments_BT.device)
            seen_BTT = (key_T < self.visible_until_BT[:, :, None]) & seen_BTT
        return (seen_BTT | ~real_BT[:, :, None])[:, None]
