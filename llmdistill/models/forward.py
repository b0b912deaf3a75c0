"""A model's forward pass as the trainer sees it: a batch in, logits and taps out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
        with self._recorder.recording():
            result = self._forward(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
        return Outputs(logits=result.logits[..., : self._vocabulary], taps=self._recorder.take())
