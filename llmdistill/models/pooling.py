"""Sentence embeddings: the files of sentence-transformers, and the pooling of an encoder's outputs."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from llmdistill.errors import UserError
from llmdistill.files import is_outside, read_json, write_json
from llmdistill.models.companions import MODULES_FILE, download, read_modules
from llmdistill.objective import Pooling, PoolingMode

_LEGACY: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of older versions of sentence-transformers, in the order in which the results of several are side by side."""
_TEXT_FILE, _FURTHER_FILE = "sentence_bert_config.json", "config_sentence_transformers.json"
DENSE = "sentence_dense"
"""The attribute of a model under which its Dense is: a linear and an activation after the pooling, whose weights have a
folder of their own beside those of the model."""
_ACTIVATIONS = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in (nn.Identity, nn.Tanh)}
_KINDS = ("Transformer", "Pooling", "Dense", "Normalize")
"""The modules that a model may have, in this order; only Dense and Normalize may be missing."""
_DENSE_FILES = ("config.json", "model.safetensors")


@dataclass(frozen=True, kw_only=True)
class SentenceSettings:
    """How a model of sentence-transformers makes the embedding of a sentence."""

    pooling: Pooling
    max_length: int | None
    """Largest number of tokens of a sentence, special tokens included; None if the files say nothing."""
    prompt: str = ""
    """Text that comes before every sentence."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that the files name for other uses, such as query and document; `prompt` is one of them or empty."""
    lower_case: bool = False
    """Whether sentences are made lower case before they are tokenized."""

    def text(self, sentence: str) -> str:
        """Return the text that is tokenized for a sentence."""
        text = self.prompt + sentence
        return text.lower() if self.lower_case else text


def read_sentence_settings(source: Path | str) -> SentenceSettings | None:
    """Read the settings in the folder or hub name of a model; None without modules.json.

    Raises:
        UserError: the model does more than pooling and normalization, or a file is malformed.
    """
    folder = download(source, weights=False)  # a plan reads them
    modules = _module_folders(folder)
    if not modules:
        return None
    at_pooling = modules["Pooling"] / "config.json"
    of_text, further = _read_optional(folder / _TEXT_FILE), _read_optional(folder / _FURTHER_FILE)
    name = further.get("default_prompt_name")
    longest, prompts = of_text.get("max_seq_length"), further.get("prompts") or {}
    if longest is not None and (type(longest) is not int or longest < 1):
        raise UserError(
            f"{folder / _TEXT_FILE}: max_seq_length is {longest!r}; give a number of tokens from 1, or remove the key"
        )
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise UserError(f"{folder / _FURTHER_FILE}: prompts is no object of texts; copy the file from the model anew")
    prompts = {key: text or "" for key, text in prompts.items()}
    # sentence-transformers does not load such a model; query and document are empty there by default.
    if name is not None and str(name) not in {*prompts, "query", "document"}:
        raise UserError(
            f"{folder / _FURTHER_FILE}: default_prompt_name is {name!r}, which is none of prompts "
            f"({', '.join(prompts) or 'there are none'}); correct it, or remove the key"
        )
    of_pooling = _read_optional(at_pooling)
    modes = of_pooling.get("pooling_mode")
    if modes is None:  # written by an older version of sentence-transformers
        modes = [mode for key, mode in _LEGACY.items() if of_pooling.get(key)] or ["mean"]
    names = tuple(modes) if isinstance(modes, list) else (modes,)
    if not names or any(name not in get_args(PoolingMode) for name in names):
        raise UserError(f"{at_pooling}: pooling_mode is {modes}; take {', '.join(get_args(PoolingMode))}")
    if of_pooling.get("include_prompt") is False:
        raise UserError(
            f"{at_pooling}: include_prompt is false, and prompts are always pooled here; take another model"
        )
    return SentenceSettings(
        pooling=Pooling(names, normalize="Normalize" in modules),
        max_length=longest,
        prompt="" if name is None else prompts.get(str(name), ""),
        prompts=prompts,
        lower_case=bool(of_text.get("do_lower_case")),
    )


