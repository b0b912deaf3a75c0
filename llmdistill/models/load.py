"""Loading models. Loading never runs code from a checkpoint: only safetensors, no remote code."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.activations import FastGELUActivation, GELUTanh, NewGELUActivation

from llmdistill.artifacts import MANIFEST, manifest_damage, new_proven_folder
from llmdistill.errors import UserError
from llmdistill.files import file_state, final_path
from llmdistill.internals.transformers_names import model_class
from llmdistill.memo import cached_by
from llmdistill.messages import warn_once
from llmdistill.models.adapters import CONFIG_FILE, adapter_folder, apply_adapter, cast_parameters, of_base
from llmdistill.models.companions import read_generation_settings, save_model
from llmdistill.models.config_check import built_from, cannot_build, check_weight_shapes
from llmdistill.models.configs import load_config, not_loaded
from llmdistill.models.families import family_of, has_family, is_causal, is_head
from llmdistill.models.forms import saved_form
from llmdistill.models.heads import HEADS, HeadName
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.models.weight_files import check_hub_index, check_weight_files
from llmdistill.progress import Activity


def auto_class(config: PreTrainedConfig, head: HeadName) -> Any:
    """Return the class of transformers that loads a model with a head.

    Raises UserError if the head is the saved one, but config.json names no class of transformers.
    """
    if head == "saved":
        name = (config.architectures or [""])[0]
        named_class = getattr(transformers, name, None) if name else None
        if not (isinstance(named_class, type) and issubclass(named_class, PreTrainedModel)):
            raise UserError(
                f"config.json names the architecture {name!r}, which transformers {transformers.__version__} lacks: "
                "install a version that has it, or correct the name"
            )
        return named_class
    row = HEADS[head]
    return getattr(transformers, row.decoder_class if is_causal(config) else row.auto_class)


def has_checkpointing(config: PreTrainedConfig, head: HeadName) -> bool:
    """Return whether transformers can recompute the activations of a model in the backward pass."""
    return bool(model_class(auto_class(config, head), config).supports_gradient_checkpointing)


def attention_of(config: PreTrainedConfig) -> dict[str, str]:
    """Return the attention implementation to load a model with: the one that taps need, else transformers' choice."""
    is_tapped = has_family(config) and family_of(config).projections is None
    return {"attn_implementation": "sdpa"} if is_tapped else {}


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | Literal["auto"],
    device: torch.device | str | None = None,
    head: HeadName = "lm_head",
    new_head: bool = False,
    num_classes: int | None = None,
) -> PreTrainedModel:
    """Load a model in evaluation mode, by default with its LM head.

    Args:
        path: a folder, or a name on the hub; a peft adapter is merged into its base in fp32 and then cast.
        dtype: dtype of the weights; auto keeps that of the folder (for an adapter, of its base).
        device: device to move the model to; None leaves the model where it was loaded.
        head: the head of the model.
        new_head: whether a head that the weights lack is initialized at random (from torch's generator).
        num_classes: outputs of a new classifier, 1 for a classifier that predicts a score; None takes the config's.

    Raises:
        UserError: as in `load_config`; weights in safetensors are missing, or do not fit; or an adapter does not fit.
    """
    with Activity(f"Loading {final_path(path)}"):
        adapter = adapter_folder(path)
        if adapter is None:
            model = _load_weights(path, dtype, head, new_head, num_classes)
        else:
            # With auto the dtype to return to is known only once the base is loaded; the merging is in fp32 either way.
            first = dtype if dtype == "auto" else torch.float32
            load_base = partial(_load_weights, dtype=first, head=head, new_head=new_head, num_classes=num_classes)
            base = of_base(adapter, load_base)
            stored = base.dtype if dtype == "auto" else dtype
            cast_parameters(base, torch.float32)
            model = apply_adapter(base, adapter)
            cast_parameters(model, stored)
        if (load_rest := HEADS[head].load_rest) is not None:
            load_rest(model, path)
        return model if device is None else cast(PreTrainedModel, model.to(cast(Any, device)))


def config_with_head(path: str | Path, head: HeadName, num_classes: int | None) -> PreTrainedConfig:
    """Return the config of a model as `load_model` changes it for a head."""
    config = load_config(path)
    if num_classes is not None:
        config.num_labels = num_classes
    if HEADS[head].needs_padding_token and config.pad_token_id is None:
        config.pad_token_id = load_tokenizer(path).pad_token_id
    return config


@cached_by(
    lambda folder, part=slice(None): (
        *(folder, str(part)),  # a slice has no hash before Python 3.12
        tuple(sorted((file, file_state(file)) for file in folder.iterdir())),
    )
)
def folder_damage(folder: Path, part: slice = slice(None)) -> str | None:
    """Return what is wrong with the files of a folder that has a manifest; None if nothing is, or it has none.

    The result is cached in the process while no file changes, because a command loads a model several times. `part` is
    that of `manifest_damage`.
    """
    return manifest_damage(folder, part)


