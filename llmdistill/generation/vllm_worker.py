"""Extends the worker of a vLLM server by methods that take the weights of a student in training.

vLLM loads this module by its option --worker-extension-cls, and nothing else does: it needs vLLM.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


class StudentWeights:
    """Joins the class of the worker, which has the methods that are only declared here."""

    reload_weights: Any
    get_model: Any
    stamp: str | None = None

    def take_weights(self, folder: str, stamp: str) -> None:
        """Load the weights in a folder, of a model with the shapes of the one that is served."""
        self.reload_weights(weights_path=folder)
        for module in self.get_model().modules():
            # On a CPU vLLM packs the LM head. It packs it again only if the folder has a separate weight for it, which
            # is not the case if the head is tied to the embedding.
            if isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)
        self.stamp = stamp

    def weights_stamp(self) -> str | None:
        """Return the stamp that came with the last weights; None before the first."""
        return self.stamp
