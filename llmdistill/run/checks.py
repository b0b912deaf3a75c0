"""Checks of a plan that need neither weights nor data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmdistill.config import RunConfig
from llmdistill.config.cache import CacheConfig
from llmdistill.errors import UserError
from llmdistill.models.families import family_of, has_family
from llmdistill.models.load import has_checkpointing

if TYPE_CHECKING:
    from llmdistill.run.plan import Plan


def check_weighting(config: RunConfig) -> None:
    """Raises UserError for a weighting of a student that is not factorized here, and for data that nothing measures."""
    settings, weighting = config.student, config.student.factorize.weighting
    data = settings.factorize.calibration.data
    if weighting == "none":
        if data is not None and settings.model is None and not settings.measures_importance:
            raise UserError(
                f"student.factorize.calibration.data is {data}, but nothing is measured on it: give "
                "student.factorize.weighting, or set it to null"
            )
        return
    for key in ("model", "shape"):
        value = getattr(settings, key)
        if value is not None:
            raise UserError(
                f"student.factorize.weighting is {weighting}, but student.{key} {value} is not factorized by this run: "
                "leave one of them out"
            )


def check_teacher_head(plan: Plan) -> None:
    """Raise a UserError if a term needs the output of a bare encoder, which the teacher's config shows."""
    name = (plan.teacher_config.architectures or [""])[0]
    needs_none = plan.causal or plan.before is not None or not plan.method.needs_teacher or plan.task.head is not None
    if needs_none or plan.teacher_head == "none" or not name.endswith("Model"):
        return
    terms = [term.name for term in plan.method.token_terms if term.divergence is not None]
    terms += [term.name for term in plan.method.sequence_terms if term.needs_teacher]
    raise UserError(
        f"teacher.model {plan.config.teacher.model} is a {name} without language-model head, but {', '.join(terms)} "
        "compare its output: give them the weight 0, or take a teacher with its head"
    )


def check_without_entry(plan: Plan) -> None:
    """Raise a UserError if a setting needs the entry in FAMILIES that the architecture of a model does not have."""
    config = plan.config
    packs = config.data.kind == "instructions" and config.data.packing
    for key, model in (("teacher.model", plan.teacher_config), ("student.model", plan.student_config)):
        if (has_family(model) and not family_of(model).own_mask) or (
            key == "teacher.model" and not plan.method.needs_teacher
        ):
            continue
        for setting, needs in (("data.packing", packs), ("train.compile", config.train.compile)):
            if needs:
                raise UserError(
                    f"{setting} is true, but it needs masks of ours, and those of a {model.model_type} ({key}) are "
                    "left to transformers: set it to false"
                )
    student = plan.student_config
    if config.train.activation_checkpointing and not has_checkpointing(student, plan.student_head):
        raise UserError(
            f"train.activation_checkpointing is true, but transformers has none for {student.model_type}: set it to "
            "false, and take a smaller train.micro_batch_size"
        )


def check_keep_best(plan: Plan) -> None:
    """Raise a UserError if no validation can tell which student is the best."""
    config, task = plan.config, plan.task
    by = config.train.keep_best
    if by is None or not plan.trains:
        return
    if config.data.valid is None:
        raise UserError(f"train.keep_best is {by}, but there is no validation set: name one as data.valid, or set null")
    if by == "score" and task.validation_metric is None:
        raise UserError(
            f"train.keep_best is score, but data of the kind {config.data.kind} have only a validation loss: take loss"
        )


def check_can_cache(plan: Plan) -> None:
    """Raise a UserError if no cache can take the place of a run's teacher."""
    config, names = plan.config, " + ".join(plan.config.methods())
    if not plan.method.needs_teacher:
        raise UserError(f"method {names} has no teacher, so there is nothing to cache: take another method, such as kd")
    changing = plan.task.changing_examples(causal=plan.causal)
    if changing is not None:
        raise UserError(
            f"a cache keeps one output of the teacher for each example, but {changing}: train with the teacher "
            "itself (teacher.cache null)"
        )
    if plan.objective.sequences == "spans":
        raise UserError(
            f"a cache keeps no outputs for spans ({config.data.task.name}): train with the teacher itself "
            "(teacher.cache null)"
        )


def can_cache(plan: Plan) -> bool:
    """Whether a cache can take the place of a run's teacher, and the same command does not make this teacher first."""
    try:
        check_can_cache(plan)
    except UserError:
        return False
    return plan.before is None


def check_top_k(plan: Plan, settings: CacheConfig) -> None:
    """Raise a UserError if a cache is asked to keep as many tokens as there are."""
    if settings.kept_top_k is not None and settings.kept_top_k >= plan.compared_tokens:
        raise UserError(
            f"--cache.top_k is {settings.top_k}, but teacher and student share {plan.compared_tokens} tokens: give "
            "less, or take --cache.content hidden_states"
        )
