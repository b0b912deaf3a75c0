"""A model's forward pass as the trainer sees it: a batch in, logits and taps out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmdistill.batch import Batch, Outputs
from llmdistill.models.taps import Recorder


class TappedModel:
    """A forward pass whose inner tensors are kept.

    The forward pass is that of a DeepSpeed engine where there is one: training around the engine would lose its
    hooks. The recorder sits on the engine's module.
    """

    def __init__(self, forward: Callable[..., Any], recorder: Recorder, *, vocabulary: int | None = None) -> None:
        """`vocabulary` leaves out the logits beyond it: padding rows that another model does not have."""
        self._forward = forward
        self._recorder = recorder
        self._vocabulary = vocabulary

    def __call__(self, batch: Batch) -> Outputs:
        """Run the model on a batch."""
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        inputs["use_cache"] = False
        if batch.token_type_ids is not None:
            inputs["token_type_ids"] = batch.token_type_ids
        with self._recorder.recording():
            result = self._forward(**inputs)
        words, sequences = _head_outputs(result)
        return Outputs(
            logits=None if words is None else words[..., : self._vocabulary],
            taps=self._recorder.take(),
            sequence_logits=sequences,
            ends=tuple(value for value in result.values() if torch.is_tensor(value)),
        )


def _head_outputs(result: Any) -> tuple[Tensor | None, Tensor | None]:
    """Logits of words (B, T, V) and of sequences (B, C), by the names transformers gives them."""
    if "prediction_logits" in result:
        return result.prediction_logits, result.seq_relationship_logits
    logits = result.get("logits")
    if logits is None or logits.dim() == 3:
        return logits, None
    return None, logits
