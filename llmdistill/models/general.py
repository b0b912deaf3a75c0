"""Properties of a model of any architecture that transformers loads, without an entry in `families`."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from llmdistill.errors import UserError
from llmdistill.memo import cached_by

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


def causal_by_classes(config: PreTrainedConfig) -> bool:
    """Return whether a model is a decoder, by the classes that transformers has for its architecture.

    Raises UserError if the model reads more than text, or has an encoder beside a decoder, or if transformers has no
    class with an LM head for it.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    name = config.model_type
    if config.is_encoder_decoder:
        raise UserError(f"{name} has an encoder beside its decoder, which is not supported: take a model of one kind")
    try:
        text = config.get_text_config()
    except ValueError:  # MusicGen has a text encoder and a decoder of sounds
        raise UserError(f"{name} has several models of text, which is not supported: take one of them alone") from None
    if text is not config:
        raise UserError(
            f"{name} reads more than text: take its language model alone, which scripts/examples/"
            "language_model_alone.py of a checkout saves as a model of its own"
        )
    causal, masked = (name in names for names in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES))
    if not causal and not masked:
        raise UserError(f"transformers has no class with a language-model head for {name}: take another architecture")
    return bool(getattr(config, "is_decoder", False)) if causal and masked else causal


def layer_values(config: PreTrainedConfig, name: str) -> list[Any]:
    """Return the values of a setting: one for all layers, or one per layer where they differ (Gemma 4).

    The value is None if the config lacks the setting.
    """
    try:
        return [getattr(config, name, None)]
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError of newer transformers
        return [getattr(layer, name, None) for layer in cast(Any, config).per_layer_config]


def find_layers(model: PreTrainedModel) -> str:
    """Return the name, within the base model, of its longest list of blocks, ignoring lists within another list.

    The blocks may be of several kinds (Jamba's have attention or a state space). Raises UserError if there is no list.
    """
    from torch import nn

    lists: dict[str, int] = {}
    for name, module in model.base_model.named_modules():
        # Funnel's layers are in a list of lists.
        is_list = isinstance(module, nn.ModuleList) and any(not isinstance(block, nn.ModuleList) for block in module)
        if is_list and not any(name.startswith(f"{outer}.") for outer in lists):
            lists[name] = len(module)
    if not lists:
        raise UserError(
            f"{type(model).__name__} has no list of layers, which every supported architecture has: give another model"
        )
    return max(lists, key=lambda name: lists[name])


def cache_argument(model: PreTrainedModel) -> str | None:
    """Return the argument by which a model takes the keys and values of earlier tokens, or None (DistilBERT)."""
    parameters = inspect.signature(model.base_model.forward).parameters
    # transformers 5.24 renamed past_key_values.
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


@cached_by(lambda config: (type(config), json.dumps(config.to_dict(), sort_keys=True, default=str)))
def position_after_padding(config: PreTrainedConfig) -> int:
    """Return the position id of the first token, which is not 0 where a row of the position table is for padding.

    As in RoBERTa, the position ids of ESM, Longformer, LUKE and XLM-RoBERTa-XL count from the padding token's.
    """
    import torch
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    try:
        with torch.device("meta"):
            # A copy of the config, as the model may change its own.
            # Not from_config, which ZeRO-3 makes shard the model.
            model = cast(Any, MODEL_MAPPING[type(config)])(copy.deepcopy(config))
    except Exception:  # of any architecture
        return 0
    for name, module in model.named_modules():
        padding, table = (getattr(module, key, None) for key in ("padding_idx", "weight"))
        rows = getattr(config, "max_position_embeddings", None)
        if "position" in name and padding is not None and table is not None and len(table) == rows:
            return int(padding) + 1
    return 0


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear that can be factorized: nn.Linear, Conv1D, or a subclass like them.

    A subclass with its own forward method (Falcon's is plain, a router's returns more, a quantized one rounds) is tried
    on a small matrix.
    """
    import torch
    from torch import nn
    from torch.nn import functional
    from transformers.pytorch_utils import Conv1D

    if type(module) is Conv1D or type(module).forward is nn.Linear.forward:
        return isinstance(module, Conv1D) or list(dict(module.named_parameters())) in (["weight"], ["weight", "bias"])
    if not isinstance(module, nn.Linear):
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=generator, device="cpu") for size in ((2, 3), (5, 3), (5,)))
    # A shallow copy with a tiny matrix: the trial costs nothing, and also works for a module on the meta device.
    trial = copy.copy(module)
    vars(trial).update(_parameters={"weight": weight, "bias": None if module.bias is None else bias})
    trial.in_features, trial.out_features = 3, 5
    try:
        with torch.no_grad():
            y: Any = trial.forward(x)
        return torch.allclose(y, functional.linear(x, weight, trial.bias))
    except Exception:  # what it does to its own matrix does not fit another one
        return False


def in_lists(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Return the modules in any nn.ModuleList of the base, which are the layers', with their names in the model."""
    from torch import nn

    base = model.base_model
    lists = tuple(f"{name}." for name, module in base.named_modules() if isinstance(module, nn.ModuleList))
    prefix = "" if base is model else f"{model.base_model_prefix}."
    return ((prefix + name, module) for name, module in base.named_modules() if name.startswith(lists))