def _module_folders(folder: Path) -> dict[str, Path]:
    """Return the folder of each module of a model, by its kind; none without modules.json."""
    file, modules = folder / MODULES_FILE, read_modules(folder)
    if not file.is_file():
        return {}
    kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or kinds != [kind for kind in _KINDS if kind in kinds]:
        raise UserError(
            f"{file}: the modules are {', '.join(kinds) or 'none'}, but embeddings are made here by Transformer, "
            "Pooling and perhaps one Dense and Normalize; take a model without other modules"
        )
    paths = [module.get("path") or "" for module in modules]
    outside = [
        path for path in paths if any(is_outside(folder, os.path.join(path, name)) for name in ("", *_DENSE_FILES))
    ]
    if outside:
        raise UserError(
            f"{file}: it names the module {outside[0]!r}, whose files are not in the model's folder; copy the "
            "model anew"
        )
    return {kind: folder / path for kind, path in zip(kinds, paths, strict=True)}


def has_dense(source: Path | str) -> bool:
    """Return whether the folder or hub name of a model has a Dense."""
    return "Dense" in _module_folders(download(source, weights=False))


def dense_width(source: Path | str) -> int | None:
    """Return the width of the embeddings that a Dense makes, by its config; None without a Dense."""
    folder = _module_folders(download(source, weights=False)).get("Dense")
    return None if folder is None else _read_optional(folder / _DENSE_FILES[0]).get("out_features")


def dense_of(linear: nn.Linear, activation: nn.Module) -> nn.Sequential:
    """Return a Dense, whose parameters have the names that they have in sentence-transformers."""
    return nn.Sequential(OrderedDict(linear=linear, activation=activation))


def load_dense(model: PreTrainedModel, source: Path | str) -> None:
    """Give a model the Dense in its folder or under its hub name, if there is one, as its submodule DENSE.

    Raises:
        UserError: the Dense is not a linear with an activation of _ACTIVATIONS, or a file is malformed.
    """
    folder = _module_folders(download(source)).get("Dense")
    if folder is None:
        return
    config = _read_optional(folder / _DENSE_FILES[0])
    activation, name = config.get("activation_function"), config.get("module_input_name", "sentence_embedding")
    is_plain = config.get("module_output_name", name) == name == "sentence_embedding" and not config.get("use_residual")
    if activation not in _ACTIVATIONS or not is_plain:
        raise UserError(
            f"{folder / _DENSE_FILES[0]}: a Dense is read as a linear of the pooled embedding with one of the "
            f"activations {', '.join(_ACTIVATIONS)}; take another model"
        )
    try:
        weights = load_file(folder / _DENSE_FILES[1])
        out_features, in_features = weights["linear.weight"].shape
        linear = nn.Linear(in_features, out_features, bias="linear.bias" in weights)
        dense = dense_of(linear, _ACTIVATIONS[activation]())
        dense.load_state_dict(weights)
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{folder / _DENSE_FILES[1]}: not the weights of a Dense ({error}); copy the folder from the model anew"
        ) from error
    model.add_module(DENSE, dense.to(model.device, model.dtype))


def save_pooling(folder: Path, width: int, pooling: Pooling, *, has_dense: bool = False) -> dict[str, Path]:
    """Write the modules of a model into its folder, as sentence-transformers 6.2 does, and return theirs by kind.

    `width` is that of a token's output. The types of the modules have the names that older versions know too.
    """
    left_out = {"Normalize": not pooling.normalize, "Dense": not has_dense}
    kinds = [kind for kind in _KINDS if not left_out.get(kind)]
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], start=1))]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    write_json(folder / MODULES_FILE, modules)
    for path in paths:
        (folder / path).mkdir(exist_ok=True)
    modes = {key: mode in pooling.modes for key, mode in _LEGACY.items()}
    write_json(folder / paths[1] / "config.json", {"word_embedding_dimension": width, **modes})
    return {kind: folder / path for kind, path in zip(kinds, paths, strict=True)}


def save_dense(folder: Path, dense: nn.Module, weights: Mapping[str, Tensor], pooling: Pooling) -> None:
    """Write the modules of a model with a Dense into its folder.

    `dense` is what `dense_of` returned, whose parameters may be sharded, and `weights` are these parameters.
    """
    linear, activation = cast(nn.Linear, dense.linear), dense.activation
    own = save_pooling(folder, linear.in_features // len(pooling.modes), pooling, has_dense=True)["Dense"]
    config = {
        "in_features": linear.in_features,
        "out_features": linear.out_features,
        "bias": linear.bias is not None,
        "activation_function": f"{type(activation).__module__}.{type(activation).__qualname__}",
        "module_input_name": "sentence_embedding",
        "module_output_name": "sentence_embedding",
    }
    write_json(own / _DENSE_FILES[0], config)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, own / _DENSE_FILES[1])


