"""Decides the size of each factorized matrix from the settings, and counts the parameters and FLOPs of the student.

A model on the meta device is enough.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, replace
from decimal import Decimal
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.config import FactorizeConfig
from llmdistill.config.marks import earlier_defaults
from llmdistill.config.strict import did_you_mean
from llmdistill.config.student import FactorForm, StudentConfig
from llmdistill.errors import UserError
from llmdistill.models.configs import load_config
from llmdistill.models.families import base_name
from llmdistill.models.load import build_meta
from llmdistill.students.counting import (
    Shape,
    build_reference,
    count_parameters,
    forward_flops,
    layer_linears,
    layer_stacks,
)
from llmdistill.students.hub import FactorizedConfig
from llmdistill.students.install import install, is_factorized, tied_heads, token_embedding
from llmdistill.students.kinds import KINDS, Factorization, kind_name
from llmdistill.students.kronecker import KroneckerShape, check_shape, dense_flops, kronecker_flops, parse_kronecker
from llmdistill.students.modules import check_columns
from llmdistill.students.svd import factor_params, largest_rank, rank_unit, useful_ranks

SETTINGS: dict[str, tuple[str, ...]] = {
    "svd": (
        *("rank", "ranks", "target_params", "embedding_rank", "sigma", "form"),
        *("weighting", "allocation", "rank_multiple", "calibration"),
    ),
    "kronecker": ("shapes", "target_params", "embedding_columns", "sums", "max_flops", "weighting", "calibration"),
}
"""Method -> the settings that it uses; those before the setting of the embedding exclude each other."""
DENSE = "dense"
"""Replaces a shape in the settings: linears that match the pattern stay dense."""

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


def plan_factors(model: PreTrainedModel, settings: FactorizeConfig, method: str = "svd") -> Factorization:
    """Return the sizes of the linears that are to be factorized, by module name, and of the token embedding.

    All other linears stay dense, and so do the stacks of experts if the kind has no factors for them; the matrices of a
    stack share a rank. With a single rank, given or computed from a target, so does a linear that would not
    become smaller: k (n + m) >= n m. Ranks and shapes by pattern are used exactly as given. Raises UserError if the
    settings are those of another method, contradict each other or do not fit the model, if the model is already
    factorized, and for a target of kronecker, whose `search` needs the weights.
    """
    check_factorization(settings, method)
    embedding = plan_embedding(model, settings, method)
    return replace(embedding, sizes=_ranks(model, settings) if method == "svd" else _shapes(model, settings))


def build_planned(config: PreTrainedConfig, settings: StudentConfig) -> PreTrainedModel:
    """Build a run's student on the meta device with its factors, as papers count its parameters.

    `config` is that of the student if it is given or has a shape, else that of the teacher. Raises UserError as
    `plan_factors`.
    """
    student = build_reference(config)
    planned = plan_student(student, settings)
    if planned is not None:
        install(student, planned)
        student.config.quantization_config = FactorizedConfig.of(planned)
    return student


def plan_student(model: PreTrainedModel, settings: StudentConfig) -> Factorization | None:
    """Plan how a run's student is factorized, from the dense model; None for a student that is given.

    Ranks that the data decide are planned as a single one, which has about as many parameters.
    """
    if settings.model is not None:
        return None
    if settings.shape is not None:
        return plan_embedding(model, settings.factorize, settings.method)
    return plan_factors(model, settings.factorize.with_one_rank(), settings.method)


def plan_embedding(model: PreTrainedModel, settings: FactorizeConfig, method: str) -> Factorization:
    """Return the factorization of the token embedding alone.

    Raises UserError if its size does not fit the model, or if the model is already factorized.
    """
    if is_factorized(model):
        raise UserError(f"this {type(model).__name__} is factorized already; start from the dense teacher")
    kind = KINDS[method]
    size: int | None = settings.table_rank if method == "svd" else settings.embedding_columns
    if size is not None:
        vocabulary, width = token_embedding(model)[1].weight.shape
        if method == "svd":
            _check_rank("embedding_rank", "the token embedding", size, (vocabulary, width))
        else:
            check_columns(size, width, where="embedding_columns")
    name = kind_name(method, settings.stored_form)
    return Factorization(method=name, embedding=None if size == kind.dense_embedding else size)


def check_factorization(settings: FactorizeConfig, method: str) -> None:
    """Raise a UserError for a setting that only another method uses, and for settings that contradict each other."""
    if method not in SETTINGS:
        raise UserError(f"there is no method {method!r} of factorization; there are {', '.join(SETTINGS)}")
    embedding_key, own = KINDS[method].embedding_key, SETTINGS[method]
    for field in fields(FactorizeConfig):
        value, usual = getattr(settings, field.name), getattr(FactorizeConfig(), field.name)
        # A run settles what is left open before its method is looked at.
        if field.name not in own and value not in (usual, earlier_defaults(FactorizeConfig).get(field.name)):
            others = [other for other, names in SETTINGS.items() if field.name in names]
            default = "null" if usual is None else usual
            raise UserError(
                f"{field.name} is a setting of the method {' or '.join(others)}, but the method is {method}, which "
                f"takes {', '.join(own)}: set {field.name} back to {default}, or change the method"
            )
    exclusive = own[: own.index(embedding_key)]
    given = [key for key in exclusive if getattr(settings, key) is not None]
    if not given and getattr(settings, embedding_key) is None:
        raise UserError(
            f"the student has no size: give one of {', '.join(exclusive)} for the method {method} (or {embedding_key} "
            "alone), such as target_params 50%"
        )
    if len(given) > 1:
        raise UserError(
            f"give exactly one of {', '.join(exclusive[:-1])} and {exclusive[-1]} (or {embedding_key} alone) for the "
            f"method {method}, not {' and '.join(given)}; null takes one back that a recipe sets"
        )
    if method != "svd" and settings.is_weighted and settings.calibration.folder is not None:
        raise UserError(
            "calibration.folder keeps factors of the method svd, which serve every rank, but the method is "
            f"{method}, whose factors fit one shape: set the folder to null"
        )
    if settings.max_flops is not None and settings.target_params is None:
        raise UserError(
            "max_flops bounds the search that target_params starts, and there is none: give target_params or leave "
            "max_flops out"
        )


def summarize(
    model: Path | str | PreTrainedConfig,
    settings: FactorizeConfig,
    method: str = "svd",
    planned: Factorization | None = None,
) -> dict[str, Any]:
    """Summarize a planned factorization, from the config.json of a folder (or a config) alone, without weights.

    Keys: method, model_type, teacher_params, student_params, ratio, forward_flops (of the student, for one token),
    dense (linears of the layers that stay dense); for svd rank (None if ranks differ), ranks by module, embedding_rank;
    for kronecker shapes by module ([m1, n1, sums]), embedding_columns, flops_per_token and teacher_flops_per_token (of
    the layers' linears, by eq. 7). Parameters are counted in the base model for encoders, and in the causal language
    model for decoders.
    """
    config = load_config(model) if isinstance(model, Path | str) else model
    reference = build_reference(config)
    teacher_params, linears, stacks = count_parameters(reference), layer_linears(reference), layer_stacks(reference)
    sizes: dict[str, Any]
    if planned is None and settings.allocation == "loss":  # the data will decide the ranks
        check_factorization(settings, method)
        planned = plan_embedding(reference, settings, method)
        student_params = rank_budget(reference, settings) + fixed_params(reference, settings)
        # Ranks that are not known yet have no Kronecker products: 2 FLOPs for each parameter, as in `forward_flops`.
        flops = 2 * student_params
        sizes = {"rank": None, "ranks": "by the predicted loss, from the calibration data", "dense": []}
        if settings.embedding_rank == "auto":
            sizes["embedding_rank"] = "auto"
    else:
        planned = plan_factors(reference, settings, method) if planned is None else planned
        install(reference, planned)
        student_params, flops = count_parameters(reference), forward_flops(reference)
        dense = [name for name in (*linears, *stacks) if name not in planned.sizes]
        if method == "svd":
            distinct = set(planned.sizes.values())
            sizes = {"rank": distinct.pop() if len(distinct) == 1 else None, "ranks": planned.sizes}
        else:
            shapes: dict[str, Any] = dict(planned.sizes)
            flops_of = {name: dense_flops(m, n) for name, (m, n) in linears.items()}
            changed = {name: kronecker_flops(*linears[name], shape) for name, shape in shapes.items()}
            sizes = {
                "flops_per_token": sum((flops_of | changed).values()),
                "teacher_flops_per_token": sum(flops_of.values()),
                "shapes": {name: list(shape) for name, shape in shapes.items()},
            }
        sizes["dense"] = dense
    return {
        "method": method,
        "model_type": config.model_type,
        "teacher_params": teacher_params,
        "student_params": student_params,
        "ratio": student_params / teacher_params,
        "forward_flops": flops,
        KINDS[method].embedding_key: planned.embedding,
        **sizes,
    }


def describe_params(sizes: Mapping[str, Any]) -> str:
    """Return the number of parameters in what `summarize` returns; a limit where the data will decide the ranks."""
    limit = "up to " if isinstance(sizes.get("ranks"), str) else ""
    return f"{limit}{sizes['student_params']:,}"


def chosen_ranks(student: PreTrainedModel) -> dict[str, Any]:
    """Return the ranks of a student for which data have chosen them, under the keys of `summarize`.

    The student needs no weights, but the config that its folder has.
    """
    form: dict[str, Any] = getattr(student.config, "quantization_config", {})
    names = {base_name(student, name): name for name, _ in student.named_modules()}
    ranks = {names.get(name, name): rank for name, rank in form.get("modules", {}).items()}
    return {"ranks": ranks, "embedding_rank": form.get("embedding_rank")}


def describe_ranks(sizes: Mapping[str, Any]) -> str:
    """Describe the ranks in what `summarize` returns, such as "576 to 640, of the embedding 512"; "" without any."""
    ranks: str | Mapping[str, int] = sizes.get("ranks") or ""
    if isinstance(ranks, str):
        return ranks
    least, most, embedding = min(ranks.values()), max(ranks.values()), sizes.get("embedding_rank")
    text = str(least) if least == most else f"{least} to {most}"
    return text if embedding is None else f"{text}, of the embedding {embedding}"


def rank_budget(model: PreTrainedModel, settings: FactorizeConfig, dense: Collection[str] = ()) -> int:
    """Return the number of parameters that target_params leaves for the layers' linears, without those that stay dense,
    and for a token embedding whose rank is auto.

    `dense` are names in the base model. Raises UserError if the smallest rank for every other linear has more.
    """
    assert settings.target_params is not None
    if _matrices(model, settings).keys() != layer_linears(model).keys():
        raise UserError(
            f"allocation loss predicts what each linear costs, but the experts of {type(model).__name__} are stacks of "
            "matrices, which are not measured: take allocation uniform"
        )
    shapes = {base_name(model, name): shape for name, shape in layer_linears(model).items()}
    fixed = fixed_params(model, settings) + sum(m * n for m, n in (shapes.pop(name) for name in dense))
    budget = parse_target(settings.target_params, count_parameters(model)) - fixed
    smallest, multiple = 0, settings.rank_multiple
    for m, n in shapes.values():
        ranks = useful_ranks(m, n, multiple, settings.stored_form)
        smallest += factor_params(m, n, ranks[0], settings.stored_form) if ranks else m * n
    if settings.embedding_rank == "auto":
        m, n = token_embedding(model)[1].weight.shape
        smallest += factor_params(m, n, useful_ranks(m, n, multiple)[0])
    if smallest > budget:
        rank, remedy = (1, "") if multiple == "auto" else (multiple, "lower rank_multiple, ")
        if settings.embedding_rank in (None, "dense"):
            remedy += "factorize the token embedding too (embedding_rank auto), "
        remedy += "or raise the target" if remedy else "raise the target"
        what = f"every linear but {', '.join(dense)}, which the calibration data never run" if dense else "every linear"
        raise UserError(
            f"target_params {settings.target_params} is out of reach: rank {rank} for {what}, the smallest "
            f"allocation, has {smallest + fixed:,} parameters; {remedy}"
        )
    return budget


def fixed_params(model: PreTrainedModel, settings: FactorizeConfig) -> int:
    """Return the number of parameters outside of the matrices of the layers that can be factorized, and of a token
    embedding whose rank is auto."""
    fixed = count_parameters(model) - sum(count * m * n for count, (m, n) in _matrices(model, settings).values())
    if settings.table_rank is not None or settings.embedding_rank == "auto":
        # A tied head shares the factors as it shared the table, an untied head stays dense.
        vocabulary, width = token_embedding(model)[1].weight.shape
        fixed += (settings.table_rank or 0) * (vocabulary + width) - vocabulary * width
    return fixed


def parse_target(text: str | float, teacher_params: int) -> int:
    """Parse "690000000", "0.69B", "77.25M" or "62%" (of the teacher). Raises UserError for other forms."""
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?|\.[0-9]+)\s*([KMB%]?)\s*", str(text), re.IGNORECASE)
    if match is None:
        raise UserError(f"target_params {text!r} is no number of parameters; write 690000000, 0.69B, 77.25M or 62%")
    # Decimal, because a product of floats may be a little less than what is written, and int() would then take one off.
    number, suffix = Decimal(match[1].replace("_", "")), match[2].upper()
    if not suffix and number <= 100:  # a share, as a fraction or in percent
        share = f"{float(number * 100 if number < 1 else number):g}"
        raise UserError(
            f"target_params {text} is no number of parameters: for {share}% of the model's parameters write {share}%"
        )
    target = int(number * teacher_params / 100) if suffix == "%" else int(number * _SUFFIXES[suffix])
    if target >= teacher_params:
        raise UserError(
            f"target_params {text} is not below the model's own {teacher_params:,}; give less, "
            "or leave the model as it is"
        )
    return target


def _by_pattern(patterns: Mapping[str, Any], names: Collection[str], *, key: str) -> Iterator[tuple[str, str, Any]]:
    """Yield each name with the first pattern that matches it and its value; raise a UserError if a pattern has none."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = did_you_mean(pattern, names) or f", such as {next(iter(names))}"
            raise UserError(
                f"pattern {pattern!r} in {key} matches no linear of the transformer layers{hint} "
                "(a pattern covers the whole name: *.q_proj)"
            )
    for name in names:
        first = next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
        if first is not None:
            yield name, first, patterns[first]


def _ranks(model: PreTrainedModel, settings: FactorizeConfig) -> dict[str, int]:
    """Return the rank of each linear, and stack of experts, that svd factorizes."""
    matrices = _matrices(model, settings)
    linears = {name: shape for name, (_, shape) in matrices.items()}
    if settings.ranks is not None:
        ranks = {}
        for name, pattern, rank in _by_pattern(settings.ranks, linears, key="ranks"):
            _check_rank(f"ranks[{pattern!r}]", name, rank, linears[name], settings.stored_form)
            ranks[name] = rank
        return ranks
    largest = max(largest_rank(m, n, settings.stored_form) for m, n in linears.values())
    if settings.target_params is not None:
        target = parse_target(settings.target_params, count_parameters(model))
        fixed = fixed_params(model, settings)

        def total(rank: int) -> int:
            ranks, form = _spread(linears, rank, settings), settings.stored_form
            return fixed + sum(
                count * factor_params(m, n, ranks[name], form) for name, (count, (m, n)) in matrices.items()
            )

        # A larger rank never has fewer parameters, so bisection finds the largest within the target; 0 if none is.
        rank = bisect_right(range(1, largest + 1), target, key=total)
        if rank == 0:
            remedy = "factorize the token embedding too" if settings.table_rank is None else "lower"
            raise UserError(
                f"target_params {settings.target_params} ({target:,}) is out of reach: ranks 1 to {largest} give "
                f"{total(1):,} to {total(largest):,} parameters; raise the target, or {remedy} (embedding_rank)"
            )
    elif settings.rank is not None:
        rank = settings.rank
        for name, shape in linears.items():
            _check_rank("rank", name, rank, shape, settings.stored_form)
    else:
        return {}
    # A rank that is given stays what the user typed; one that follows from a target is rounded.
    ranks = dict.fromkeys(linears, rank) if settings.rank is not None else _spread(linears, rank, settings)
    if settings.target_params is not None:
        # What the multiples have left goes to matrices that were rounded down, in their order.
        left = target - total(rank)
        for name, (count, (m, n)) in matrices.items():
            raised = ranks[name] + rank_unit(m, n, rank, settings.rank_multiple)
            params = [count * factor_params(m, n, rank, settings.stored_form) for rank in (ranks[name], raised)]
            if (
                ranks[name] < rank
                and raised <= largest_rank(m, n, settings.stored_form)
                and params[1] - params[0] <= left
            ):
                ranks[name], left = raised, left - (params[1] - params[0])
    ranks = {
        name: ranks[name] for name, (m, n) in linears.items() if ranks[name] <= largest_rank(m, n, settings.stored_form)
    }
    if not ranks:
        raise UserError(f"rank {rank} makes no matrix smaller; the largest that does in this model is {largest}")
    return ranks


def _spread(linears: Mapping[str, Shape], rank: int, settings: FactorizeConfig) -> dict[str, int]:
    """Return one rank as multiples: of each kind of matrix some layers have the next lower and some the next higher.

    Over the layers they add up to the rank but for less than one multiple, so that the parameters are spent. They never
    have more parameters than the rank itself, and never more for a smaller rank. A matrix that the rank would enlarge
    keeps it.
    """
    ranks, seen = dict[str, int](), Counter[tuple[str, Shape]]()
    for name, (m, n) in linears.items():
        unit, largest = rank_unit(m, n, rank, settings.rank_multiple), largest_rank(m, n, settings.stored_form)
        kind = re.sub(r"\.\d+\.", ".*.", name), (m, n)
        layer = seen[kind]
        seen[kind] += 1
        # The ranks of the first layers add up to the largest multiple that is not over their number times the rank.
        rounded = unit * ((layer + 1) * rank // unit - layer * rank // unit)
        ranks[name] = rank if rank > largest else rounded if rounded <= largest else rank - rank % unit
    return ranks


def _check_rank(key: str, module: str, rank: int, shape: Shape, form: FactorForm = "plain") -> None:
    m, n = shape
    largest = min(n, m) if form == "plain" else largest_rank(m, n, form)
    if not 1 <= rank <= largest:
        raise UserError(
            f"{key} {rank} does not fit {module}, a {m}×{n} matrix: its rank can be from 1 to {largest}; "
            "take a smaller one, or give ranks by module pattern"
        )


def _matrices(model: PreTrainedModel, settings: FactorizeConfig) -> dict[str, tuple[int, Shape]]:
    """Name, number and shape of the matrices of each linear, and of each stack if the form has factors for stacks."""
    stacks = {} if KINDS[kind_name("svd", settings.stored_form)].stack is None else layer_stacks(model)
    return {name: (1, shape) for name, shape in layer_linears(model).items()} | stacks


def _shapes(model: PreTrainedModel, settings: FactorizeConfig) -> dict[str, KroneckerShape]:
    """Return the shape of each linear that becomes a sum of Kronecker products."""
    if settings.target_params is not None:
        raise UserError(
            f"target_params {settings.target_params} with the method kronecker needs the weights: run llmdistill "
            "compress --method kronecker --target_params with it, and give its output as student.model or the shapes "
            "it prints as student.factorize.shapes"
        )
    if settings.shapes is None:
        return {}
    linears = layer_linears(model)
    dense = [pattern for pattern, text in settings.shapes.items() if text == DENSE]
    of_no_layer = [pattern for pattern in dense if not any(fnmatchcase(name, pattern) for name in linears)]
    if of_no_layer and settings.embedding_columns not in (None, 1):
        # A head that is tied to the factorized embedding has no matrix of its own that could stay dense.
        whole = model
        if model.get_output_embeddings() is None:  # the model that papers count has no head if it is an encoder
            whole = build_meta(model.config, "lm_head")
        for head, pattern in product(tied_heads(whole, token_embedding(whole)[0]), of_no_layer):
            if fnmatchcase(head, pattern):
                raise UserError(
                    f"shapes[{pattern!r}] asks {head} to stay dense, but it is tied to the token embedding, which "
                    f"embedding_columns {settings.embedding_columns} compresses: leave one of the two out, or untie "
                    "them (tie_word_embeddings false in the teacher's config.json)"
                )
    shapes = {}
    for name, pattern, text in _by_pattern(settings.shapes, linears, key="shapes"):
        if text != DENSE:
            key = f"shapes[{pattern!r}]"
            shapes[name] = parse_kronecker(text, settings.sums, key=key)
            check_shape(shapes[name], *linears[name], where=f"{key} {text} for {name}")
    return shapes
