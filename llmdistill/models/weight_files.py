"""Which files of weights the folder of a model names, looked at before transformers opens one of them."""

from __future__ import annotations

from pathlib import Path

from llmdistill.errors import UserError, install_command
from llmdistill.files import is_outside, read_json

INDEX = "model.safetensors.index.json"
"""File that names the shard of each weight."""
SUFFIX = ".safetensors"
_STUDENT, _LOADED = "this is a factorized student of llmdistill", "before the model is loaded"
REFUSAL = f"{_STUDENT}, which nothing else loads: {install_command()}, and write `import llmdistill` {_LOADED}"
"""`transformers_weights` in the config.json of a student, where transformers reads the name of the file of weights."""


def is_refusal(value: object) -> bool:
    """Return whether `transformers_weights` of a config is REFUSAL, of this or an earlier version."""
    return isinstance(value, str) and value.startswith(_STUDENT) and value.endswith(_LOADED)


def check_weight_files(folder: Path) -> None:
    """Raise a UserError unless the weights of a model, or of an adapter, are safetensors that lie in its folder.

    transformers would unpickle a file with another ending that an index names, and open one in another folder.
    """
    pickled = sorted(file.name for pattern in ("pytorch_model*.bin", "*.pth") for file in folder.glob(pattern))
    if pickled and not any(folder.glob(f"*{SUFFIX}")):
        raise UserError(
            f"{folder}: its weights are pickled ({pickled[0]}), and a pickle may run code, so none is read; where you "
            "trust it, from_pretrained and save_pretrained of transformers write it as safetensors"
        )
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        if is_outside(folder, file.name):
            raise UserError(f"{file}: it is a link that leads out of the model's folder: put the file itself there")
    config = folder / "config.json"
    content = read_json(config) if config.is_file() else None
    explicit = content.get("transformers_weights") if isinstance(content, dict) else None
    indices = [INDEX]
    if explicit is not None and not is_refusal(explicit):
        _check_name(folder, explicit, f"{config}: transformers_weights", (SUFFIX, f"{SUFFIX}.index.json"))
        indices.append(explicit)
    for name in indices:
        if name.endswith(".json") and (folder / name).is_file():
            index = read_json(folder / name)
            parts = ("metadata", "weight_map")
            if not isinstance(index, dict) or not all(isinstance(index.get(part), dict) for part in parts):
                raise UserError(
                    f"{folder / name}: it has no objects metadata and weight_map: copy the file from the model anew"
                )
            # Each name once, by its text: a damaged map may have values that a set cannot hold.
            for shard in {str(shard): shard for shard in index["weight_map"].values()}.values():
                _check_name(folder, shard, f"{folder / name}: its weight_map", (SUFFIX,))


def check_hub_index(name: str) -> None:
    """Raise a UserError unless the index of a model on the hub, if it has one, names safetensors alone."""
    from transformers.utils import cached_file

    for file_name in (INDEX, "config.json"):
        try:
            file = cached_file(name, file_name, _raise_exceptions_for_missing_entries=False)
        except OSError:  # transformers says what it cannot get
            return
        if file is not None:
            check_weight_files(Path(file).parent)


def _check_name(folder: Path, name: object, where: str, endings: tuple[str, ...]) -> None:
    if not isinstance(name, str) or not name.endswith(endings):
        raise UserError(
            f"{where} names {name!r}, which is no safetensors file (a pickled .bin is never read): save the model as "
            "safetensors"
        )
    if is_outside(folder, name):
        raise UserError(f"{where} names {name!r}, which lies outside of the folder: copy the model's own files anew")
