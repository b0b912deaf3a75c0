"""The language-model head, run only on the tokens that predict a label, and without making their logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from llmdistill.batch import HeadInputs
from llmdistill.models.families import family_of


class LMHead:
    """A model's language-model head, whose last linear (to the vocabulary) can be taken over.

    Outside `taken_over()` the model is as it was. It acts inside the head's own modules, where ZeRO-3 has gathered
    their parameters and hangs its hooks on whatever comes out, so that they are there in the backward pass as well.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the head of a model, if it has one."""
        self._rows_N: Tensor | None = None
        self._use: Callable[[HeadInputs], Tensor] | None = None
        self._last = _last_linear(model)
        if self._last is not None:
            entry = model.get_submodule(family_of(model.config).lm_head)
            self._handle = entry.register_forward_pre_hook(self._gather)
            # An attribute of the instance: DeepSpeed's and peft's hooks around the call stay where they are.
            self._plain = self._last.forward
            self._last.forward = self._forward  # type: ignore[method-assign, assignment]

    @property
    def is_there(self) -> bool:
        """Whether the model has such a head."""
        return self._last is not None

    @contextmanager
    def taken_over(self, rows_N: Tensor, use: Callable[[HeadInputs], Tensor] | None) -> Iterator[None]:
        """Run the head on some rows only, and have something else done in place of its last product.

        Args:
            rows_N: (N,) int64, the flat positions (b·T + t) that go through the head.
            use: what becomes of them in place of the logits; its result stands where the logits would. None multiplies.
        """
        self._rows_N, self._use = rows_N, use
        try:
            yield
        finally:
            self._rows_N = self._use = None

    def remove(self) -> None:
        """Leave the head as it was found; this object is of no use afterwards."""
        if self._last is not None:
            self._handle.remove()
            del self._last.forward  # the class's own shows again

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
    """Inside, a head's parameters are there as a whole, even if ZeRO-3 keeps a share of them on each rank."""
    sharded = [each for each in (head.weight, head.bias) if each is not None and hasattr(each, "ds_id")]
    if not sharded:
        return nullcontext()
    import deepspeed

    return cast("AbstractContextManager[Any]", deepspeed.zero.GatheredParameters(sharded))


def _last_linear(model: PreTrainedModel) -> nn.Linear | None:
    """The head itself, or the second of a factorised head's two linears."""
    head = model.get_output_embeddings()
    if head is None:
        return None
    last = [module for module in head.modules() if not list(module.children())][-1]
    assert type(last) is nn.Linear, f"a head that ends in a {type(last).__name__} multiplies in a way of its own"
    return last
