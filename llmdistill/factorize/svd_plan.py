"""Plans which matrix gets which rank."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmdistill.config import FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.factorize.counting import Shape, by_pattern, count_parameters, layer_linears, parse_target
from llmdistill.factorize.install import features, token_embedding

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def plan_ranks(model: PreTrainedModel, settings: FactorizeConfig) -> dict[str, int]:
    """The rank of each linear that is to be factorized, by module name; all other linears stay dense.

    With a single rank, given or computed from a target, a linear that would not become smaller stays dense: k (n + m)
    >= n m. Ranks by pattern are used exactly as given. Raises UserError if settings contradict each other or do not fit
    the model.
    """
    given = [key for key in ("rank", "ranks", "target_params") if getattr(settings, key) is not None]
    if len(given) > 1 or not (given or settings.embedding_rank is not None):
        raise UserError(
            "give exactly one of rank, ranks and target_params (or embedding_rank alone), "
            f"not {' and '.join(given) or 'none'}; null takes one back that a recipe sets"
        )
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


def _cost(shape: Shape, rank: int) -> int:
    """Number of parameters of a matrix at a rank, or of the dense matrix if that is not more (without biases)."""
    m, n = shape
    return min(n * m, rank * (n + m))


def _shrinks(shape: Shape, rank: int) -> bool:
    m, n = shape
    return rank * (n + m) < n * m


def _check_rank(key: str, module: str, rank: int, shape: Shape) -> None:
    m, n = shape
    if not 1 <= rank <= min(n, m):
        raise UserError(
            f"{key} {rank} does not fit {module}, a {m}×{n} matrix: its rank can be from 1 to {min(n, m)}; "
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
    ranks = {}
    for name, pattern, rank in by_pattern(patterns, shapes, key="ranks"):
        _check_rank(f"ranks[{pattern!r}]", name, rank, shapes[name])
        ranks[name] = rank
    return ranks


def _plan_target(shapes: Mapping[str, Shape], target: int, fixed: int, settings: FactorizeConfig) -> dict[str, int]:
    """The largest single rank for which the linears and the `fixed` other parameters stay within the target."""

    def total(rank: int) -> int:
        return fixed + sum(_cost(shape, rank) for shape in shapes.values())

    largest = _largest_useful(shapes)
    rank = bisect_right(range(1, largest + 1), target, key=total)
    if rank == 0:
        remedy = "factorize the token embedding too" if settings.embedding_rank is None else "lower"
        raise UserError(
            f"target_params {settings.target_params} ({target:,}) is out of reach: ranks 1 to {largest} give "
            f"{total(1):,} to {total(largest):,} parameters; raise the target, or {remedy} (embedding_rank)"
        )
    return {name: rank for name, shape in shapes.items() if _shrinks(shape, rank)}


def _largest_useful(shapes: Mapping[str, Shape]) -> int:
    return max((n * m - 1) // (n + m) for m, n in shapes.values())


def _count_without(model: PreTrainedModel, shapes: Mapping[str, Shape], embedding_rank: int | None) -> int:
    """Number of parameters of the model without the matrices of these shapes, with the embedding at its rank."""
    rest = count_parameters(model) - sum(n * m for m, n in shapes.values())
    if embedding_rank is None:
        return rest
    # A tied head shares the factors as it shared the table, an untied head stays dense, so only the embedding changes
    # the count.
    _, embedding = token_embedding(model)
    vocabulary, width = embedding.num_embeddings, embedding.embedding_dim
    return rest - vocabulary * width + embedding_rank * (vocabulary + width)
