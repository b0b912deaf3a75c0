"""Settles the defaults that depend on a run's models and data, such as the start of a factorized student."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedConfig

from llmdistill.artifacts import find_record
from llmdistill.config import FactorizeConfig, RunConfig
from llmdistill.config.marks import earlier_defaults
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.models.families import is_causal
from llmdistill.students.counting import build_reference, layer_stacks
from llmdistill.students.install import can_factorize_embedding
from llmdistill.students.start.sampled import WITHOUT_GRADIENTS
from llmdistill.students.start.weighted import check_calibration_data

RUN_FILE = "run.json"
"""The record of a run in its folder: its settings, and the content of its inputs."""
HELD_OUT = 0.02
"""The share of the training rows on which a run compares its models, if there is no validation set."""
CALIBRATION_TOKENS = 65_536
"""Tokens of the calibration of a start that a run chooses itself, if each example is as long as it may be."""
LEAST_EXAMPLES, _MOST_EXAMPLES = 64, 512
"""Fewer examples do not tell whose rank costs less; more of them improve a start less than steps of training do."""


@dataclass(frozen=True)
class Settled:
    """Settings without open defaults, and what a user should know of the choice."""

    config: RunConfig
    notes: list[str]


def settle(config: RunConfig, teacher: PreTrainedConfig) -> Settled:
    """Return a run with every default settled: as its folder has recorded it, or else by its models and data."""
    if config.output_dir is not None:
        # What is wrong with a damaged record is said where the run claims its folder.
        run, _ = find_record(Path(config.output_dir) / RUN_FILE, {"config": dict})
        config = config if run is None else settle_as_recorded(config, run["config"])
    student, data, notes = config.student, config.data, list[str]()
    if student.weighs_by_default:
        factorize, why = choose_start(student.factorize, teacher, data.max_length, student.quantize.weights)
        notes = [_describe(factorize, why)]
    else:
        factorize = _fill(student.factorize, {})
    if data.held_out is None:
        held_out = HELD_OUT if _has_rows(config) and data.valid is None and METHODS[config.method].trains else 0
        data = replace(data, held_out=held_out)
    return Settled(replace(config, student=replace(student, factorize=factorize), data=data), notes)


def settle_as_recorded(config: RunConfig, record: Mapping[str, Any]) -> RunConfig:
    """Return a run with the choices that its folder has recorded for the start of its student and the held-out rows."""
    student, data = config.student, config.data
    if student.weighs_by_default:
        student = replace(student, factorize=_fill(student.factorize, record.get("student", {}).get("factorize", {})))
    if data.held_out is None and _has_rows(config):
        data = replace(data, held_out=record.get("data", {}).get("held_out", 0))
    return replace(config, student=student, data=data)


def _has_rows(config: RunConfig) -> bool:
    """Whether rows of the training set can be held out."""
    return config.data.kind == "instructions" and not config.data.streaming


def usual_examples(max_length: int) -> int:
    """Return the number of calibration examples of a start that a run chooses itself."""
    return min(max(CALIBRATION_TOKENS // max_length, LEAST_EXAMPLES), _MOST_EXAMPLES)


def choose_start(
    settings: FactorizeConfig, teacher: PreTrainedConfig, max_length: int, weights: str = "none"
) -> tuple[FactorizeConfig, str | None]:
    """Return the settings of svd with every default settled, and why they are not those of the best start, if so.

    Left to itself, a student keeps what matters for the loss (weighting gradients), and spends target_params on the
    ranks that save most of it, in the form that stores them in the fewest numbers. Who names a weighting gets what it
    says, and one rank in plain factors for the rest. `weights` is the setting of `student.quantize`.
    """
    if settings.weighting is not None:
        return _fill(settings, {}), None
    weighting: Literal["activations", "gradients"] = "gradients"
    why: str | None = None
    if teacher.model_type in WITHOUT_GRADIENTS:
        weighting, why = "activations", f"no gradient comes back through the layers of {teacher.model_type}"
    calibration = settings.calibration
    if calibration.examples is None:
        calibration = replace(calibration, examples=usual_examples(max_length))
    # In four bits pivoted factors lose two to three times as much of their product as plain ones, since the
    # coefficients amplify what is lost of the pivots: SmolLM2's student of 80 % was 10 nats away from its teacher.
    is_plain = settings.sigma == "balanced" or weights == "int4"
    best: dict[str, Any] = {"allocation": "loss", "form": "plain" if is_plain else "pivoted"}
    spends = settings.target_params is not None and why is None
    if spends:
        reference = build_reference(teacher)
        if layer_stacks(reference):
            spends, why = False, f"the experts of {teacher.model_type} are stacks of matrices, which nothing measures"
        elif settings.allocation != "uniform" and calibration.checked > 0 and can_factorize_embedding(reference):
            best["embedding_rank"] = "auto"
    if settings.embedding_rank == "auto" and not spends:
        raise UserError(f"embedding_rank auto needs predicted losses, but {why}: give a number, or leave it out")
    chosen = {key: value for key, value in best.items() if spends and getattr(settings, key) is None}
    return _fill(replace(settings, weighting=weighting, calibration=calibration, **chosen), {}), why


def starts_by_data(settings: FactorizeConfig, method: str, model: PreTrainedConfig) -> bool:
    """Return whether `compress` starts a student of a decoder by data, which the model writes if none are given."""
    weights = method == "svd" if settings.weighting is None else settings.weighting != "none"
    return weights and is_causal(model)


def settle_compress(
    settings: FactorizeConfig, method: str, model: PreTrainedConfig, *, has_data: bool, max_length: int
) -> FactorizeConfig:
    """Return the settings of `compress` with every default settled; without calibration data they weight nothing.

    Raises:
        UserError: ranks by the predicted loss without calibration data.
    """
    if has_data and method == "svd":
        return choose_start(settings, model, max_length)[0]
    if settings.weighting is None and (settings.allocation == "loss" or settings.embedding_rank == "auto"):
        check_calibration_data("gradients", None)
    return _fill(settings, {})


def _describe(settings: FactorizeConfig, why: str | None) -> str:
    start = f"weighting {settings.weighting}, allocation {settings.allocation}, form {settings.form}"
    start += ", embedding_rank auto" if settings.embedding_rank == "auto" else ""
    of_data = settings.calibration.data or "the training set"
    reason = "" if why is None else f"; {why}"
    return (
        f"the student starts with {start}, measured on up to {settings.calibration.examples} examples of "
        f"{of_data}{reason} (student.factorize.weighting none: the plain SVD)"
    )


def _fill(settings: FactorizeConfig, record: Mapping[str, Any]) -> FactorizeConfig:
    """Settle what is open as a record says; what it lacks is, as in earlier versions, the plain SVD."""

    def settled(section: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        usual = {key: value for key, value in earlier_defaults(type(section)).items() if "." not in key}
        return {key: values.get(key, usual[key]) for key in usual if getattr(section, key) is None}

    calibration = settings.calibration
    calibration = replace(calibration, **settled(calibration, record.get("calibration", {})))
    return replace(settings, calibration=calibration, **settled(settings, record))
