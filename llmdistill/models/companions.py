"""The files beside weights and config.json: tokenizer, generation settings, modules of sentence-transformers."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from llmdistill.errors import UserError
from llmdistill.files import is_outside, read_json, write_json
from llmdistill.models.adapters import CONFIG_FILE, adapter_folder, of_base
from llmdistill.models.chat_templates import end_of_turn
from llmdistill.models.tokenizer import has_tokenizer, load_tokenizer
from llmdistill.progress import Activity

GENERATION_FILE = "generation_config.json"
_TOKENIZER = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "*.jinja",
)
MODULES_FILE = "modules.json"
_POOLING = ("sentence_*_config.json", "config_sentence_transformers.json", MODULES_FILE)
"""The files of sentence-transformers; modules.json, which names the folders of the other modules, is the last one."""
_MODULE_FILES = ("*.json", "*.safetensors", "*.txt")
_WIDTHS = ("word_embedding_dimension", "embedding_dimension")
"""Keys under which versions of sentence-transformers keep the width of the model in the config of a module."""


def read_modules(folder: Path) -> list[dict[str, Any]]:
    """Return what modules.json lists; nothing without the file.

    Raises:
        UserError: it is malformed.
    """
    file = folder / MODULES_FILE
    modules = read_json(file) if file.is_file() else []
    is_list = isinstance(modules, list) and all(isinstance(module, dict) for module in modules)
    if not is_list or not all(isinstance(module.get("path"), str | None) for module in modules):
        raise UserError(f"{file}: not a list of modules; copy the file from the model anew")
    return modules


def download(path: Path | str, *, weights: bool = True) -> Path:
    """Return a folder as it is; download the files of a hub name, and return their folder.

    The files are the companions and, with `weights`, the safetensors.
    """
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    of_modules = [f"[0-9]_*/{pattern}" for pattern in _MODULE_FILES]
    files = ["config.json", CONFIG_FILE, "*.safetensors*", GENERATION_FILE, *_TOKENIZER, *_POOLING, *of_modules]
    if not weights:
        files = [pattern for pattern in files if ".safetensors" not in pattern]
    return Path(snapshot_download(str(path), allow_patterns=files))


def save_model(model: PreTrainedModel, folder: Path, source: Path | str) -> None:
    """Write a model with the companions of the folder or hub name that it comes from."""
    with Activity("Saving the model"):
        model.save_pretrained(folder)
        copy_companions(source, folder)


def copy_companions(source: Path | str, target: Path) -> None:
    """Copy the companions that the folder of a model does not have yet; for an adapter also those of its base.

    `source` is a folder or a hub name. If both adapter and base have a tokenizer, the adapter's is copied, and no file
    of the base's tokenizer is mixed in. The target's generation settings get the end token of its tokenizer, and the
    end of a turn of its chat template.
    """
    folder = download(source)
    _copy_files(folder, target, (GENERATION_FILE, *_TOKENIZER))
    adapter = adapter_folder(folder)
    if adapter is not None:
        folder = of_base(adapter, download)
        _copy_files(folder, target, (GENERATION_FILE, *(() if has_tokenizer(adapter) else _TOKENIZER)))
    # What sentence-transformers runs after the model (pooling, normalization, linears), and its settings.
    if (folder / MODULES_FILE).is_file():
        names = [module.get("path") or "" for module in read_modules(folder)]
        own = [name for name in names if name and Path(name).name == name and not is_outside(folder, name)]
        parts = [folder / name for name in own if (folder / name).is_dir()]
        files = (folder / "config.json", target / "config.json")
        configs = [read_json(file) if file.is_file() else {} for file in files]
        keys = ("hidden_size", "dim", "n_embd", "d_model")  # under which architectures have it
        width, new_width = (next((config[key] for key in keys if key in config), None) for config in configs)
        # Modules with weights are matrices of the old width: beside a student of another one nothing is copied.
        if width == new_width or not any(file for part in parts for file in part.glob("*.safetensors")):
            for part in parts:
                _copy_files(part, target / part.name, _MODULE_FILES)
                of_part = target / part.name / "config.json"
                if width != new_width and of_part.is_file():
                    values = read_json(of_part)
                    write_json(of_part, {**values, **{key: new_width for key in _WIDTHS if key in values}})
            _copy_files(folder, target, _POOLING)
    # Add the tokens that end the answers of the training data, so that a server of the student stops there.
    settings = read_generation_settings(target)
    if settings is None or not (target / "tokenizer_config.json").is_file():
        return
    tokenizer = load_tokenizer(target)
    named = settings.eos_token_id
    ends = [] if named is None else named if isinstance(named, list) else [named]
    new = [end for end in dict.fromkeys([tokenizer.eos_token_id, end_of_turn(tokenizer)]) if end not in [*ends, None]]
    if new:
        settings.eos_token_id = [*ends, *new] if len([*ends, *new]) > 1 else new[0]
        settings.save_pretrained(target)


def _copy_files(source: Path, target: Path, patterns: tuple[str, ...]) -> None:
    target.mkdir(exist_ok=True)
    for pattern in patterns:
        for file in source.glob(pattern):
            if file.is_file() and not (target / file.name).exists():
                shutil.copy2(file, target / file.name)


def read_generation_settings(folder: Path) -> GenerationConfig | None:
    """Read the generation settings in a folder, None if it has none; raises UserError if they are malformed."""
    if not (folder / GENERATION_FILE).is_file():
        return None
    read_json(folder / GENERATION_FILE)
    try:
        settings = GenerationConfig.from_pretrained(folder)
        settings.validate()
    except Exception as error:  # of values that it does not expect, it raises many types
        reason = shorten(str(error) or type(error).__name__, 200, placeholder=" ...")
        raise UserError(
            f"{folder / GENERATION_FILE}: no generation settings ({reason}): correct it, or copy it from the model anew"
        ) from error
    ends = settings.eos_token_id
    for end in ends if isinstance(ends, list) else [ends]:
        if end is not None and (type(end) is not int or end < 0):
            raise UserError(f"{folder / GENERATION_FILE}: eos_token_id is {ends!r}: give the id of a token, or a list")
    return settings


def generation_settings(source: Path | str) -> GenerationConfig | None:
    """Return the generation settings of a folder or hub name, or those of an adapter's base; None if it has none."""
    folder = download(source, weights=False)
    adapter = adapter_folder(folder)
    if adapter is not None and not (folder / GENERATION_FILE).is_file():
        folder = of_base(adapter, partial(download, weights=False))
    return read_generation_settings(folder)


def copy_generation_settings(model: PreTrainedModel, source: Path | str) -> None:
    """Give a model that was built from a config alone the `generation_settings` of a folder or hub name, if any."""
    settings = generation_settings(source)
    if settings is not None and model.can_generate():
        model.generation_config = settings
