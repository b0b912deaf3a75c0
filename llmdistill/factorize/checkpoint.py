"""Model folders on disk: read as the class that saved them, with what belongs to a model beside its weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from llmdistill.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "*.jinja",
    "generation_config.json",
)
"""What belongs to a model beside its weights and config.json."""


def local_folder(path: Path | str) -> Path:
    """The folder itself, or the one that a hub name's safetensors and companions are downloaded to."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(path), allow_patterns=["config.json", "*.safetensors*", *TOKENIZER_FILES]))


def load(folder: Path | str, config: PreTrainedConfig, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """The model of a folder as the class that saved it, from safetensors only.

    UserError if weights are missing or do not fit.
    """
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
    """The transformers class that config.json names. UserError if it names none that transformers has."""
    import transformers

    name = (config.architectures or [""])[0]
    found = getattr(transformers, name, None) if name else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise UserError(
            f"config.json names the architecture {name!r}, which transformers {transformers.__version__} lacks"
        )
    return found


def copy_companions(source: Path | str, target: Path) -> None:
    """Copy tokenizer and generation files that the target does not have yet."""
    for pattern in TOKENIZER_FILES:
        for file in Path(source).glob(pattern):
            if file.is_file() and not (target / file.name).exists():
                shutil.copy2(file, target / file.name)
