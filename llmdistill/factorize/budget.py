"""Plans a factorization and counts the parameters of the student; a model on the meta device is enough."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmdistill.config import FactorizeConfig
from llmdistill.errors import UserError
from llmdistill.factorize.counting import build_reference, count_parameters, forward_flops, layer_linears
from llmdistill.factorize.install import install, is_factorized
from llmdistill.factorize.kinds import Size, kind_of
from llmdistill.factorize.kronecker import KroneckerShape
from llmdistill.factorize.kronecker_plan import linear_flops, plan_shapes
from llmdistill.factorize.svd_plan import plan_ranks
from llmdistill.models.configs import load_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PLANS: dict[str, Any] = {"svd": plan_ranks, "kronecker": plan_shapes}
"""Method -> the function that computes the sizes of a model's linears from the settings."""
SETTINGS: dict[str, tuple[str, ...]] = {
    "svd": ("rank", "ranks", "target_params", "embedding_rank", "sigma"),
    "kronecker": ("shapes", "sums", "target_params", "max_flops", "embedding_columns"),
}
"""Method -> the settings that it uses."""


@dataclass(frozen=True, kw_only=True)
class Factorization:
    """A planned factorization of a model."""

    sizes: dict[str, Any]
    """Rank or shape by the name of the linear; all other linears stay dense."""
    embedding: int | None
    """Rank or columns of the token embedding; None keeps it dense."""


def plan(model: PreTrainedModel, settings: FactorizeConfig, method: str = "svd") -> dict[str, Any]:
    """The size of each linear that is to be factorized, by module name: a rank or a KroneckerShape.

    All other linears stay dense. Raises UserError if the settings are those of another method, contradict each other or
    do not fit the model, or if the model is already factorized.
    """
    check_settings(settings, method)
    if is_factorized(model):
        raise UserError(f"this {type(model).__name__} is factorized already; start from the dense teacher")
    sizes: dict[str, Size] = PLANS[method](model, settings)
    return sizes


def check_settings(settings: FactorizeConfig, method: str) -> None:
    """Raises UserError for a setting that only another method uses."""
    kind_of(method)
    for field in fields(FactorizeConfig):
        if field.name not in SETTINGS[method] and getattr(settings, field.name) != field.default:
            others = [other for other, names in SETTINGS.items() if field.name in names]
            raise UserError(
                f"{field.name} is a setting of the method {' or '.join(others)}, but the method is {method}, which "
                f"takes {', '.join(SETTINGS[method])}: set {field.name} back to {_yaml(field.default)}, or change the "
                "method"
            )


def embedding_size(settings: FactorizeConfig, method: str) -> int | None:
    """Rank or columns of the token embedding; None if it stays dense."""
    kind = kind_of(method)
    size: int | None = getattr(settings, kind.embedding_key)
    return None if size == kind.dense_embedding else size


def summarise(model: Path | str | PreTrainedConfig, settings: FactorizeConfig, method: str = "svd") -> dict[str, Any]:
    """Summarise a planned factorization, from the config.json of a folder (or a config) alone, without weights.

    Keys: method, model_type, teacher_params, student_params, ratio, forward_flops (of the student, for one token),
    dense (linears of the layers that stay dense); for svd rank (None if ranks differ), ranks by module, embedding_rank;
    for kronecker shapes by module ([m1, n1, sums]), embedding_columns, flops_per_token and teacher_flops_per_token (of
    the layers' linears, by eq. 7). Parameters are counted in the base model for encoders, and in the causal language
    model for decoders.
    """
    return describe(model, settings, method)[0]


def describe(
    model: Path | str | PreTrainedConfig, settings: FactorizeConfig, method: str
) -> tuple[dict[str, Any], Factorization]:
    """The result of `summarise`, and the factorization itself."""
    config = load_config(model) if isinstance(model, Path | str) else model
    reference = build_reference(config)
    teacher_params = count_parameters(reference)
    linears = list(layer_linears(reference))
    sizes, embedding = plan(reference, settings, method), embedding_size(settings, method)
    of_method = DETAILS[method](reference, sizes)
    install(reference, sizes, embedding, method)
    student_params = count_parameters(reference)
    summary = {
        "method": method,
        "model_type": config.model_type,
        "teacher_params": teacher_params,
        "student_params": student_params,
        "ratio": student_params / teacher_params,
        "forward_flops": forward_flops(reference),
        **of_method,
        "dense": [name for name in linears if name not in sizes],
        kind_of(method).embedding_key: embedding,
    }
    return summary, Factorization(sizes=sizes, embedding=embedding)


def _of_ranks(_model: PreTrainedModel, ranks: dict[str, int]) -> dict[str, Any]:
    distinct = set(ranks.values())
    return {"rank": distinct.pop() if len(distinct) == 1 else None, "ranks": ranks}


def _of_shapes(model: PreTrainedModel, shapes: dict[str, KroneckerShape]) -> dict[str, Any]:
    return {**linear_flops(model, shapes), "shapes": {name: list(shape) for name, shape in shapes.items()}}


DETAILS: dict[str, Any] = {"svd": _of_ranks, "kronecker": _of_shapes}
"""Method -> the function that describes its sizes."""


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value)
