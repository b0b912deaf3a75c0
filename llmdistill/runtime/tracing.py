"""The memory and the work of a computation, traced on the meta device: only shapes are computed, and no values."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import flop_registry

from llmdistill.internals.torch_names import (
    EFFICIENT_ATTENTION,
    EFFICIENT_ATTENTION_BACKWARD,
    FLASH_ATTENTION,
    FLASH_ATTENTION_BACKWARD,
    READ_SCALAR,
    TorchDispatchMode,
    operation_of,
    tree_iter,
)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What operations compute, read and write."""

    flops: float = 0.0
    """FLOP of matrix products, attention included."""
    product_bytes: float = 0.0
    """Bytes that the matrix products read and write."""
    other_bytes: float = 0.0
    """Bytes that all other operations read and write."""
    operations: float = 0.0
    """Number of operations, each of which a GPU is told to do by the CPU."""

    def plus(self, other: Work, times: float = 1.0) -> Work:
        """Add a multiple of other work."""
        return Work(
            flops=self.flops + times * other.flops,
            product_bytes=self.product_bytes + times * other.product_bytes,
            other_bytes=self.other_bytes + times * other.other_bytes,
            operations=self.operations + times * other.operations,
        )


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> float:
    # Scores and weighted values, at two FLOP for a multiplication with its addition.
    return 2.0 * query.shape[:3].numel() * key.shape[2] * (query.shape[3] + value.shape[3])


def _attention_backward_flops(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> float:
    # The scores again, and the gradients of weights, values, keys and queries.
    return 2.0 * query.shape[:3].numel() * key.shape[2] * (3 * query.shape[3] + 2 * value.shape[3])


_ATEN = torch.ops.aten
_PRODUCTS = {
    **flop_registry,
    _ATEN.addmm_: flop_registry[_ATEN.addmm],
    _ATEN.baddbmm_: flop_registry[_ATEN.baddbmm],
    # Before 2.12 torch's own formulas refuse keys and values of fewer heads than the queries.
    FLASH_ATTENTION: _attention_flops,
    EFFICIENT_ATTENTION: _attention_flops,
    FLASH_ATTENTION_BACKWARD: _attention_backward_flops,
    EFFICIENT_ATTENTION_BACKWARD: _attention_backward_flops,
}
"""Matrix product -> a function that counts its FLOP; torch leaves out those that add to a matrix in place."""


class Tracer(TorchDispatchMode):
    """Within its context, adds up the bytes of live tensors by part, and the work of all operations.

        tracer = Tracer()
        tracer.ignore(model.parameters())
        with tracer, on_gpu():
            with tracer.part("head"):
                ...
        tracer.take_peak()

    The bytes are those of the storages that the operations allocate: a view has none, and what is shared counts once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()
        """The work so far."""
        self.live: Counter[str] = Counter()
        """Bytes of the live tensors, by the part in which they were allocated."""
        self._part = "activations"
        self._peak: dict[str, int] = {}
        self._peak_bytes = -1
        self._bytes = 0
        self._known: dict[int, Any] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Within this context, new tensors belong to a part of this name."""
        before, self._part = self._part, name
        try:
            yield
        finally:
            self._part = before

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave out tensors that exist already."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[id(storage)] = storage  # kept, so that no other storage gets the same id

    def take_peak(self) -> Mapping[str, int]:
        """Return the bytes by part when most bytes were live since the last call, and start again from now."""
        peak = self._peak if self._peak_bytes >= self._bytes else dict(self.live)
        self._peak, self._peak_bytes = dict(self.live), self._bytes
        return peak

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run one operation and add what it allocates and does."""
        kwargs = kwargs or {}
        if func is READ_SCALAR and args[0].is_meta:
            # transformers asks whether a mask leaves out nothing: no, so that the mask is made and kept
            return False
        result = func(*args, **kwargs)
        for output in tree_iter(result):
            if isinstance(output, Tensor):
                self._add(output)
        if self._bytes > self._peak_bytes:
            self._peak, self._peak_bytes = dict(self.live), self._bytes
        if not func.is_view:
            self._count(func, args, kwargs, result)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        size, part = storage.nbytes(), self._part
        self._bytes += size
        self.live[part] += size
        self._known[key] = weakref.finalize(storage, self._remove, key, size, part)

    def _remove(self, key: int, size: int, part: str) -> None:
        del self._known[key]
        self._bytes -= size
        self.live[part] -= size

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        tensors = [value for value in tree_iter((args, kwargs, result)) if isinstance(value, Tensor)]
        # An expanded tensor is read once: its storage is smaller than its number of elements says.
        moved = sum(
            min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()) for tensor in tensors
        )
        formula = _PRODUCTS.get(operation_of(func))
        if formula is None:
            work = Work(other_bytes=moved, operations=1)
        else:
            work = Work(flops=formula(*args, **kwargs, out_val=result), product_bytes=moved, operations=1)
        self.work = self.work.plus(work)


@contextmanager
def on_gpu() -> Iterator[None]:
    """Within this context, attention on the meta device runs in the fused kernels that a GPU would take.

    Torch itself takes it apart there, into matrices of tokens x tokens that no GPU has.
    """
    stock = functional.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,  # both kernels read grouped keys as they are
    ) -> Tensor:
        if not query.is_meta:
            return stock(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if attn_mask is None:
            return FLASH_ATTENTION(query, key, value, dropout_p, is_causal, scale=scale)[0]
        # The kernel with a mask adds it to the scores, so it is a copy in the dtype of the queries.
        bias = attn_mask.to(query.dtype) if attn_mask.dtype == torch.bool else attn_mask
        bias = bias.expand(*query.shape[:3], key.shape[2])
        # True: with the log-sum-exp of the scores, which the backward pass reads.
        return EFFICIENT_ATTENTION(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = stock
