"""Reads model folders with the class that saved them, and copies the files that belong to a model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from llmdistill.errors import UserError
from llmdistill.files import new_folder
from llmdistill.models.adapters import CONFIG_FILE, adapter_folder, apply_adapter, base_of, cast_parameters
from llmdistill.models.configs import load_config
from llmdistill.models.tokenizer import has_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_GENERATION = ("generation_config.json",)
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "*.jinja",
    *_GENERATION,
)
"""The files that belong to a model beside its weights and config.json."""


def local_folder(path: Path | str) -> Path:
    """The folder itself, or the folder into which the safetensors and companion files of a hub name are downloaded."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    patterns = ["config.json", CONFIG_FILE, "*.safetensors*", *TOKENIZER_FILES]
    return Path(snapshot_download(str(path), allow_patterns=patterns))


def load(folder: Path | str, config: PreTrainedConfig, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """Load the model of a folder with its own class, from safetensors only; an adapter is merged into its base.

    Raises UserError if weights are missing or do not fit.
    """
    adapter = adapter_folder(folder)
    if adapter is None:
        return _load_weights(folder, config, dtype)
    base = _load_weights(local_folder(base_of(adapter)), config, dtype if dtype == "auto" else torch.float32)
    stored = base.dtype if isinstance(dtype, str) else dtype
    cast_parameters(base, torch.float32)
    model = apply_adapter(base, adapter)
    cast_parameters(model, stored)
    return model


def _load_weights(folder: Path | str, config: PreTrainedConfig, dtype: torch.dtype | str) -> PreTrainedModel:
    try:
        model, info = model_class(config).from_pretrained(
            folder, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    except UserError:
        raise
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise UserError(f"{folder}: its weights (safetensors) cannot be loaded ({reason}): check the files") from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise UserError(f"{folder} lacks {len(missing)} weights of {type(model).__name__}, the first is {missing[0]}")
    return model


def model_class(config: PreTrainedConfig) -> Any:
    """The transformers class that config.json names. Raises UserError if it names no class of transformers."""
    import transformers

    name = (config.architectures or [""])[0]
    found = getattr(transformers, name, None) if name else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise UserError(
            f"config.json names the architecture {name!r}, which transformers {transformers.__version__} lacks"
        )
    return found


def copy_companions(source: Path | str, target: Path) -> None:
    """Copy tokenizer and generation files that the target does not have yet; for an adapter also those of its base.

    `source` is a folder or a hub name. If both adapter and base have a tokenizer, the adapter's is copied, and no file
    of the base's tokenizer is mixed in.
    """
    folder = local_folder(source)
    _copy(folder, target, TOKENIZER_FILES)
    adapter = adapter_folder(folder)
    if adapter is not None:
        _copy(local_folder(base_of(adapter)), target, _GENERATION if has_tokenizer(adapter) else TOKENIZER_FILES)


def _copy(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        for file in source.glob(pattern):
            if file.is_file() and not (target / file.name).exists():
                shutil.copy2(file, target / file.name)


def merge_adapter(path: Path | str, output: Path | str, dtype: torch.dtype | str = "auto") -> None:
    """Merge an adapter into its base and write the model as a new stock folder, tokenizer files included.

    `path` is the adapter's folder or hub name; `auto` keeps the dtype of the base. Raises UserError if `path` is no
    adapter, if the adapter does not fit, or if `output` is not empty.
    """
    adapter = adapter_folder(path)
    if adapter is None:
        raise UserError(f"{path}: no adapter there (no {CONFIG_FILE}): give the folder or hub name of one")
    config = load_config(adapter)
    with new_folder(output) as folder:
        load(adapter, config, dtype).save_pretrained(folder)
        copy_companions(adapter, folder)
