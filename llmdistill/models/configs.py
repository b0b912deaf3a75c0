"""Loading the config of a model from a folder, an adapter or a name on the hub."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import shorten
from typing import cast

import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from llmdistill.errors import UserError
from llmdistill.files import LFS_REMEDY, is_lfs_pointer, read_json
from llmdistill.models.adapters import adapter_folder, embedding_rows, of_base, unties_embeddings
from llmdistill.models.config_check import check_builds, check_parts, check_values
from llmdistill.models.families import FAMILIES, is_causal
from llmdistill.models.weight_files import check_weight_files


def load_config(path: str | Path) -> PreTrainedConfig:
    """Load the config of a model in a folder or on the hub; for a peft adapter, the config of the merged model.

    Raises UserError if the folder does not exist, has no config.json or an invalid one, if the model is neither a
    decoder nor an encoder of text, or if the hub has no such name or cannot be reached.
    """
    folder, adapter = local_folder(path), adapter_folder(path)
    if adapter is not None:
        config = of_base(adapter, load_config)
        rows = embedding_rows(adapter)
        if rows:  # the adapter may have been trained with more tokens
            config.vocab_size = next(iter(rows.values()))
        if config.tie_word_embeddings and unties_embeddings(adapter):
            config.tie_word_embeddings = False
        return config
    if folder is not None:
        file = folder / "config.json"
        if not file.is_file():
            # The output of a Trainer has checkpoints, and that of a run its student.
            inside = sorted(folder.glob("*/config.json"), key=lambda inner: (inner.stat().st_mtime, str(inner)))
            newest = f"; give the folder inside that has one, such as {inside[-1].parent}" if inside else ""
            raise UserError(f"{file}: no such file: a model's folder needs its config.json{newest}")
        content = read_json(file)
        if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
            raise UserError(f"{file}: it names no model_type: take the config.json that belongs to the model")
        if content["model_type"] not in {*CONFIG_MAPPING_NAMES, *FAMILIES}:
            if content.get("auto_map"):
                raise UserError(f"{file}: its model_type {content['model_type']!r} {_OWN_CODE}")
            raise UserError(
                f"{file}: transformers {transformers.__version__} does not know the model_type "
                f"{content['model_type']!r}: check the name, or take a newer transformers"
            )
        check_parts(content, file)
        check_weight_files(folder)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # a config's own checks raise many types of error
        culprit = "" if folder is None else _find_culprit(folder / "config.json")
        raise not_loaded(path, "config", error, culprit) from error
    is_causal(config)
    check_values(config, folder)
    check_builds(config)
    return cast(PreTrainedConfig, config)


def local_folder(path: str | Path) -> Path | None:
    """Return the folder at a path, None if it can only be a name on the hub. Raises UserError if it is neither."""
    folder = Path(path)
    if os.path.isdir(folder):  # Path.is_dir raises an error for a name that is too long
        return folder
    if os.path.exists(folder):
        raise UserError(f"{path} is a file: give the folder that holds config.json")
    looks_like_hub_name = not folder.is_absolute() and len(folder.parts) <= 2 and str(path)[:1] not in (".", "~")
    if not looks_like_hub_name:
        raise UserError(f"{path}: no such folder: give one with config.json, or a model's name on the hub")
    return None


def _find_culprit(file: Path) -> str:
    """Return the key, with its value, without which a config can be read; empty if there is no single one."""
    content = read_json(file)
    kind = AutoConfig.for_model(content["model_type"]).__class__
    for key in content:
        try:
            kind.from_dict({other: value for other, value in content.items() if other != key})
        except Exception:  # not this one alone
            continue
        return f"{key} is {shorten(repr(content[key]), 60, placeholder=' ...')}: "
    return ""


def not_loaded(path: str | Path, what: str, error: Exception, culprit: str = "") -> UserError:
    """Return the error for a part of a model (config, tokenizer, weights) that transformers could not load.

    `culprit` names the setting that causes it, if known.
    """
    reason = shorten(str(error) or type(error).__name__, 300, placeholder=" ...")
    if os.path.isdir(path):
        pointer = next((file for file in sorted(Path(path).iterdir()) if is_lfs_pointer(file)), None)
        if pointer is not None:
            return UserError(f"{pointer}: {LFS_REMEDY}")
        file = _FILES.get(what)
        if "trust_remote_code" in str(error):
            return UserError(f"{path}: its {what} {_OWN_CODE}")
        where = path if file is None else os.path.join(path, file)
        return UserError(
            f"{where}: its {what} cannot be loaded ({culprit}{reason}): correct it, or copy the model's files anew"
        )
    return UserError(
        f"{path} is no folder here, and the hub did not give it: its {what} cannot be loaded ({reason}): check the "
        "name, the files, the network"
    )


_OWN_CODE = "needs code of the model's own (auto_map), and none is run: take a model whose classes transformers has"
_FILES = {"config": "config.json", "tokenizer": "tokenizer_config.json"}
"""The file of a part of a model that is the likely reason why transformers could not load it."""
