"""Models in GGUF files: each is dequantized once, into an ordinary model folder in the cache."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

from tqdm import tqdm

from llmdistill.artifacts import new_proven_folder, read_record
from llmdistill.errors import UserError, install_command
from llmdistill.files import LFS_REMEDY, cache_folder, check_writable, file_state, is_lfs_pointer, read_json, write_json
from llmdistill.fingerprints import file_sha256
from llmdistill.memo import cached_by
from llmdistill.messages import say
from llmdistill.progress import Activity

RECORD = "gguf.json"
"""File of a dequantized folder: the name and the sha256 of its GGUF file, and the types of most of its weights."""

_FORMAT = 2
"""Version of what is made of a file. Increase it with every change of a folder's contents."""


def gguf_file(path: str | Path) -> Path | None:
    """Return the GGUF file that a path names, or the one in a folder without config.json; None if there is none.

    Raises UserError if the folder has several, or the path ends with .gguf and there is no such file.
    """
    if str(path).lower().endswith(".gguf") and not os.path.isdir(path):
        if not os.path.isfile(path):
            raise UserError(f"{path}: no such file: give the path of a GGUF file")
        return Path(path)
    configs = ("config.json", "adapter_config.json")  # they mark an ordinary folder, with GGUF files beside them or not
    if not os.path.isdir(path) or any(os.path.isfile(Path(path) / name) for name in configs):
        return None
    files = sorted(Path(path).glob("*.gguf"))
    if len(files) > 1:
        raise UserError(f"{path}: no config.json and {len(files)} GGUF files: name one of them, such as {files[0]}")
    return files[0] if files else None


@cached_by(lambda file: (file, file_state(file), cache_folder()))  # a command locates its model several times
def dequantize_file(file: Path) -> Path:
    """Return the folder of a GGUF file's model in fp32, with tokenizer and chat template; make it if it is not there.

    It is named after the sha256 of the file. If several processes need it, one makes it and the others wait. A line on
    stderr says where it is.

    Raises:
        UserError: the package gguf is missing; or the file is cut, is one part of several, lacks weights, or has an
            architecture that transformers does not read.
    """
    with Activity(f"Reading {file.name}"):
        sha256 = file_sha256(file)
    folder = cache_folder() / "gguf" / f"{sha256[:16]}-{_FORMAT}"
    if folder.is_dir():
        say(f"{file.name}: {origin(folder)}, kept in {folder}", aside=True)
        return folder
    with Activity(f"Reading {file.name}"):  # the lists of a large vocabulary take minutes
        about, license, padding = _read_header(file)
    of_padding = f"; {padding:,} rows of its embeddings are padding" if padding else ""
    say(f"{file.name}: dequantizing {_describe_types(about)}, once; kept in {folder}{of_padding}", aside=True)
    check_writable(folder.parent, "LLMDISTILL_CACHE")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:  # of several processes one makes the folder
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _write_folder(file, folder, {"file": file.name, "sha256": sha256, **about}, license)
    return folder


def origin(folder: Path | str) -> str | None:
    """Return that the weights of a folder are dequantized, with their types; None for any other model."""
    file = Path(folder) / RECORD
    record = read_record(
        file, remedy="remove the file", keys={"bits": int, "type": str, "layers_bits": int, "layers_type": str}
    )
    if record is None:
        return None
    return f"dequantized from {_describe_types(record)}"


def _describe_types(record: Mapping[str, Any]) -> str:
    """Describe the type of most weights and, where a large embedding decided that, the type of most in the layers."""
    overall, layers = (f"{record[f'{prefix}bits']} bits ({record[f'{prefix}type']})" for prefix in ("", "layers_"))
    return overall if layers == overall else f"{overall}, layers {layers}"


