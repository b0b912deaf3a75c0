"""Configs that somebody else wrote: which sizes no model has, and which key is at fault where no model can be built."""

from __future__ import annotations

import copy
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeGuard, cast

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoQuantizationConfig

from llmdistill.errors import UserError
from llmdistill.models.families import is_causal
from llmdistill.models.general import layer_values

_MOST_PARTS = 16_384  # the experts of Doge
"""Layers, experts or groups of a model. Each is a module, so that a larger number would be built for minutes."""
_USUAL_LAYERS = 200
"""Layers that are built faster than the headers of large models are read."""
_PARTS = re.compile(r"(^|_)(layers?|experts?|groups?|blocks?)$")
_DROPOUTS = re.compile(r"(dropout|pdrop|dropout_prob)$")
_CHOICES = re.compile(r"(experts_per_tok|top_k_experts|moe_top_?k|moe_k|n_group|topk_group)$")
"""How many experts a token gets, into how many groups the experts are divided, and how many of the groups count."""
_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "moe_intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "head_dim"),
)
_SECONDS = 3.0
"""For how long the key at fault is looked for."""
_Path = tuple[Any, ...]
_REMEDY = "take the config.json that belongs to the weights"


def check_parts(values: Mapping[str, Any], file: str | Path) -> None:
    """Raise a UserError for so many layers, experts or groups that building the model would take hours.

    `values` are those of a config, or of its file before a config is made of it.
    """
    for path, value in _walk_values(values):
        if _PARTS.search(str(path[-1])) and _is_number(value) and value > _MOST_PARTS:
            raise _value_error(file, ".".join(map(str, path)), value, f"more than {_MOST_PARTS:,}")


def check_values(config: PreTrainedConfig, folder: Path | None = None) -> None:
    """Raise a UserError for a value of a config that its key cannot have, and that transformers would use only later.

    Checked are numbers of modules that take hours to build, choices of more experts than there are, sizes, dropouts,
    windows, scales, dtype and quantization. With the `folder` of the weights, there is at least one for each layer.
    """
    file, defaults, places = _config_file(config), _default_values(config), dict(_walk_values(config.to_dict()))
    check_parts(config.to_dict(), file)
    for path, value in places.items():
        key, name = ".".join(map(str, path)), str(path[-1])
        number = _is_number(value)
        if folder is not None and re.search(r"layers?$", name) and number and value > _USUAL_LAYERS:
            weights = len(header(folder))
            if 0 < weights < value:
                raise _value_error(file, key, value, f"more than the {weights} weights beside it")
        if _CHOICES.search(name) and (number or (value is None and defaults.get(path) is not None)):
            # How many experts, or groups of them, this key chooses among; 0 if no other key tells.
            counted = "n_group" if name == "topk_group" else "experts"
            beside = {other[-1]: n for other, n in places.items() if other[:-1] == path[:-1] and other != path}
            most = max((n for other, n in beside.items() if str(other).endswith(counted) and type(n) is int), default=0)
            if most == 1 and counted == "experts":
                most = 0  # a single expert may be a plain layer (Jamba)
            fits = type(value) is int and 1 <= value <= most and (name != "n_group" or most % value == 0)
            if most > 0 and not fits:
                what = f"no divisor of {most} experts" if name == "n_group" else f"no number from 1 to {most}"
                raise _value_error(file, key, value, what)
        # ESM's token_dropout is true or false.
        is_dropout = _DROPOUTS.search(name) and type(defaults.get(path)) in (int, float)
        if is_dropout and not (number and 0 <= value <= 1):
            raise _value_error(file, key, value, "no number from 0 to 1")
        if name.endswith("_token_id") and isinstance(value, int) and value >= 2**31:
            raise _value_error(file, key, value, "no token")
    for name in _SIZES:
        for value in layer_values(config, name):
            # Gemma 3n lists a width for each layer.
            sizes = value if isinstance(value, list | tuple) and value else [value]
            if value is not None and any(type(size) is not int or size < 1 for size in sizes):
                raise _value_error(file, config.attribute_map.get(name, name), value, "no number from 1")
    kinds = getattr(config, "layer_types", None)
    windows = layer_values(config, "sliding_window")
    for window in windows:
        if window is None and len(windows) > 1:
            continue  # of layers with windows of their own some have none
        # Qwen2-MoE writes 0 where no layer slides.
        slides = "sliding_attention" in kinds if isinstance(kinds, list | tuple) else _is_number(window)
        if slides and not (type(window) is int and 1 <= window < 2**31):
            raise _value_error(file, "sliding_window", window, "no number of tokens")
    scalar = getattr(config, "query_pre_attn_scalar", None)  # its root divides the queries
    if _is_number(scalar) and not 0 < scalar < float("inf"):
        raise _value_error(file, "query_pre_attn_scalar", scalar, "no number over 0")
    if not isinstance(config.dtype, torch.dtype | None):
        raise _value_error(file, "dtype", config.dtype, "no dtype of torch")
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, str | int | float | list):
        raise _value_error(file, "quantization_config", quantization, "no object")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _value_error(file: str | Path, key: str, value: object, what: str) -> UserError:
    return UserError(f"{file}: {key} is {_abbreviate(value)}, which is {what}: {_REMEDY}")


def _config_file(config: PreTrainedConfig) -> str:
    name = config.name_or_path or ""
    return os.path.join(name, "config.json") if os.path.isdir(name) else f"config.json of {name or config.model_type}"


