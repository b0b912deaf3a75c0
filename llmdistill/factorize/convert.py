"""Factorizes loaded weights: a model in place, or the model of a folder into a new folder (MaKD §3.1)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from tqdm import tqdm

from llmdistill.config import FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.factorize.budget import describe
from llmdistill.factorize.checkpoint import copy_companions, load, local_folder
from llmdistill.factorize.hub import FactorizedConfig
from llmdistill.factorize.install import base_name, install, matrix, tied_heads, token_embedding
from llmdistill.factorize.kinds import FactorizationKind, Sigma, Size, kind_of
from llmdistill.factorize.kronecker_search import needs_search, search, search_folder
from llmdistill.files import new_folder
from llmdistill.models.configs import load_config
from llmdistill.models.load import Head, load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def factorize(
    model: PreTrainedModel,
    sizes: Mapping[str, Size],
    *,
    method: str = "svd",
    embedding: int | None = None,
    sigma: Sigma = "left",
    device: torch.device | None = None,
    progress: bool = False,
) -> None:
    """Replace the named linears, and optionally the token embedding, by their best approximations, in place.

    svd gives the best approximation of a rank (MaKD eq. 11), kronecker the best of a Kronecker shape (KroneckerBERT eq.
    2-5). `sizes` is the result of `plan`, `embedding` the rank or the columns; `sigma` is used by svd only. Each matrix
    is decomposed on `device` (by default where the matrix is), one at a time, so a GPU can be used even if it cannot
    hold the model. dtype and device of the model stay the same, the arithmetic is fp32 or finer; a tied head stays
    tied. save_pretrained then writes a student that from_pretrained loads. Raises UserError if the model is already
    factorized or quantised, or if a matrix has values that are not finite.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        raise UserError(f"this {type(model).__name__} is factorized or quantised already; start from the dense teacher")
    base = model.base_model
    kind = kind_of(method)
    names = {base_name(model, name): size for name, size in sizes.items()}
    silent = None if progress else True  # None: tqdm is silent if there is no terminal
    factors = {
        name: _factors(kind.factors, name, matrix(base.get_submodule(name)), size, sigma, device)
        for name, size in tqdm(names.items(), desc=method, disable=silent)
    }
    of_embedding = {} if embedding is None else _embedding_factors(kind, model, embedding, sigma, device)

    install(model, names, embedding, method)
    for name, values in factors.items():
        _fill(base.get_submodule(name), values)
    _fill(model.get_input_embeddings(), of_embedding)
    _unshare_config(model)
    of_config: dict[str, Any] = {"modules": names, kind.embedding_key: embedding}
    model.config.quantization_config = FactorizedConfig(method, **of_config)


def compress_model(
    model: PreTrainedModel,
    settings: FactorizeConfig,
    method: str = "svd",
    *,
    device: torch.device | None = None,
    in_place: bool = False,
) -> PreTrainedModel:
    """A factorized copy of a loaded model, or the factorized model itself if `in_place` is set.

    Args:
        model: a dense model with any head; the copy has the same dtype, device and mode.
        settings: the sizes; for a target of kronecker `search` chooses them.
        method: svd or kronecker.
        device: the device on which matrices are decomposed; None decomposes each matrix where it is.
        in_place: whether to change the model instead of a copy.

    Raises:
        UserError: settings contradict each other or do not fit the model, or the model is already factorized.
    """
    if needs_search(settings, method):
        settings = search(model, settings, device=device)[0].settings
    _, factorization = describe(copy.deepcopy(model.config), settings, method)
    student = model if in_place else _copy_without(model, factorization.sizes)
    factorize(
        student,
        factorization.sizes,
        method=method,
        embedding=factorization.embedding,
        sigma=settings.sigma,
        device=device,
        progress=True,
    )
    return student.train(model.training)


def _copy_without(model: PreTrainedModel, names: Iterable[str]) -> PreTrainedModel:
    """A copy that shares the weights of the named linears with the model, because these will be replaced."""
    linears = [model.base_model.get_submodule(base_name(model, name)) for name in names]
    return copy.deepcopy(model, {id(linear.weight): linear.weight for linear in linears})


def compress(
    model_dir: Path | str,
    output_dir: Path | str,
    settings: FactorizeConfig,
    method: str = "svd",
    *,
    device: torch.device | None = None,
    head: Head | None = None,
) -> dict[str, Any]:
    """Factorize the model of a folder into a new folder that from_pretrained loads; returns what `summarise` does.

    The model keeps its dtype, its tokenizer, its generation settings, and its class with its heads, unless `head` asks
    for another head (a head that the folder lacks gets random weights). Raises UserError for invalid settings,
    unreadable folders and an output folder that is not empty, before the weights are read; only a target of kronecker
    reads the weights first (`search`).
    """
    config = load_config(model_dir)
    if needs_search(settings, method):
        settings = search_folder(model_dir, settings, device=device)[0].settings
    summary, factorization = describe(config, settings, method)
    with new_folder(output_dir) as folder:
        source = local_folder(model_dir)
        if head is None:
            model = load(source, config)
        else:
            model = load_model(source, dtype=cast("torch.dtype", "auto"), head=head, new_head=True)
        factorize(
            model,
            factorization.sizes,
            method=method,
            embedding=factorization.embedding,
            sigma=settings.sigma,
            device=device,
            progress=True,
        )
        model.save_pretrained(folder)
        copy_companions(source, folder)
    return summary


def _unshare_config(model: PreTrainedModel) -> None:
    """Give the model its own config: a config shared with the teacher must not describe the teacher as factorized."""
    shared = model.config
    own: Any = copy.deepcopy(shared)
    for module in model.modules():
        if vars(module).get("config") is shared:
            module.config = own


def _fill(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        module.get_parameter(name).copy_(value)


def _factors(
    best: Callable[[Tensor, Any, Sigma], dict[str, Tensor]],
    name: str,
    weight: Tensor,
    size: Size,
    sigma: Sigma,
    device: torch.device | None,
) -> dict[str, Tensor]:
    """The values of a module's parameters, on the device of the weight."""
    if not weight.isfinite().all():
        raise UserError(f"the weight of {name} holds values that are not finite; the checkpoint is damaged")
    moved = weight if device is None else weight.to(device)
    return {key: value.to(weight) for key, value in best(moved, size, sigma).items()}


def _embedding_factors(
    kind: FactorizationKind, model: PreTrainedModel, size: int, sigma: Sigma, device: torch.device | None
) -> dict[str, Tensor]:
    name, embedding = token_embedding(model)
    for head in tied_heads(model, name):
        if model.get_submodule(head).weight is not embedding.weight:
            raise UserError(
                f"the config ties {head} to the token embedding, but their weights differ; "
                "set tie_word_embeddings to false in config.json"
            )
    return _factors(kind.embedding_factors, name, embedding.weight, size, sigma, device)