def _read_header(file: Path) -> tuple[dict[str, Any], Any, int]:
    """Return the types of most weights of a file and their bits, its license, and how many embeddings are padding.

    The types are those of all weights, and of the layers' alone.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(f"{file}: reading it needs the package gguf: {install_command('gguf')}") from error
    try:
        reader = GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    except Exception as error:  # its reader takes numbers from the file as they are, so it can raise anything
        damage = f"cut or damaged, or not GGUF ({_reason(error)}): copy or download it again"
        raise UserError(f"{file}: {LFS_REMEDY if is_lfs_pointer(file) else damage}") from error
    parts = fields.get("split.count", 0)
    if parts > 1:
        raise UserError(
            f"{file}: it is one of {parts} parts: give the whole file, which llama-gguf-split --merge makes"
        )
    types, of_layers = Counter[str](), Counter[str]()
    for tensor in reader.tensors:
        types[tensor.tensor_type.name] += int(tensor.n_elements)
        if tensor.name.startswith("blk."):
            of_layers[tensor.tensor_type.name] += int(tensor.n_elements)
    if not types:
        raise UserError(f"{file}: it has no weights: give the file of a whole model")
    rows = next((int(tensor.shape[-1]) for tensor in reader.tensors if tensor.name == "token_embd.weight"), 0)
    tokens = len(reader.fields["tokenizer.ggml.tokens"].data) if "tokenizer.ggml.tokens" in reader.fields else 0
    if tokens > rows:
        raise UserError(
            f"{file}: its tokenizer has {tokens:,} tokens and its embeddings have {rows:,} rows: give a whole model's "
            "file"
        )
    begins = reader.fields.get("tokenizer.ggml.add_bos_token")
    about: dict[str, Any] = {"add_bos_token": None if begins is None else bool(begins.contents())}
    for prefix, counts in (("", types), ("layers_", of_layers or types)):
        name = counts.most_common(1)[0][0]
        digits = re.search(r"\d+", name)
        assert digits is not None  # Q4_1, IQ2_XXS, BF16, ...
        about |= {f"{prefix}type": name, f"{prefix}bits": int(digits[0])}
    return about, fields.get("general.license"), rows - tokens


def _write_folder(file: Path, folder: Path, record: dict[str, Any], license: object) -> None:
    import torch
    import transformers
    from transformers import AutoConfig, AutoTokenizer, GgufConfig

    from llmdistill.models.families import is_causal
    from llmdistill.models.load import auto_class, build_meta

    # By itself transformers would keep the weights packed where it can.
    options = {"quantization_config": GgufConfig(dequantize=True)}
    work = Activity(f"Reading {file.name}")
    with new_proven_folder(folder) as part, tempfile.TemporaryDirectory() as alone, work, without_bars():
        # Load through a link in an empty folder: beside the file there may be the tokenizer or config of another model.
        link = Path(alone) / "model.gguf"
        link.symlink_to(file.resolve())
        source: dict[str, Any] = {"pretrained_model_name_or_path": alone, "gguf_file": link.name}
        try:
            config = AutoConfig.from_pretrained(**source)
            is_causal(config)
            tokenizer = AutoTokenizer.from_pretrained(**source)
            model, info = auto_class(config, "lm_head").from_pretrained(
                **source, **options, dtype=torch.float32, output_loading_info=True
            )
        except UserError:
            raise
        except Exception as error:  # transformers raises many types of error for what it does not know
            raise UserError(
                f"{file}: transformers {transformers.__version__} does not read this GGUF ({_reason(error)}): give the "
                "model's folder of safetensors, or try a newer transformers"
            ) from error
        if info["missing_keys"]:
            raise UserError(
                f"{file}: {len(info['missing_keys'])} weights are missing, such as {min(info['missing_keys'])}: "
                "give a whole file"
            )
        config = model.config
        # The weights are floats now.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        if isinstance(license, str):
            config.license = license  # the card of a student names it
        # A model of its own class, because transformers does not save the one that it has read.
        stock = build_meta(config, "lm_head")
        stock.load_state_dict(model.state_dict(), assign=True)
        stock.tie_weights()
        stock.generation_config = model.generation_config
        stock.save_pretrained(part)
        # transformers reads everything about the tokenizer from the file except add_bos_token.
        begins = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        if record["add_bos_token"] not in (None, begins):
            tokenizer.add_bos_token = record["add_bos_token"]  # type: ignore[misc]
        tokenizer.save_pretrained(part)
        # If the file names no unknown token, transformers adds GPT-2's behind the vocabulary, where the model has no
        # embedding.
        saved = read_json(part / "tokenizer.json")
        vocabulary = set(saved["model"]["vocab"].values())
        saved["added_tokens"] = [token for token in saved["added_tokens"] if token["id"] in vocabulary]
        write_json(part / "tokenizer.json", saved)
        write_json(part / RECORD, record)


@contextmanager
def without_bars() -> Iterator[None]:
    """Turn off the progress bars of transformers during the block, also those that its own switch leaves on."""
    from unittest.mock import patch

    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging

    were_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with patch.object(reader, "tqdm", partial(tqdm, disable=True), create=True):
            yield
    finally:
        if were_shown:
            logging.enable_progress_bar()


def _reason(error: Exception) -> str:
    return shorten(str(error) or type(error).__name__, 200, placeholder=" ...")
