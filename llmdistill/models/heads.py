"""Runs the LM head only on the tokens that predict a label, and can pass its inputs to a loss instead of the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from llmdistill.batch import HeadInputs
from llmdistill.models.families import family_of


class LMHead:
    """The LM head of a model, whose last linear (to the vocabulary) can be replaced.

    Outside `taken_over()` the model behaves as before. The replacement runs inside the head's own modules: there ZeRO-3
    has gathered their parameters, and its hooks on the outputs gather them again in the backward pass.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the LM head of a model, if it has one, and hook into it."""
        self._rows_N: Tensor | None = None
        self._use: Callable[[HeadInputs], Tensor] | None = None
        self._last = _last_linear(model)
        if self._last is not None:
            entry = model.get_submodule(family_of(model.config).lm_head)
            self._handle = entry.register_forward_pre_hook(self._gather)
            # Set on the instance, so that the hooks of DeepSpeed and peft around the call remain.
            self._plain = self._last.forward
            self._last.forward = self._forward  # type: ignore[method-assign, assignment]

    @property
    def is_there(self) -> bool:
        """Whether the model has an LM head."""
        return self._last is not None

    @contextmanager
    def taken_over(self, rows_N: Tensor, use: Callable[[HeadInputs], Tensor] | None) -> Iterator[None]:
        """Run the LM head on some rows only, given by their (N,) flat positions b·T + t in int64.

        The result of `use` on the inputs of the last linear replaces the logits; None computes the logits.
        """
        self._rows_N, self._use = rows_N, use
        try:
            yield
        finally:
            self._rows_N = self._use = None

    def remove(self) -> None:
        """Restore the LM head; this object cannot be used afterwards."""
        if self._last is not None:
            self._handle.remove()
            del self._last.forward  # the forward method of the class applies again

    def _gather(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._rows_N is None:
            return None
        hidden_BTW, *rest = args
        return (hidden_BTW.flatten(0, 1).index_select(0, self._rows_N)[None], *rest)

    def _forward(self, rows_1NK: Tensor) -> Tensor:
        if self._use is None:
            return cast(Tensor, self._plain(rows_1NK))
        assert self._last is not None
        return self._use(HeadInputs(rows_1NK[0], self._last.weight, self._last.bias))


def whole(head: HeadInputs) -> AbstractContextManager[Any]:
    """Context in which the parameters of an LM head are complete, even if ZeRO-3 shards them over the ranks."""
    sharded = [each for each in (head.weight, head.bias) if each is not None and hasattr(each, "ds_id")]
    if not sharded:
        return nullcontext()
    import deepspeed

    return cast("AbstractContextManager[Any]", deepspeed.zero.GatheredParameters(sharded))


def _last_linear(model: PreTrainedModel) -> nn.Linear | None:
    """The last linear of the LM head: the head itself, or the second of the two linears of a factorized head."""
    head = model.get_output_embeddings()
    if head is None:
        return None
    last = [module for module in head.modules() if not list(module.children())][-1]
    assert type(last) is nn.Linear, f"a head that ends in a {type(last).__name__} multiplies in a way of its own"
    return last
