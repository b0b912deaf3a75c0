"""Factorise loaded weights: a model in place, or a folder into a new folder (MaKD §3.1)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor
from tqdm import tqdm

from llmdistill.config import FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.factorize.budget import summarise
from llmdistill.factorize.checkpoint import copy_companions, load, local_folder
from llmdistill.factorize.hub import FactorizedConfig
from llmdistill.factorize.modules import base_name, install, matrix, tied_heads, token_embedding
from llmdistill.factorize.svd import place_sigma, truncated_svd
from llmdistill.files import new_folder
from llmdistill.models.load import Head, load_config, load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Sigma = Literal["left", "balanced"]


@torch.no_grad()
def factorize(
    model: PreTrainedModel,
    ranks: Mapping[str, int],
    *,
    sigma: Sigma = "left",
    embedding_rank: int | None = None,
    device: torch.device | None = None,
    progress: bool = False,
) -> None:
    """Replace each named linear, and the token embedding if asked, by its best rank-k product (MaKD eq. 11), in place.

    `ranks` is what `plan` gives. Each matrix is decomposed on `device` (where it is, without one), one at a time, so a
    model that no GPU holds can still use one. dtype and device of the model stay, the arithmetic is fp32 or finer; a
    tied head stays tied. save_pretrained then writes a student that from_pretrained loads. UserError if the model is
    factorised or quantised already, or has a matrix with values that are not finite.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        raise UserError(f"this {type(model).__name__} is factorised or quantised already; start from the dense teacher")
    base = model.base_model
    names = {base_name(model, name): rank for name, rank in ranks.items()}
    silent = None if progress else True  # None: tqdm is silent where there is no terminal
    factors = {
        name: _factors(name, matrix(base.get_submodule(name)), rank, sigma, device)
        for name, rank in tqdm(names.items(), desc="SVD", disable=silent)
    }
    embedding_factors = None if embedding_rank is None else _embedding_factors(model, embedding_rank, sigma, device)

    install(model, names, embedding_rank)
    low_rank: Any
    for name, (a, b) in factors.items():
        low_rank = base.get_submodule(name)
        low_rank.A.weight.copy_(a.T)
        low_rank.B.weight.copy_(b.T)
    if embedding_factors is not None:
        low_rank = model.get_input_embeddings()
        low_rank.A.weight.copy_(embedding_factors[0])
        low_rank.B.weight.copy_(embedding_factors[1])
    _unshare_config(model)
    model.config.quantization_config = FactorizedConfig("svd", names, embedding_rank)


def compress(
    model_dir: Path | str,
    output_dir: Path | str,
    settings: FactorizeConfig,
    *,
    device: torch.device | None = None,
    head: Head | None = None,
) -> dict[str, Any]:
    """Factorise the model of a folder into a new folder that from_pretrained loads, and return what `summarise` says.

    The model keeps its class and so its heads, unless `head` wants another (one that the folder lacks starts from
    random numbers), its dtype, its tokenizer and its generation settings. UserError for bad settings, unreadable
    folders and a folder to write to that is not empty, before the weights are read.
    """
    config = load_config(model_dir)
    summary = summarise(config, settings)
    with new_folder(output_dir) as folder:
        source = local_folder(model_dir)
        if head is None:
            model = load(source, config)
        else:
            model = load_model(source, dtype=cast("torch.dtype", "auto"), head=head, new_head=True)
        factorize(
            model,
            summary["ranks"],
            sigma=settings.sigma,
            embedding_rank=settings.embedding_rank,
            device=device,
            progress=True,
        )
        model.save_pretrained(folder)
        copy_companions(source, folder)
    return summary


def _unshare_config(model: PreTrainedModel) -> None:
    """Give the model a config of its own: one that a teacher shares must not call that teacher factorised."""
    shared = model.config
    own: Any = copy.deepcopy(shared)
    for module in model.modules():
        if vars(module).get("config") is shared:
            module.config = own


def _factors(name: str, weight: Tensor, rank: int, sigma: Sigma, device: torch.device | None) -> tuple[Tensor, Tensor]:
    """A (n, k) and B (k, m) of a matrix (n, m), where the matrix is."""
    if not weight.isfinite().all():
        raise UserError(f"the weight of {name} holds values that are not finite; the checkpoint is damaged")
    moved = weight if device is None else weight.to(device)
    a, b = place_sigma(*truncated_svd(moved, rank), sigma)
    return a.to(weight), b.to(weight)


def _embedding_factors(
    model: PreTrainedModel, rank: int, sigma: Sigma, device: torch.device | None
) -> tuple[Tensor, Tensor]:
    name, embedding = token_embedding(model)
    for head in tied_heads(model, name):
        if model.get_submodule(head).weight is not embedding.weight:
            raise UserError(
                f"the config ties {head} to the token embedding, but their weights differ; "
                "set tie_word_embeddings to false in config.json"
            )
    return _factors(name, embedding.weight, rank, sigma, device)
