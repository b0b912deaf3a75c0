"""Makes students: factorizes a loaded model or the model of a folder (MaKD §3.1), or gives it another shape."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from llmdistill.artifacts import new_proven_folder
from llmdistill.config import FactorizeConfig
from llmdistill.config.student import StudentConfig
from llmdistill.errors import UserError
from llmdistill.models.companions import copy_generation_settings, save_model
from llmdistill.models.configs import load_config
from llmdistill.models.families import base_name, shape_of
from llmdistill.models.forms import remove_forms
from llmdistill.models.heads import HeadName
from llmdistill.models.load import build_random, load_model
from llmdistill.progress import progress
from llmdistill.students.counting import build_reference, layer_linears, layer_stacks
from llmdistill.students.experts import factors_name, stack_factors
from llmdistill.students.hub import FactorizedConfig
from llmdistill.students.importance import Importance, important_parts
from llmdistill.students.install import install, is_factorized, matrices, tied_heads, token_embedding, weight_of
from llmdistill.students.kinds import KINDS, Factorization, Sigma, Size
from llmdistill.students.merge import merge
from llmdistill.students.reconstruction import Squares, squares_lost
from llmdistill.students.search import needs_search, search
from llmdistill.students.shapes import (
    Parts,
    check_sizes,
    first_parts,
    initialize,
    parse_shape,
    shape_config,
    teacher_layers,
)
from llmdistill.students.sizes import check_factorization, plan_embedding, plan_factors, summarize
from llmdistill.students.start.weighted import check_calibration_data
from llmdistill.students.start.weighted_factors import WeightedFactors
from llmdistill.students.svd import largest_rank


@torch.no_grad()
def factorize(
    model: PreTrainedModel,
    factorization: Factorization,
    *,
    sigma: Sigma = "left",
    device: torch.device | None = None,
    weighted: WeightedFactors | None = None,
    lost: MutableMapping[str, Squares] | None = None,
) -> None:
    """Replace linears, experts, and optionally the token embedding, by their best approximations, in place.

    svd gives the best approximation of a rank (MaKD eq. 11), with the singular values where `sigma` says; kronecker
    gives the best of a Kronecker shape (KroneckerBERT eq. 2-5). Each matrix is decomposed on `device` (by default where
    the matrix is), one at a time, so a GPU can be used even if it cannot hold the model. dtype and device of the model
    stay the same, the arithmetic is fp32 or finer; a tied head stays tied. `weighted` holds factors that are already
    decomposed with weights, of sizes that the factorization names. `lost` is given what each matrix loses, by its name
    (experts have numbers), while it is there. save_pretrained then writes a student that from_pretrained loads. Raises
    UserError if the model is already factorized or quantized, or if a matrix has values that are not finite.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        raise UserError(f"this {type(model).__name__} is factorized or quantized already; start from the dense teacher")
    base, kind = model.base_model, KINDS[factorization.method]
    named = replace(factorization, sizes={base_name(model, name): size for name, size in factorization.sizes.items()})

    def factors(best: Callable[..., dict[str, Tensor]], name: str, weight: Tensor, size: Any) -> dict[str, Tensor]:
        if not weight.isfinite().all():
            raise UserError(
                f"the weight of {name} holds values that are not finite; copy or download the checkpoint again"
            )
        fitted = None if weighted is None else weighted.factors_of(base_name(model, name))
        if fitted is not None:
            return fitted.parameters(size, sigma)
        return best(weight if device is None else weight.to(device), size, sigma)

    def values(name: str, weight: Tensor, size: Size) -> dict[str, Tensor]:
        """Return the parameters of the factors of one matrix (m, n)."""
        stored = _cast_like(weight, kind.parameters(factors(kind.factors, name, weight, size)))
        if lost is not None:
            on = weight.device if device is None else device
            lost[name] = squares_lost(weight.to(on), {key: value.to(on) for key, value in stored.items()}, kind, size)
        return stored

    of_linears = {}
    for name, size in progress(named.sizes.items(), "Factorizing", "matrices"):
        weight = matrices(base, name)
        if weight.dim() == 3:
            path, _, stack = name.rpartition(".")
            experts = enumerate(weight)
            of_experts = [values(f"{path}.{number}.{stack}", expert, size) for number, expert in experts]
            of_linears[factors_name(name)] = stack_factors(of_experts)
        else:
            of_linears[name] = values(name, weight, size)
    of_embedding = {}
    if named.embedding is not None:
        name, embedding = token_embedding(model)
        for head in tied_heads(model, name):
            if model.get_submodule(head).weight is not embedding.weight:
                raise UserError(
                    f"the config ties {head} to the token embedding, but their weights differ; "
                    "set tie_word_embeddings to false in config.json"
                )
        table_factors = factors(kind.embedding_factors, name, embedding.weight, named.embedding)
        of_embedding = _cast_like(embedding.weight, table_factors)

    # A config of its own: one that is shared with the teacher must not describe the teacher as factorized.
    shared = model.config
    own: Any = copy.deepcopy(shared)
    for module in model.modules():
        if vars(module).get("config") is shared:
            module.config = own
    install(model, named)
    for name, parameters in of_linears.items():
        base.get_submodule(name).load_state_dict(parameters, strict=False)  # without the bias
    if of_embedding:
        model.get_input_embeddings().load_state_dict(of_embedding, strict=False)
    model.config.quantization_config = FactorizedConfig.of(named)