def _read_optional(file: Path) -> Mapping[str, Any]:
    values = read_json(file) if file.is_file() else {}
    if not isinstance(values, dict):
        raise UserError(f"{file}: a {type(values).__name__}, not an object; copy the file from the model anew")
    return values


class SentencePooler:
    """Makes the embeddings of sentences inside a model's forward pass, where the parameters of its Dense are gathered.

    Outside of it, ZeRO-3 would start its record of the order of modules anew, and FSDP have no whole parameters.
    """

    embeddings: Tensor
    """The embeddings of the last batch, (B, W)."""
    projected: Tensor | None
    """These embeddings mapped by the projector, (B, W'); None without a projector."""

    def __init__(self, model: PreTrainedModel, pooling: Pooling, projector: nn.Module | None = None) -> None:
        """Hook into a model, whose Dense is used if it has one.

        `projector` maps the embeddings to the teacher's width while they are learned, and is no part of the model.
        """
        self._pooling, self._projector = pooling, projector
        self._attention_mask: Tensor | None = None
        # Before the hooks of DeepSpeed, which end the forward pass.
        self._handle = model.register_forward_hook(self._pool, prepend=True)

    @contextmanager
    def pooling(self, attention_mask: Tensor) -> Iterator[None]:
        """Make the embeddings of the forward pass in this block."""
        self._attention_mask = attention_mask
        try:
            yield
        finally:
            self._attention_mask = None

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()

    def _pool(self, model: nn.Module, _: Any, result: Any) -> None:
        if self._attention_mask is None:
            return
        dense = getattr(model, DENSE, None)
        self.embeddings = pool_tokens(result.last_hidden_state, self._attention_mask, self._pooling, dense)
        self.projected = None
        if self._projector is not None:
            self.projected = _map_and_normalize(self.embeddings, self._projector, self._pooling)


def pool_tokens(hidden_BTW: Tensor, attention_mask: Tensor, pooling: Pooling, dense: nn.Module | None = None) -> Tensor:
    """Return the embeddings of sentences, (B, W), or (B, modes x W) if there are several modes; at least fp32.

    Args:
        hidden_BTW: the outputs of the model's last layer.
        attention_mask: (B, T), 1 at real tokens and 0 at padding, which may be on either side.
        pooling: the modes of sentence-transformers' Pooling, and whether the result is normalized.
        dense: maps the pooled embedding before that, to (B, W').
    """
    # Fill with zeros instead of multiplying by the mask: padding may hold NaN, and NaN times 0 is NaN.
    is_real_BT1 = attention_mask.bool()[:, :, None]
    hidden_BTW = hidden_BTW.to(torch.promote_types(hidden_BTW.dtype, torch.float32)).masked_fill(~is_real_BT1, 0.0)
    length, real_BT1 = hidden_BTW.shape[1], is_real_BT1.to(hidden_BTW.dtype)
    parts: list[Tensor] = []
    for mode in pooling.modes:
        if mode == "max":
            parts.append(hidden_BTW.masked_fill(~is_real_BT1, float("-inf")).amax(1))
        elif mode in ("cls", "lasttoken"):
            # argmax finds the first real token, because padding may be on the left.
            real_BT = is_real_BT1[:, :, 0].int()
            at_B = real_BT.argmax(1) if mode == "cls" else length - 1 - real_BT.flip(1).argmax(1)
            parts.append(hidden_BTW.gather(1, at_B[:, None, None].expand(-1, 1, hidden_BTW.shape[2]))[:, 0])
        else:
            # The weight of a token is its number in its sentence, from 1.
            weights_BT1 = real_BT1 * real_BT1.cumsum(1) if mode == "weightedmean" else real_BT1
            divisor_B1 = weights_BT1.sum(1).clamp(min=1e-9)  # as in sentence-transformers
            # (B, 1), so that it divides (B, W)
            divisor_B1 = divisor_B1.sqrt() if mode == "mean_sqrt_len_tokens" else divisor_B1
            parts.append((hidden_BTW * weights_BT1).sum(1) / divisor_B1)
    return _map_and_normalize(torch.cat(parts, dim=-1), dense, pooling)


def _map_and_normalize(embedding_BW: Tensor, matrix: nn.Module | None, pooling: Pooling) -> Tensor:
    """Map embeddings by a matrix, which may be in bf16, and normalize them if the pooling does."""
    if matrix is not None:
        dtype = next(matrix.parameters()).dtype
        embedding_BW = matrix(embedding_BW.to(dtype)).to(embedding_BW.dtype)
    return functional.normalize(embedding_BW, dim=-1) if pooling.normalize else embedding_BW
