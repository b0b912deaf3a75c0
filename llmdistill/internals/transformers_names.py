"""What the package needs of transformers' private names.

Tried with transformers 5.23; `tests/unit/test_internals.py` says which name is gone. Nothing of
transformers is imported, so that the rooms that use this file decide when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def attention_implementation(model: Any) -> str:
    """Return the name of the attention implementation that a model runs."""
    return str(model.config._attn_implementation)


def set_attention(model: Any, name: str) -> None:
    """Let a model run an attention implementation from its next forward pass on, as each of two batches may need it.

    `set_attn_implementation` checks the name and all submodules each time.
    """
    model.config._attn_implementation = name


def set_experts(experts: Any, name: str) -> None:
    """Let a model run its experts by an implementation; `experts` shares the config of the model."""
    experts.config._experts_implementation = name


def mark_initialized(value: Any, initialized: bool = True) -> None:
    """Say whether transformers shall leave a module or parameter as it is when it initializes a model."""
    value._is_hf_initialized = initialized


def is_initialized(value: Any) -> bool:
    """Return whether `mark_initialized` said that a module or parameter is to be left as it is."""
    return bool(getattr(value, "_is_hf_initialized", False))


def weight_conversions(model: Any) -> list[Any] | None:
    """Return the conversions that save_pretrained reverts; None if the model has only those of its architecture."""
    conversions: list[Any] | None = getattr(model, "_weight_conversions", None)
    return conversions


def set_weight_conversions(model: Any, conversions: Sequence[Any]) -> None:
    """Replace the conversions that save_pretrained reverts."""
    model._weight_conversions = list(conversions)


def tied_weights(model: Any) -> dict[str, str]:
    """Return the ties that a model declares: the name of a weight, and that of the one it shares."""
    return dict(model._tied_weights_keys or {})


def set_tied_weights(model: Any, ties: dict[str, str]) -> None:
    """Declare other ties for this model than its class has."""
    model._tied_weights_keys = ties
    # transformers expands the names of the class when it makes a model, so these are expanded here.
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def leave_out_of_files(model: Any, names: Iterable[str]) -> None:
    """Let save_pretrained leave out tensors with these names."""
    model._keys_to_ignore_on_save = {*(model._keys_to_ignore_on_save or ()), *names}


def checkpointing_function(layer: Any) -> Any:
    """Return what recomputes the activations of a layer in the backward pass; None before checkpointing is on."""
    return getattr(layer, "_gradient_checkpointing_func", None)


def model_class(auto_class: Any, config: Any) -> Any:
    """Return the class that an auto class makes of a config."""
    return auto_class._model_mapping[type(config)]


def is_from_config(generation: Any) -> bool:
    """Return whether generation settings were made from a config.json, whose values may be defaults."""
    return bool(generation._from_model_config)
