"""Loading a model shard by shard under ZeRO-3: no rank ever holds more than its share and one parameter.

transformers builds ordinary models under ZeRO-3 in shards, but not those with a "quantizer", and a factorized student
counts as one. Here every model is built on the meta device, its factors included, and each parameter is read from its
safetensors file and sharded before the next one is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmdistill.internals.transformers_names import is_initialized, mark_initialized
from llmdistill.models.adapters import WEIGHTS_FILE
from llmdistill.models.companions import copy_generation_settings, download
from llmdistill.models.config_check import install_saved
from llmdistill.models.families import is_head
from llmdistill.models.heads import HEADS, HeadName
from llmdistill.models.load import build_meta, check_files, config_with_head, load_model, warn_of_unread


@dataclass(frozen=True)
class Sharding:
    """How the ranks of a group share a model: by ZeRO-3, unless a subclass says otherwise."""

    ds_config: dict[str, Any]
    """The DeepSpeed configuration of the engine that will hold the model, at ZeRO stage 3; empty without an engine."""
    group: Any = None
    """The process group, of several ranks; None: all ranks."""

    def shard(self, parameter: nn.Parameter, name: str) -> None:
        """Keep only this rank's share of a parameter, which has this name in the model."""
        import deepspeed

        # DeepSpeed's Init shards the parameters of a module, in place.
        holder = nn.Module()
        holder.parameter = parameter
        deepspeed.zero.Init(module=holder, config_dict_or_path=self.ds_config, data_parallel_group=self.group)


def load_sharded(
    path: str | Path,
    *,
    sharding: Sharding,
    dtype: torch.dtype,
    head: HeadName = "lm_head",
    new_head: bool = False,
    num_classes: int | None = None,
) -> PreTrainedModel:
    """Load a model in evaluation mode, sharded over the ranks of a group, each of which must call this function.

    Args:
        path: a folder or a name on the hub, not an adapter.
        sharding: the ranks, and the configuration of their engine.
        dtype: dtype of the weights.
        head: the head of the model.
        new_head: whether a head that the weights lack is initialized at random (from torch's generator).
        num_classes: outputs of a new classifier; None takes the config's.

    A checkpoint whose names or shapes differ from those of the model, as in old ones, is left to transformers, which
    converts it or says what does not fit, and shards it over all ranks.

    Raises:
        UserError: as in `load_model`.
    """
    folder = download(path)
    ranks = sharding.group
    check_files(folder, slice(dist.get_rank(ranks), None, dist.get_world_size(ranks)))  # which share the reading
    config = config_with_head(path, head, num_classes)
    config.dtype = dtype
    model = build_meta(config, head)
    install_saved(model)
    parameters: dict[nn.Parameter, list[str]] = {}  # with all their names: a tied parameter has several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameters.setdefault(parameter, []).append(name)
    saved: dict[str, _SavedTensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        if file.name != WEIGHTS_FILE:
            with safe_open(file, framework="pt") as tensors_of_file:
                for key in tensors_of_file.keys():  # noqa: SIM118 (not a dict)
                    shape = tuple(tensors_of_file.get_slice(key).get_shape())
                    saved[key] = shape, partial(_read_tensor, file, key)
    tensors = [_find_saved(model, names, saved) for names in parameters.values()]
    missing = [names[0] for tensor, names in zip(tensors, parameters.values(), strict=True) if tensor is None]
    misfits = any(
        tensor is not None and tensor[0] != old.shape for tensor, old in zip(tensors, parameters, strict=True)
    )
    may_miss = new_head or (head != "saved" and model.base_model is model)
    if not saved or misfits or (missing and not (may_miss and all(is_head(model, name) for name in missing))):
        if not sharding.ds_config:
            model = load_model(path, dtype=dtype, head=head, new_head=new_head, num_classes=num_classes)
            for name, parameter in model.named_parameters():
                sharding.shard(parameter, name)
            return model
        from transformers.integrations.deepspeed import HfDeepSpeedConfig

        # transformers, which keeps a weak reference to it, shards what it loads.
        alive = HfDeepSpeedConfig(sharding.ds_config)
        try:  # load_model says what is missing or does not fit
            return load_model(path, dtype=dtype, head=head, new_head=new_head, num_classes=num_classes)
        finally:
            del alive
    new: dict[nn.Parameter, str] = {}
    for tensor, (old, names) in zip(tensors, parameters.items(), strict=True):
        value = torch.empty(old.shape, dtype=dtype) if tensor is None else tensor[1]().to(dtype)
        parameter = nn.Parameter(value, requires_grad=old.requires_grad)
        # transformers initializes, in initialize_weights below, only parameters without this mark.
        mark_initialized(parameter, tensor is not None)
        for name in names:
            module, _, leaf = name.rpartition(".")
            model.get_submodule(module).register_parameter(leaf, parameter)
        if tensor is None:
            new[parameter] = names[0]
        else:
            sharding.shard(parameter, names[0])
    _initialize(model, saved)
    prefix = f"{model.base_model_prefix}."
    places = {name for names in parameters.values() for name in names} | {name for name, _ in model.named_buffers()}
    places |= {prefix + name for name in places} | {name.removeprefix(prefix) for name in places}
    warn_of_unread(model, saved.keys() - places, path)
    # Only now, because a parameter is initialized as a whole.
    for parameter, name in new.items():
        sharding.shard(parameter, name)
    copy_generation_settings(model, folder)
    model.name_or_path = str(path)
    if (load_rest := HEADS[head].load_rest) is not None:
        load_rest(model, folder)
    return model.eval()


_SavedTensor = tuple[tuple[int, ...], Callable[[], Tensor]]
"""The shape of a saved tensor, and what reads it."""


def _read_tensor(path: Path, key: str) -> Tensor:
    # The tensor is a mapping of the file, and the broadcast to the ranks writes into it. Open the file anew for each
    # tensor, so that its written pages are freed together with it.
    with safe_open(path, framework="pt") as file:
        return cast(Tensor, file.get_tensor(key))


def _find_saved(model: PreTrainedModel, names: Sequence[str], saved: Mapping[str, _SavedTensor]) -> _SavedTensor | None:
    """Return a saved tensor by one of its names; a model may be saved with or without the head that it has now."""
    prefix = f"{model.base_model_prefix}."
    keys = (key for name in names for key in (name, name.removeprefix(prefix), prefix + name))
    return next((saved[key] for key in keys if key in saved), None)


def _initialize(model: PreTrainedModel, saved: Mapping[str, _SavedTensor]) -> None:
    """Read or compute the buffers, and initialize the parameters that were not read, as transformers does."""
    # Buffers are not sharded: each rank has them whole, where its layers run.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        buffers = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        tensors = {name: _find_saved(model, [f"{prefix}.{name}" if prefix else name], saved) for name in buffers}
        for name, buffer in buffers.items():
            tensor = tensors[name]
            value = torch.empty_like(buffer, device=device) if tensor is None else tensor[1]().to(device)
            setattr(module, name, value)
        is_read = all(map(is_initialized, own.values()))
        if (own or buffers) and is_read and None not in tensors.values():
            mark_initialized(module)
    model.initialize_weights()
