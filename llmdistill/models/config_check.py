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
from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.errors import UserError
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
    """Raise a UserError for so many layers, experts or groups that a model, or the list of their kinds, takes hours.

    `values` are those of a config, or of its file before a config is made of it.
    """
    for path, value in _places(values):
        if _PARTS.search(str(path[-1])) and _is_number(value) and value > _MOST_PARTS:
            raise _wrong(file, ".".join(map(str, path)), value, f"more than {_MOST_PARTS:,}")


def check_values(config: PreTrainedConfig, folder: Path | None = None) -> None:
    """Raise a UserError for a value of a config that is none of its key, and would be used only later.

    These are numbers of modules that take hours to build, choices of more experts than there are, dropouts, windows and
    scales, and what is no dtype and no quantization. Of the weights in a `folder` a layer has at least one.
    """
    file, usual, places = _file(config), _usual(config), dict(_places(config.to_dict()))
    check_parts(config.to_dict(), file)
    for path, value in places.items():
        key, name = ".".join(map(str, path)), str(path[-1])
        number = _is_number(value)
        if folder is not None and re.search(r"layers?$", name) and number and value > _USUAL_LAYERS:
            weights = len(header(folder))
            if 0 < weights < value:
                raise _wrong(file, key, value, f"more than the {weights} weights beside it")
        if _CHOICES.search(name) and (number or (value is None and usual.get(path) is not None)):
            # Of how many experts, or groups of experts, this key chooses some; 0 if nothing beside it says so.
            of = "n_group" if name == "topk_group" else "experts"
            beside = {other[-1]: n for other, n in places.items() if other[:-1] == path[:-1] and other != path}
            most = max((n for other, n in beside.items() if str(other).endswith(of) and type(n) is int), default=0)
            if most == 1 and of == "experts":
                most = 0  # a single expert may be a plain layer (Jamba)
            fits = type(value) is int and 1 <= value <= most and (name != "n_group" or most % value == 0)
            if most > 0 and not fits:
                what = f"no divisor of {most} experts" if name == "n_group" else f"no number from 1 to {most}"
                raise _wrong(file, key, value, what)
        # ESM's token_dropout is true or false.
        is_dropout = _DROPOUTS.search(name) and type(usual.get(path)) in (int, float)
        if is_dropout and not (number and 0 <= value <= 1):
            raise _wrong(file, key, value, "no number from 0 to 1")
        if name.endswith("_token_id") and isinstance(value, int) and value >= 2**31:
            raise _wrong(file, key, value, "no token")
    for name in _SIZES:
        for value in layer_values(config, name):
            # Gemma 3n lists a width for each layer.
            sizes = value if isinstance(value, list | tuple) and value else [value]
            if value is not None and any(type(size) is not int or size < 1 for size in sizes):
                raise _wrong(file, config.attribute_map.get(name, name), value, "no number from 1")
    kinds = getattr(config, "layer_types", None)
    windows = layer_values(config, "sliding_window")
    for window in windows:
        # Qwen2-MoE writes 0 where no layer slides; of layers with windows of their own some have none.
        slides = "sliding_attention" in kinds if isinstance(kinds, list | tuple) else _is_number(window)
        slides = slides and (len(windows) == 1 or window is not None)
        if slides and not (type(window) is int and 1 <= window < 2**31):
            raise _wrong(file, "sliding_window", window, "no number of tokens")
    scalar = getattr(config, "query_pre_attn_scalar", None)  # its root divides the queries
    if _is_number(scalar) and not 0 < scalar < float("inf"):
        raise _wrong(file, "query_pre_attn_scalar", scalar, "no number over 0")
    if not isinstance(config.dtype, torch.dtype | None):
        raise _wrong(file, "dtype", config.dtype, "no dtype of torch")
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, str | int | float | list):
        raise _wrong(file, "quantization_config", quantization, "no object")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong(file: str | Path, key: str, value: object, what: str) -> UserError:
    return UserError(f"{file}: {key} is {_shown(value)}, which is {what}: {_REMEDY}")


