"""The LM head of a model, which runs only on the tokens that predict a label."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.batch import HeadInputs, LogitScale
from llmdistill.models.families import family_of, has_family
from llmdistill.models.rounding import dequantized


class LMHead:
    """The LM head of a model, whose last linear (to the vocabulary) can be watched or replaced.

    Outside `replaced()` the model behaves as before. The replacement runs inside the head's own modules: there ZeRO-3
    has gathered their parameters, and its hooks on the outputs gather them again in the backward pass.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the LM head of a model, if it has one, and hook into it."""
        self._rows_N: Tensor | None = None
        self._replacement: Callable[[HeadInputs], Tensor] | None = None
        self._result: Tensor | None = None
        self.scale = logit_scale(model.config)
        self._last = _find_last_linear(model)
        if self._last is not None:
            config = model.config
            # BERT's head begins with a dense layer before its last linear, which sees the chosen rows alone too.
            entry = model.get_submodule(family_of(config).lm_head) if has_family(config) else self._last
            self._handle = entry.register_forward_pre_hook(self._select_rows)
            # Set on the instance, so that the hooks of DeepSpeed and peft around the call remain.
            self._plain_forward, self._had_own_forward = self._last.forward, "forward" in vars(self._last)
            self._last.forward = self._forward  # type: ignore[method-assign, assignment]

    @property
    def is_there(self) -> bool:
        """Whether the model has an LM head."""
        return self._last is not None

    @contextmanager
    def replaced(self, rows_N: Tensor, replacement: Callable[[HeadInputs], Tensor] | None) -> Iterator[None]:
        """Run the LM head on some rows only, given by their (N,) flat positions b·T + t in int64.

        The result of `replacement` on the inputs of the last linear replaces the logits; None computes the logits.
        """
        self._rows_N, self._replacement = rows_N, replacement
        try:
            yield
        finally:
            self._rows_N = self._replacement = None

    def restore(self, output: Tensor) -> Tensor:
        """Return the scalar that the replacement gave, from the model's output, which the model may have scaled.

        The result depends on the output, from which ZeRO-3 gathers parameters in the backward pass.
        """
        if self.scale.is_plain:
            return output
        # The graph is not held any longer.
        result, self._result = self._result, None
        assert result is not None, "the head was not replaced"
        return result + 0.0 * output

    @contextmanager
    def watched(self) -> Iterator[list[Tensor]]:
        """Yield a list to which the outputs of the last linear are added within this block."""
        outputs: list[Tensor] = []
        handle = (
            None if self._last is None else self._last.register_forward_hook(lambda *call: outputs.append(call[-1]))
        )
        try:
            yield outputs
        finally:
            if handle is not None:
                handle.remove()

    def remove(self) -> None:
        """Restore the LM head; this object cannot be used afterwards."""
        if self._last is not None:
            self._handle.remove()
            if self._had_own_forward:  # a student that is scored during its training already has an LMHead
                self._last.forward = self._plain_forward  # type: ignore[method-assign]
            else:
                del self._last.forward  # the forward method of the class applies again

    def _select_rows(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._rows_N is None:
            return None
        hidden_BTW, *rest = args
        # (1, N, W), because a head expects a batch.
        return (hidden_BTW.flatten(0, 1).index_select(0, self._rows_N)[None], *rest)

    def _forward(self, rows_1NK: Tensor) -> Tensor:
        if self._replacement is None:
            return cast(Tensor, self._plain_forward(rows_1NK))
        assert self._last is not None
        result = self._replacement(HeadInputs(rows_1NK[0], dequantized(self._last.weight), self._last.bias, self.scale))
        self._result = None if self.scale.is_plain else result
        return result


def lm_head_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the parameters of the matrix in `HeadInputs`, the last one of the LM head; none without an LM head."""
    last = _find_last_linear(model)
    return [] if last is None else list(last.parameters())


def logit_scale(config: PreTrainedConfig) -> LogitScale:
    """Return what a model does to the output of its LM head; see `step.own_loss` for others."""
    factor = 1.0
    if config.model_type.startswith("granite"):
        factor = 1 / getattr(config, "logits_scaling", 1.0)
    elif config.model_type.startswith("cohere"):
        factor = getattr(config, "logit_scale", 1.0)
    return LogitScale(factor, getattr(config, "final_logit_softcapping", None) or None)


def _find_last_linear(model: PreTrainedModel) -> nn.Linear | None:
    """Find the last linear of the LM head: the head itself, or the second of the two linears of a factorized head."""
    head = model.get_output_embeddings()
    if head is None:
        return None
    last = [module for module in head.modules() if not list(module.children())][-1]
    return last if type(last) is nn.Linear else None  # any other multiplies in a way of its own