def check_files(path: str | Path, part: slice = slice(None)) -> None:
    """Raise a UserError if a model's folder or hub name refers to weights other than its own safetensors.

    Also raise it if the folder has a manifest and a file is not as it was written.
    """
    if Path(path).is_dir():
        check_weight_files(Path(path))
    else:
        check_hub_index(str(path))
    damage = folder_damage(Path(path), part) if Path(path).is_dir() else None
    if damage is not None:
        raise UserError(
            f"{damage}: make the model again or copy it again; if you changed it, remove {Path(path) / MANIFEST}"
        )


def _load_weights(
    path: str | Path, dtype: torch.dtype | str, head: HeadName, new_head: bool, num_classes: int | None
) -> PreTrainedModel:
    check_files(path)
    config = config_with_head(path, head, num_classes)
    form = saved_form(config)
    if form is not None:
        form.check_package(f"{path}: this model with {form.saved_as(config.quantization_config)}")
    if Path(path).is_dir():
        check_weight_shapes(config, Path(path))
        read_generation_settings(Path(path))  # transformers reads them beside the weights
    try:
        loaded: Any = auto_class(config, head).from_pretrained(
            path,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **attention_of(config),
        )
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise not_loaded(path, "weights (safetensors)", error) from error
    except Exception as error:  # of a config, whose classes raise many types
        raise cannot_build(config, error) from error
    model, info = loaded
    missing = set(info["missing_keys"])
    if new_head or (head != "saved" and model.base_model is model):  # without a head, the pooler may be new
        missing = {name for name in missing if not is_head(model, name)}
    if missing:  # transformers would initialize them at random
        raise UserError(
            f"{path}: {len(missing)} weights are missing, such as {min(missing)}: give a whole checkpoint of this "
            f"architecture{HEADS[head].with_head}"
        )
    warn_of_unread(model, info["unexpected_keys"], path)
    if form is not None:
        form.settle(model)
    return fuse_gelu(model)


def warn_of_unread(model: PreTrainedModel, tensors: Iterable[str], path: str | Path) -> None:
    """Warn of the saved tensors without a place in a model that belong to a module it has, such as a linear's bias.

    Without them the model computes something else than it has learned. Those of other modules, such as another head,
    say nothing about this one.
    """
    prefix = f"{model.base_model_prefix}."
    own = {name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))}

    def has_place(name: str) -> bool:
        module = name.rpartition(".")[0]
        return not own.isdisjoint((module, module.removeprefix(prefix), prefix + module))

    unread = sorted(filter(has_place, tensors))
    if unread:
        warn_once(
            f"{path}: {len(unread)} of its tensors have no place in a {type(model).__name__} of its config.json, such "
            f"as {unread[0]}, so that the model is not the one that was trained: take the config.json that belongs to "
            "the weights"
        )


def fuse_gelu(model: PreTrainedModel) -> PreTrainedModel:
    """Compute GELU's tanh formula by torch's own kernel, where transformers writes it as eight operations (GPT-2).

    The values are the same up to rounding, but the eight keep three tensors more for the backward pass.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation | FastGELUActivation):
                setattr(module, name, GELUTanh())
    return model


def build_meta(config: PreTrainedConfig, head: HeadName = "none") -> PreTrainedModel:
    """Build a model on the meta device, without weights; by default without a head, as papers count parameters."""
    auto = auto_class(config, head)
    with built_from(config), torch.device("meta"):
        return fuse_gelu(auto.from_config(config, trust_remote_code=False, **attention_of(config)))


def build_random(config: PreTrainedConfig, head: HeadName, *, seed: int) -> PreTrainedModel:
    """Build a model in fp32 with random weights, which follow the seed; torch's own generator does not change."""
    auto = auto_class(config, head)
    with built_from(config), torch.random.fork_rng(devices=[]):
        # transformers initializes by torch's own generator, on the CPU, and takes no other.
        torch.default_generator.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32, trust_remote_code=False, **attention_of(config))
    return fuse_gelu(model)


def merge_adapter(path: Path | str, output: Path | str, dtype: torch.dtype | Literal["auto"] = "auto") -> None:
    """Merge an adapter into its base and write the model as a new stock folder, tokenizer files included.

    `path` is a folder or a hub name; `auto` keeps the dtype of the base. Raises UserError if `path` is no adapter, if
    the adapter does not fit, or if `output` is not empty.
    """
    adapter = adapter_folder(path)
    if adapter is None:
        raise UserError(f"{path}: no adapter there (no {CONFIG_FILE}): give the folder or hub name of one")
    with new_proven_folder(output) as folder:
        save_model(load_model(adapter, dtype=dtype, head="saved"), folder, adapter)