def _file(config: PreTrainedConfig) -> str:
    name = config.name_or_path or ""
    return os.path.join(name, "config.json") if os.path.isdir(name) else f"config.json of {name or config.model_type}"


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _usual(config: PreTrainedConfig) -> dict[_Path, Any]:
    """The values of a config that says nothing, by their keys; empty for a class that needs something said."""
    try:
        return dict(_places(type(config)().to_dict()))
    except Exception:
        return {}


def _places(values: Mapping[str, Any], outer: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """Each value of nested objects, those that are objects too, with the keys that lead to it."""
    for key, value in values.items():
        yield (*outer, key), value
        if isinstance(value, dict):
            yield from _places(value, (*outer, key))


@contextmanager
def built_from(config: PreTrainedConfig) -> Iterator[None]:
    """Block that builds a model from a config; an exception in it becomes a UserError that names the key at fault.

    Lack of memory is none of the config's.
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
    found = _culprit(config, error)
    about = "" if found is None else f": {found[0]} is {_shown(found[1])}"
    reason = f"{type(error).__name__}: {reason}"
    return UserError(f"{_file(config)}{about}: no {config.model_type} model can be built ({reason}): {_REMEDY}")


def _culprit(config: PreTrainedConfig, error: Exception) -> tuple[str, Any] | None:
    """The key, and its value, without which a model can be built; None if no single one is found in a few seconds.

    Each key that is not the class's default is set back to it, those first whose name or value the error tells.
    """
    with suppress(Exception):
        _build(copy.deepcopy(config))
        return None  # none is at fault
    values, usual, end = config.to_dict(), _usual(config), time.monotonic() + _SECONDS
    changed = [(path, value) for path, value in _places(values) if path not in usual or usual[path] != value]

    def suspicion(item: tuple[_Path, Any]) -> int:
        path, value = item
        is_told = str(path[-1]) in str(error) or (str(value) and str(value) in str(error))
        return 0 if is_told else 1 if type(value) is not type(usual.get(path)) else 2

    for path, value in sorted(changed, key=suspicion):
        if time.monotonic() > end:
            break
        other = copy.deepcopy(values)
        block = other
        for key in path[:-1]:
            block = block[key]
        if path in usual:
            block[path[-1]] = usual[path]
        else:
            del block[path[-1]]
        try:
            _build(cast(PreTrainedConfig, type(config).from_dict(other)))
        except Exception:  # not this one alone
            continue
        return ".".join(map(str, path)), value
    return None


def _build(config: PreTrainedConfig) -> PreTrainedModel:
    from llmdistill.models.load import auto_class, install_saved

    with torch.device("meta"):
        model = auto_class(config, "none").from_config(config, trust_remote_code=False)
    install_saved(model)
    return cast(PreTrainedModel, model)


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
        raise error if _file(config) in str(error) else UserError(f"{_file(config)}: {error}") from error
    _built.add(text)


def check_sizes(config: PreTrainedConfig, folder: Path) -> None:
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
    for name, each in model.named_parameters():
        # A model with a head may be saved without it, and one without a head with one.
        names = (name, name.removeprefix(prefix), prefix + name)
        shape = next((saved[each] for each in names if each in saved), None)
        if shape is not None and shape != tuple(each.shape):
            wrong = [own for own, theirs in zip(each.shape, shape, strict=False) if own != theirs]
            keys = [
                path for path, value in _places(config.to_dict()) if wrong and type(value) is int and value == wrong[0]
            ]
            about = (
                f"{'.'.join(map(str, keys[0]))} is {wrong[0]}"
                if keys
                else f"{name} would be {' x '.join(map(str, each.shape))}"
            )
            raise UserError(
                f"{folder / 'config.json'}: {about}, but its weights (safetensors), in which {name} is "
                f"{' x '.join(map(str, shape))}, cannot be loaded with that: {_REMEDY}"
            )


def header(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes in the headers of a folder's safetensors, by the names of the weights; none of a damaged file."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):  # the loading says what is wrong with it
            continue
    return shapes