def _abbreviate(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _default_values(config: PreTrainedConfig) -> dict[_Path, Any]:
    """Return the defaults of a config's class by their keys; none for a class that cannot be built without values."""
    try:
        return dict(_walk_values(type(config)().to_dict()))
    except Exception:
        return {}


def _walk_values(values: Mapping[str, Any], outer: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """Yield each value of nested objects, inner objects included, with the keys that lead to it."""
    for key, value in values.items():
        yield (*outer, key), value
        if isinstance(value, dict):
            yield from _walk_values(value, (*outer, key))


@contextmanager
def built_from(config: PreTrainedConfig) -> Iterator[None]:
    """Turn an exception of the block, which builds a model, into a UserError that names the key at fault.

    Lack of memory is not the config's fault, and passes.
    """
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the classes of transformers raise many types for values that they did not expect
        raise cannot_build(config, error) from error


def cannot_build(config: PreTrainedConfig, error: Exception) -> UserError:
    """Return the sentence for an exception of building the model of a config."""
    reason = shorten(str(error) or type(error).__name__, 200, placeholder=" ...")
    culprit = _find_culprit(config, error)
    about = "" if culprit is None else f": {culprit[0]} is {_abbreviate(culprit[1])}"
    reason = f"{type(error).__name__}: {reason}"
    return UserError(f"{_config_file(config)}{about}: no {config.model_type} model can be built ({reason}): {_REMEDY}")


def _find_culprit(config: PreTrainedConfig, error: Exception) -> tuple[str, Any] | None:
    """Return the key, with its value, without which a model can be built; None if a few seconds do not suffice.

    Each changed key is set back to the class's default, first those whose name or value the error mentions.
    """
    # The error may come from the machine, and not from the config: then the model can be built now.
    with suppress(Exception):
        _build(copy.deepcopy(config))
        return None
    values, defaults, end = config.to_dict(), _default_values(config), time.monotonic() + _SECONDS
    changed = [(path, value) for path, value in _walk_values(values) if path not in defaults or defaults[path] != value]

    def suspicion(item: tuple[_Path, Any]) -> int:
        path, value = item
        is_told = str(path[-1]) in str(error) or (str(value) and str(value) in str(error))
        return 0 if is_told else 1 if type(value) is not type(defaults.get(path)) else 2

    for path, value in sorted(changed, key=suspicion):
        if time.monotonic() > end:
            break
        changed_values = copy.deepcopy(values)
        block = changed_values
        for key in path[:-1]:
            block = block[key]
        if path in defaults:
            block[path[-1]] = defaults[path]
        else:
            del block[path[-1]]
        try:
            _build(cast(PreTrainedConfig, type(config).from_dict(changed_values)))
        except Exception:  # not this one alone
            continue
        return ".".join(map(str, path)), value
    return None


def _build(config: PreTrainedConfig) -> PreTrainedModel:
    # The classes of the head "none" in `heads.HEADS`, which is above this file.
    auto = AutoModelForCausalLM if is_causal(config) else AutoModel
    with torch.device("meta"):
        model = auto.from_config(config, trust_remote_code=False)
    install_saved(model)
    return cast(PreTrainedModel, model)


def install_saved(model: PreTrainedModel) -> None:
    """Factorize a model if its config says so; transformers always builds a dense model from a config alone.

    The class of the config is the one that the package has registered in transformers.
    """
    saved: Any = getattr(model.config, "quantization_config", None)
    if isinstance(saved, dict) and saved.get("quant_method") in AUTO_QUANTIZATION_CONFIG_MAPPING:
        saved = AutoQuantizationConfig.from_dict(saved)
    if hasattr(saved, "install"):  # the configs of quantized models have nothing to install
        saved.install(model)


_built: set[str] = set()


def check_builds(config: PreTrainedConfig) -> None:
    """Raise a UserError, which names the key where it can be found, if no model can be built from a config.

    One is built on the meta device; a config that was tried before in this process is not tried again.
    """
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    text = json.dumps(config.to_dict(), default=str)
    if text in _built or is_deepspeed_zero3_enabled():  # which would shard the model; its config was read before
        return
    try:
        with built_from(config):
            _build(copy.deepcopy(config))
    except UserError as error:  # of a student's factors, which know no file
        raise error if _config_file(config) in str(error) else UserError(f"{_config_file(config)}: {error}") from error
    _built.add(text)


def check_weight_shapes(config: PreTrainedConfig, folder: Path) -> None:
    """Raise a UserError if a weight in a folder has another shape than the config says.

    Only headers are read, so no memory is taken for a size that a config makes up. Names that the model lacks, and
    architectures whose weights transformers converts, are left to the loading.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled() or get_checkpoint_conversion_mapping(config.model_type):
        return
    with built_from(config):
        model = _build(copy.deepcopy(config))
    saved, prefix = header(folder), f"{model.base_model_prefix}."
    for name, parameter in model.named_parameters():
        # A model with a head may be saved without it, and one without a head with one.
        candidates = (name, name.removeprefix(prefix), prefix + name)
        shape = next((saved[candidate] for candidate in candidates if candidate in saved), None)
        if shape is not None and shape != tuple(parameter.shape):
            wrong = [own for own, theirs in zip(parameter.shape, shape, strict=False) if own != theirs]
            keys = [
                path
                for path, value in _walk_values(config.to_dict())
                if wrong and type(value) is int and value == wrong[0]
            ]
            about = (
                f"{'.'.join(map(str, keys[0]))} is {wrong[0]}"
                if keys
                else f"{name} would be {' x '.join(map(str, parameter.shape))}"
            )
            raise UserError(
                f"{folder / 'config.json'}: {about}, but its weights (safetensors), in which {name} is "
                f"{' x '.join(map(str, shape))}, cannot be loaded with that: {_REMEDY}"
            )


def header(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes in the headers of a folder's safetensors, by weight; none of a damaged file."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):  # the loading reports it
            continue
    return shapes