def compress_model(
    model: PreTrainedModel,
    settings: FactorizeConfig,
    method: str = "svd",
    *,
    device: torch.device | None = None,
    weighted: WeightedFactors | None = None,
    lost: MutableMapping[str, Squares] | None = None,
) -> PreTrainedModel:
    """Return a factorized copy of a loaded model with any head; see `compress_in_place`."""
    factorization = choose_sizes(model, settings, method, device=device, weighted=weighted)
    # The copy shares the weights that will be replaced.
    weights = [weight_of(model.base_model, base_name(model, name)) for name in factorization.sizes]
    student = copy.deepcopy(model, {id(weight): weight for weight in weights})
    factorize(student, factorization, sigma=settings.sigma, device=device, weighted=weighted, lost=lost)
    return student.train(model.training)


def compress_in_place(
    model: PreTrainedModel,
    settings: FactorizeConfig,
    method: str = "svd",
    *,
    device: torch.device | None = None,
    weighted: WeightedFactors | None = None,
    lost: MutableMapping[str, Squares] | None = None,
) -> None:
    """Factorize a loaded model with any head, in place.

    `weighted` is the result of `weigh` with the same settings, if these ask for a weighting, and `lost` is filled as
    `factorize` does. For a target of kronecker `search` chooses the sizes. Raises UserError if the settings contradict
    each other or do not fit the model, or if the model is already factorized.
    """
    factorization = choose_sizes(model, settings, method, device=device, weighted=weighted)
    factorize(model, factorization, sigma=settings.sigma, device=device, weighted=weighted, lost=lost)
    model.train(model.training)  # the new modules too


def replace_pivots(model: PreTrainedModel) -> bool:
    """Give a student plain factors of the same products where it has pivoted ones, or dense matrices where those are
    smaller, in place; return whether it had any."""
    config: Any = getattr(model.config, "quantization_config", None)
    if getattr(config, "method", None) != "pivoted":
        return False
    ranks, embedding = dict(config.modules), config.embedding_rank
    merge(model)
    plain, reference = {}, build_reference(model.config)
    for name, (m, n) in layer_linears(reference).items():
        rank = ranks.get(base_name(reference, name))
        if rank is not None and rank <= largest_rank(m, n):
            plain[name] = rank
    if plain or embedding is not None:
        compress_in_place(model, FactorizeConfig(ranks=plain or None, embedding_rank=embedding))
    return True


def choose_sizes(
    model: PreTrainedModel,
    settings: FactorizeConfig,
    method: str,
    *,
    device: torch.device | None = None,
    weighted: WeightedFactors | None = None,
) -> Factorization:
    """Choose the sizes of a model's matrices; for a target of kronecker `search` reads the weights.

    Raises:
        UserError: the settings do not fit the model, or ask for a weighting that was not measured.
    """
    if needs_search(settings, method):
        settings = search(model, settings, device=device)[0].settings
    return _plan_sizes(model.config, settings, method, weighted)


