"""Which matrix gets which rank, and what the student then weighs; all of it from shapes, so the meta device will do."""

from __future__ import annotations

import difflib
import re
from bisect import bisect_right
from collections.abc import Mapping
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from llmdistill.config import FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.factorize.hub import install_saved
from llmdistill.factorize.modules import LINEAR_TYPES, features, install, is_factorised, token_embedding
from llmdistill.models.load import build_meta, load_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Shape = tuple[int, int]
"""Inputs n and outputs m of a matrix."""

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


def count_parameters(model: nn.Module) -> int:
    """Parameters of a model, each tied one once; also of one on the meta device or partitioned by ZeRO-3."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in model.parameters())


def build_reference(config: PreTrainedConfig) -> PreTrainedModel:
    """The model whose parameters papers count, on the meta device, factorised where its config says so.

    Base model (with pooler) for encoders, causal LM for decoders. UserError if the architecture is not supported.
    """
    model = build_meta(config)
    install_saved(model)
    return model


def layer_linears(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The linears of the transformer layers by name: every nn.Linear and Conv1D in an nn.ModuleList of the base model.

    Layers are kept in a list in every architecture, and what may not be factorised with them (embeddings, pooler,
    language-model head, classifier) stands outside of it or outside of the base model; so no table is needed.
    UserError if there is none.
    """
    base = model.base_model
    lists = [f"{name}." for name, module in base.named_modules() if isinstance(module, nn.ModuleList)]
    prefix = "" if base is model else f"{model.base_model_prefix}."
    found = {
        prefix + name: module
        for name, module in base.named_modules()
        if type(module) in LINEAR_TYPES and name.startswith(tuple(lists))
    }
    if not found:
        raise UserError(
            f"{type(model).__name__} holds no nn.Linear or Conv1D in a list of layers, so there is nothing to factorise"
        )
    return found


def plan(model: PreTrainedModel, settings: FactorizeConfig) -> dict[str, int]:
    """The rank of each linear that is to be factorised, by module name; linears left out stay dense.

    One rank, also one solved for a target, leaves dense what it would not shrink: k (n + m) >= n m. Ranks by pattern
    are taken literally. UserError for settings that contradict each other or do not fit the model.
    """
    given = [key for key in ("rank", "ranks", "target_params") if getattr(settings, key) is not None]
    if len(given) > 1 or not (given or settings.embedding_rank is not None):
        raise UserError(
            "give exactly one of rank, ranks and target_params (or embedding_rank alone), "
            f"not {' and '.join(given) or 'none'}; null takes one back that a recipe sets"
        )
    if is_factorised(model):
        raise UserError(f"this {type(model).__name__} is factorised already; start from the dense teacher")
    if settings.embedding_rank is not None:
        _, embedding = token_embedding(model)
        shape = embedding.num_embeddings, embedding.embedding_dim
        _check_rank("embedding_rank", "the token embedding", settings.embedding_rank, shape)
    shapes = {name: features(module) for name, module in layer_linears(model).items()}
    if settings.ranks is not None:
        return _plan_patterns(shapes, settings.ranks)
    if settings.rank is not None:
        return _plan_rank(shapes, settings.rank)
    if settings.target_params is not None:
        target = parse_target(settings.target_params, count_parameters(model))
        return _plan_target(shapes, target, _count_without(model, shapes, settings.embedding_rank), settings)
    return {}


def parse_target(text: str | int, teacher_params: int) -> int:
    """Parameters meant by "690000000", "0.69B", "77.25M" or "62%" (of the teacher). UserError for anything else."""
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?|\.[0-9]+)\s*([KMB%]?)\s*", str(text), re.IGNORECASE)
    if match is None:
        raise UserError(f"target_params {text!r} is no number of parameters; write 690000000, 0.69B, 77.25M or 62%")
    number, suffix = Decimal(match[1].replace("_", "")), match[2].upper()
    target = int(number * teacher_params / 100) if suffix == "%" else int(number * _SUFFIXES[suffix])
    if target >= teacher_params:
        raise UserError(
            f"target_params {text} is not below the model's own {teacher_params:,}; nothing would be compressed"
        )
    return target


