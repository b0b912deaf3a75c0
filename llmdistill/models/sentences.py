"""Sentence embeddings: the settings in a folder of sentence-transformers, and the pooling of an encoder's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional

from llmdistill.errors import UserError
from llmdistill.files import read_json
from llmdistill.models.companions import MODULES_FILE, downloaded
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
_SMALLEST = 1e-9
"""The least divisor of a mean, as in sentence-transformers."""


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
    folder = downloaded(source, weights=False)  # a plan reads them
    if not (folder / MODULES_FILE).is_file():
        return None
    modules = read_json(folder / MODULES_FILE)
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise UserError(f"{folder / MODULES_FILE}: not a list of modules; copy the file from the model anew")
    kinds = [str(each.get("type")).rpartition(".")[2] for each in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(
            f"{folder / MODULES_FILE}: the modules are {', '.join(kinds) or 'none'}, but embeddings are distilled from "
            "Transformer, Pooling and perhaps Normalize; take a model without other modules"
        )
    at_pooling = folder / str(modules[1].get("path") or "") / "config.json"
    of_text, further = _optional(folder / _TEXT_FILE), _optional(folder / _FURTHER_FILE)
    name = further.get("default_prompt_name")
    longest, prompts = of_text.get("max_seq_length"), further.get("prompts") or {}
    if longest is not None and (type(longest) is not int or longest < 1):
        raise UserError(
            f"{folder / _TEXT_FILE}: max_seq_length is {longest!r}; give a number of tokens from 1, or remove the key"
        )
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise UserError(f"{folder / _FURTHER_FILE}: prompts is no object of texts; copy the file from the model anew")
    prompts = {key: text or "" for key, text in prompts.items()}
    return SentenceSettings(
        pooling=Pooling(_modes(_optional(at_pooling), at_pooling), normalize="Normalize" in kinds),
        max_length=longest,
        prompt="" if name is None else prompts.get(str(name), ""),
        prompts=prompts,
        lower_case=bool(of_text.get("do_lower_case")),
    )


def _optional(file: Path) -> Mapping[str, Any]:
    values = read_json(file) if file.is_file() else {}
    if not isinstance(values, dict):
        raise UserError(f"{file}: a {type(values).__name__}, not an object; copy the file from the model anew")
    return values


def _modes(settings: Mapping[str, Any], file: Path) -> tuple[PoolingMode, ...]:
    """Return the modes of a pooling file, of any version of sentence-transformers; mean without any."""
    given = settings.get("pooling_mode")
    if given is None:
        given = [mode for key, mode in _LEGACY.items() if settings.get(key)] or ["mean"]
    modes = tuple(given) if isinstance(given, list) else (given,)
    unknown = [mode for mode in modes if mode not in get_args(PoolingMode)]
    if unknown or not modes:
        raise UserError(f"{file}: pooling_mode is {given}; take {', '.join(get_args(PoolingMode))}")
    if settings.get("include_prompt") is False:
        raise UserError(f"{file}: include_prompt is false, and prompts are always pooled here; take another model")
    return modes


def pooled(hidden_BTW: Tensor, attention_mask: Tensor, pooling: Pooling) -> Tensor:
    """Return the embeddings of sentences, (B, W), or (B, modes x W) if there are several modes; at least fp32.

    Args:
        hidden_BTW: the outputs of the model's last layer.
        attention_mask: (B, T), 1 at real tokens and 0 at padding, which may be on either side.
        pooling: the modes of sentence-transformers' Pooling, and whether the result is normalized.
    """
    # Padding may hold NaN, which a product with 0 would keep.
    is_real_BT1 = attention_mask.bool()[:, :, None]
    hidden_BTW = hidden_BTW.to(torch.promote_types(hidden_BTW.dtype, torch.float32)).masked_fill(~is_real_BT1, 0.0)
    embedding = torch.cat([_pool(hidden_BTW, is_real_BT1, mode) for mode in pooling.modes], dim=-1)
    return functional.normalize(embedding, dim=-1) if pooling.normalize else embedding


def _pool(hidden_BTW: Tensor, is_real_BT1: Tensor, mode: PoolingMode) -> Tensor:
    length = hidden_BTW.shape[1]
    real_BT1 = is_real_BT1.to(hidden_BTW.dtype)
    if mode == "max":
        return hidden_BTW.masked_fill(~is_real_BT1, float("-inf")).amax(1)
    if mode in ("cls", "lasttoken"):
        real_BT = is_real_BT1[:, :, 0].int()
        at_B = real_BT.argmax(1) if mode == "cls" else length - 1 - real_BT.flip(1).argmax(1)
        return hidden_BTW.gather(1, at_B[:, None, None].expand(-1, 1, hidden_BTW.shape[2]))[:, 0]
    # The weight of a token is its number in its sentence, from 1.
    weights_BT1 = real_BT1 * real_BT1.cumsum(1) if mode == "weightedmean" else real_BT1
    divisor_B1 = weights_BT1.sum(1).clamp(min=_SMALLEST)
    return (hidden_BTW * weights_BT1).sum(1) / (divisor_B1.sqrt() if mode == "mean_sqrt_len_tokens" else divisor_B1)