def _plan_sizes(
    config: PreTrainedConfig, settings: FactorizeConfig, method: str, weighted: WeightedFactors | None
) -> Factorization:
    reference = build_reference(config)
    if settings.is_weighted:
        check_factorization(settings, method)
        check_calibration_data(settings.weighting, weighted)
    if weighted is None or method != "svd":  # no other method chooses sizes by the data
        return plan_factors(reference, settings, method)
    ranks = {name: weighted.ranks.get(base_name(reference, name)) for name in layer_linears(reference)}
    sizes: dict[str, Size] = {name: rank for name, rank in ranks.items() if rank is not None}
    stacks = layer_stacks(reference)
    if stacks:  # of which nothing is measured
        sizes |= {name: rank for name, rank in plan_factors(reference, settings).sizes.items() if name in stacks}
    planned = plan_embedding(reference, settings, method)
    return replace(planned, sizes=sizes, embedding=planned.embedding if weighted.table is None else weighted.table.rank)


def compress_folder(
    model_dir: Path | str,
    output_dir: Path | str,
    settings: StudentConfig,
    *,
    device: torch.device | None = None,
    head: HeadName = "saved",
    weighted: WeightedFactors | None = None,
) -> dict[str, Any]:
    """Factorize the model of a folder into a new folder that from_pretrained loads; returns what `summarize` does.

    The model keeps its dtype, its tokenizer, its generation settings, and its class with its heads, unless `head` asks
    for another head (a head that the folder lacks gets random weights). Raises UserError for invalid settings,
    unreadable folders and an output folder that is not empty, before the weights are read, and for a target of
    kronecker, whose settings `search` finds.
    """
    # From the config alone, so that settings are refused before the weights are read.
    config, chosen, method = load_config(model_dir), settings.factorize, settings.method
    summary = summarize(model_dir, chosen, method, _plan_sizes(config, chosen, method, weighted))
    with new_proven_folder(output_dir) as folder:
        model = load_model(model_dir, dtype="auto", head=head, new_head=head != "saved")
        compress_in_place(model, chosen, method, device=device, weighted=weighted)
        save_model(model, folder, model_dir)
    return summary


def make_student(
    teacher_path: str | Path,
    output: str | Path,
    settings: StudentConfig,
    *,
    seed: int,
    head: HeadName,
    importance: Importance | None = None,
) -> None:
    """Write a student with a shape of its own and its teacher's architecture as a new folder, in fp32, with tokenizer.

    `settings` gives shape, initial weights and the factorization of the token embedding. The teacher's weights are read
    only if `settings.init` uses them; `importance` says what the teacher's parts are worth, if `settings` choose by it.
    Random weights follow the seed; torch's own generator is not changed. Raises UserError if shape or layers do not fit
    the teacher, if it cannot be read, or if the output is not empty.
    """
    assert settings.shape is not None
    config, shape = load_config(teacher_path), parse_shape(settings.shape)
    shaped = shape_config(config, shape)
    parts = None if settings.init == "random" else _parts(settings, config, shaped, importance)
    with new_proven_folder(output) as folder:
        student = build_random(shaped, head, seed=seed)
        embedding = plan_embedding(student, settings.factorize, settings.method)  # checked before the teacher is read
        if parts is not None:
            teacher = load_model(teacher_path, dtype=torch.float32, head=head)
            # A shape takes rows and columns of whole matrices, in floats.
            remove_forms(teacher)
            if is_factorized(teacher):
                merge(teacher)
            initialize(student, teacher, parts)
        if embedding.embedding is not None:
            factorize(student, embedding)
        copy_generation_settings(student, teacher_path)
        save_model(student, folder, teacher_path)


def _parts(
    settings: StudentConfig, teacher: PreTrainedConfig, student: PreTrainedConfig, importance: Importance | None
) -> Parts:
    """Return the teacher's parts that a student with a shape takes. Raises UserError if the sizes do not allow it."""
    sizes, whole = shape_of(student), shape_of(teacher)
    influence = None if importance is None else importance.influence_L
    layers = teacher_layers(
        settings.teacher_layers, sizes.num_layers, whole.num_layers, key="student.layers", influence=influence
    )
    check_sizes(settings.init, sizes, whole)
    if settings.init != "important":
        return first_parts(student, teacher, layers)
    assert importance is not None, "the importance of the teacher's parts is not measured"
    return important_parts(importance, student, teacher, layers)


def _cast_like(weight: Tensor, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values with the dtype of a weight, unless they are integers, on its device."""
    return {
        name: value.to(weight) if value.is_floating_point() else value.to(weight.device)
        for name, value in values.items()
    }