def summarise(model: Path | str | PreTrainedConfig, settings: FactorizeConfig) -> dict[str, Any]:
    """What a factorisation would give, from a folder's config.json (or a config) alone, without weights.

    Keys: method, model_type, teacher_params, student_params, ratio, rank (None where ranks differ), ranks by module,
    dense (linears of the layers that stay as they are), embedding_rank. Parameters are those of the base model for
    encoders, of the causal language model for decoders.
    """
    config = load_config(model) if isinstance(model, Path | str) else model
    reference = build_reference(config)
    teacher_params = count_parameters(reference)
    linears = list(layer_linears(reference))
    ranks = plan(reference, settings)
    install(reference, ranks, settings.embedding_rank)
    student_params = count_parameters(reference)
    distinct = set(ranks.values())
    return {
        "method": "svd",
        "model_type": config.model_type,
        "teacher_params": teacher_params,
        "student_params": student_params,
        "ratio": student_params / teacher_params,
        "rank": distinct.pop() if len(distinct) == 1 else None,
        "ranks": ranks,
        "dense": [name for name in linears if name not in ranks],
        "embedding_rank": settings.embedding_rank,
    }


def _cost(shape: Shape, rank: int) -> int:
    """Parameters of a matrix at a rank, or of the dense matrix where that is no more (biases aside)."""
    n, m = shape
    return min(n * m, rank * (n + m))


def _shrinks(shape: Shape, rank: int) -> bool:
    n, m = shape
    return rank * (n + m) < n * m


def _check_rank(key: str, module: str, rank: int, shape: Shape) -> None:
    n, m = shape
    if not 1 <= rank <= min(n, m):
        raise UserError(
            f"{key} {rank} does not fit {module}, a {n}×{m} matrix: its rank can be from 1 to {min(n, m)}; "
            "take a smaller one, or give ranks by module pattern"
        )


def _plan_rank(shapes: Mapping[str, Shape], rank: int) -> dict[str, int]:
    for name, shape in shapes.items():
        _check_rank("rank", name, rank, shape)
    ranks = {name: rank for name, shape in shapes.items() if _shrinks(shape, rank)}
    if not ranks:
        raise UserError(
            f"rank {rank} makes no matrix smaller; the largest that does in this model is {_largest_useful(shapes)}"
        )
    return ranks


def _plan_patterns(shapes: Mapping[str, Shape], patterns: Mapping[str, int]) -> dict[str, int]:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in shapes):
            near = difflib.get_close_matches(pattern, shapes, n=3, cutoff=0) or list(shapes)[:3]
            raise UserError(
                f"pattern {pattern!r} in ranks matches no linear of the transformer layers; the nearest are "
                f"{', '.join(near)} (a pattern covers the whole name: *.q_proj)"
            )
    ranks = {}
    for name, shape in shapes.items():
        for pattern, rank in patterns.items():
            if fnmatchcase(name, pattern):
                _check_rank(f"ranks[{pattern!r}]", name, rank, shape)
                ranks[name] = rank
                break
    return ranks


def _plan_target(shapes: Mapping[str, Shape], target: int, fixed: int, settings: FactorizeConfig) -> dict[str, int]:
    """The largest single rank with which the linears and the `fixed` rest stay within the target."""

    def total(rank: int) -> int:
        return fixed + sum(_cost(shape, rank) for shape in shapes.values())

    largest = _largest_useful(shapes)
    rank = bisect_right(range(1, largest + 1), target, key=total)
    if rank == 0:
        remedy = "factorise the token embedding too" if settings.embedding_rank is None else "lower"
        raise UserError(
            f"target_params {settings.target_params} ({target:,}) is out of reach: ranks 1 to {largest} give "
            f"{total(1):,} to {total(largest):,} parameters; raise the target, or {remedy} (embedding_rank)"
        )
    return {name: rank for name, shape in shapes.items() if _shrinks(shape, rank)}


def _largest_useful(shapes: Mapping[str, Shape]) -> int:
    return max((n * m - 1) // (n + m) for n, m in shapes.values())


def _count_without(model: PreTrainedModel, shapes: Mapping[str, Shape], embedding_rank: int | None) -> int:
    """Parameters of the model but for the matrices of those shapes, with the embedding at its rank."""
    rest = count_parameters(model) - sum(n * m for n, m in shapes.values())
    if embedding_rank is None:
        return rest
    # A tied head shares the factors as it shared the table, an untied one stays dense: either way only this changes.
    _, embedding = token_embedding(model)
    vocabulary, width = embedding.num_embeddings, embedding.embedding_dim
    return rest - vocabulary * width + embedding_rank * (vocabulary + width)
