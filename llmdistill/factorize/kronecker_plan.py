"""Plans which matrix becomes which Kronecker product, and counts the FLOPs of the linears."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from llmdistill.config import FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.factorize.counting import by_pattern, layer_linears
from llmdistill.factorize.install import features, tied_heads, token_embedding
from llmdistill.factorize.kronecker import (
    KroneckerShape,
    check_shape,
    dense_flops,
    kronecker_flops,
    parse_kronecker,
)
from llmdistill.factorize.kronecker_modules import check_columns
from llmdistill.models.load import auto_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DENSE = "dense"
"""Replaces a shape in the settings: linears that match the pattern stay dense."""


def plan_shapes(model: PreTrainedModel, settings: FactorizeConfig) -> dict[str, KroneckerShape]:
    """The shape of each linear that becomes a sum of Kronecker products, by module name; all other linears stay dense.

    Shapes are used exactly as given, even if the factors are larger than the matrix. Raises UserError if settings
    contradict each other or do not fit the model, and for a target, whose search needs the weights (`search`).
    """
    check_choice(settings)
    if settings.target_params is not None:
        raise UserError(
            f"target_params {settings.target_params} with the method kronecker needs the weights: run llmdistill "
            "compress --method kronecker --target_params with it, and give its output as student.model or the shapes "
            "it prints as student.factorize.shapes"
        )
    check_embedding(model, settings.embedding_columns)
    if settings.shapes is None:
        return {}
    linears = {name: features(module) for name, module in layer_linears(model).items()}
    _refuse_dense_head(model, settings, linears)
    shapes = {}
    for name, pattern, text in by_pattern(settings.shapes, linears, key="shapes"):
        if text != DENSE:
            key = f"shapes[{pattern!r}]"
            shape = parse_kronecker(text, settings.sums, key=key)
            check_shape(shape, *linears[name], where=f"{key} {text} for {name}")
            shapes[name] = shape
    return shapes


def check_choice(settings: FactorizeConfig) -> None:
    """Raises UserError unless exactly one of shapes and target_params is given, or embedding_columns alone."""
    given = [key for key in ("shapes", "target_params") if getattr(settings, key) is not None]
    if len(given) > 1 or not (given or settings.embedding_columns is not None):
        raise UserError(
            "give exactly one of shapes and target_params (or embedding_columns alone) for the method kronecker, "
            f"not {' and '.join(given) or 'none'}; null takes one back that a recipe sets"
        )
    if settings.max_flops is not None and settings.target_params is None:
        raise UserError(
            "max_flops bounds the search that target_params starts, and there is none: give target_params or leave "
            "max_flops out"
        )


def check_embedding(model: PreTrainedModel, columns: int | None) -> None:
    """Raises UserError if columns does not divide the width, or if the token embedding is no plain nn.Embedding."""
    if columns is not None:
        _, embedding = token_embedding(model)
        check_columns(columns, embedding.embedding_dim, where="embedding_columns")


def linear_flops(model: PreTrainedModel, shapes: Mapping[str, KroneckerShape]) -> dict[str, Any]:
    """FLOPs per token of the linears of the layers: with these shapes (eq. 7), and with all linears dense."""
    linears = {name: features(module) for name, module in layer_linears(model).items()}
    dense = {name: dense_flops(m, n) for name, (m, n) in linears.items()}
    changed = {name: kronecker_flops(*linears[name], shape) for name, shape in shapes.items()}
    return {
        "flops_per_token": sum((dense | changed).values()),
        "teacher_flops_per_token": sum(dense.values()),
    }


def _refuse_dense_head(model: PreTrainedModel, settings: FactorizeConfig, linears: Mapping[str, Any]) -> None:
    """Raises UserError if the settings keep a head dense that has no own matrix, as it is tied to the embedding."""
    assert settings.shapes is not None
    asked = [pattern for pattern, text in settings.shapes.items() if text == DENSE]
    asked = [pattern for pattern in asked if not any(fnmatchcase(name, pattern) for name in linears)]
    if settings.embedding_columns in (None, 1) or not asked:
        return
    whole = model
    if model.get_output_embeddings() is None:  # the model that papers count has no head if it is an encoder
        with torch.device("meta"):
            whole = auto_class(model.config, "lm_head").from_config(model.config, trust_remote_code=False)
    name, _ = token_embedding(whole)
    for head in tied_heads(whole, name):
        for pattern in asked:
            if fnmatchcase(head, pattern):
                raise UserError(
                    f"shapes[{pattern!r}] asks {head} to stay dense, but it is tied to the token embedding, which "
                    f"embedding_columns {settings.embedding_columns} compresses: leave one of the two out, or untie "
                    "them (tie_word_embeddings false in the teacher's config.json)"
                )
