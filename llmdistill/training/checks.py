"""Checks of a plan that need neither weights nor data, and of the disk that it will write to."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from llmdistill.config import StudentConfig
from llmdistill.config.cache import CacheConfig
from llmdistill.errors import UserError
from llmdistill.files import byte_size, nearest
from llmdistill.models.families import family_of, has_family, max_positions
from llmdistill.models.load import has_checkpointing
from llmdistill.models.quantized import bits_of, check_torchao, quantized_linears
from llmdistill.students.counting import build_reference
from llmdistill.teachers.rows import Request

if TYPE_CHECKING:
    from llmdistill.training.plan import Plan

HANDED_OVER = "handed-over"
"""Folder in a run with the weights that the server of data.rollout.url has."""
STATE_BYTES = 12
"""Bytes of the optimizer's state for a trained parameter: its fp32 weight and Adam's two moments."""


def check_weighting(settings: StudentConfig) -> None:
    """Raises UserError for a weighting of a student that is not factorized here, and for data that nothing measures."""
    weighting, data = settings.factorize.weighting, settings.factorize.calibration.data
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


def check_plan(plan: Plan) -> None:
    """Raise a UserError if the settings of a run do not fit its models, data or method."""
    _check_teacher_head(plan)
    _check_keep_best(plan)
    _check_step(plan)
    _check_several(plan)
    _check_bits(plan)
    if plan.models.translates and plan.config.data.streaming:
        raise UserError(
            "data.streaming is true, but a teacher with another tokenizer needs all prompts before the training: set "
            "it to false, or take a student with the teacher's tokenizer"
        )
    if plan.method.needs_teacher and any(each.settings.cache for each in plan.models.teachers.values()):
        check_can_cache(plan)
    if plan.is_remote:
        _check_can_ask(plan)


def _check_teacher_head(plan: Plan) -> None:
    """Raise a UserError if a term needs the output of a bare encoder, which the teacher's config shows."""
    models, method = plan.models, plan.method
    name = (models.teacher.architectures or [""])[0]
    bare = MODEL_MAPPING_NAMES.get(models.teacher.model_type, "")  # several of Funnel
    needs_none = models.causal or plan.before is not None or not method.needs_teacher or plan.task.head is not None
    if needs_none or models.teacher_head == "none" or name not in ({bare} if isinstance(bare, str) else bare):
        return
    terms = [term.name for term in method.token_terms if term.divergence is not None]
    terms += [term.name for term in method.sequence_terms if term.needs_teacher]
    raise UserError(
        f"teacher.model {plan.config.teacher.model} is a {name} without language-model head, but {', '.join(terms)} "
        "compare its output: give them the weight 0, or take a teacher with its head"
    )


def _check_several(plan: Plan) -> None:
    """Raise a UserError if a run asks more of several teachers than their distributions over tokens."""
    names, method = ", ".join([*plan.models.teachers][1:]), plan.method
    if not names:
        return
    compares_more = method.teacher_taps or any(term.needs_teacher for term in method.sequence_terms)
    if compares_more or not method.teacher_positions:
        methods = " + ".join(plan.config.methods())
        raise UserError(f"teacher.others ({names}): method {methods} compares more than tokens; take --method kd")
    if plan.models.translates or plan.before is not None:
        what = "another tokenizer" if plan.models.translates else "student.assistants"
        raise UserError(f"teacher.others ({names}) cannot be joined with {what}: leave one of them out")
    if plan.config.teacher.average == "rows" and plan.config.data.kind != "instructions":
        raise UserError(
            f"teacher.average is rows, but data.kind is {plan.config.data.kind}: rows of instructions alone name "
            "teachers; take probabilities"
        )


def _check_step(plan: Plan) -> None:
    """Raise a UserError if packing, compiling or checkpointing does not go with the models or their sharding."""
    config, student = plan.config, plan.models.student
    used = [("teacher.model", plan.models.teacher)] if plan.method.needs_teacher else []
    packs = config.data.kind == "instructions" and config.data.packing
    settings = {"data.packing": packs, "train.compile": config.train.compile}
    for key, model in [*used, ("student.model", student)]:
        needing = [setting for setting, is_set in settings.items() if is_set]
        if needing and (not has_family(model) or family_of(model).makes_mask):
            raise UserError(
                f"{needing[0]} is true, but it needs masks of ours, and those of a {model.model_type} ({key}) are "
                "left to transformers: set it to false"
            )
    sharding = config.teacher.sharding
    if config.train.compile and (plan.zero_stage == 3 or sharding != "replicated"):
        which = "ds_config: zero_optimization.stage 3" if plan.zero_stage == 3 else f"teacher.sharding {sharding}"
        raise UserError(
            f"train.compile is true, but {which} gathers parameters module by module, which a compiled layer hides: "
            "set train.compile to false, or shard less (ZeRO stage 2, a replicated teacher)"
        )
    if config.train.activation_checkpointing and not has_checkpointing(student, plan.models.student_head):
        raise UserError(
            f"train.activation_checkpointing is true, but transformers has none for {student.model_type}: set it to "
            "false, and take a smaller train.micro_batch_size"
        )


def _check_bits(plan: Plan) -> None:
    """Raise a UserError if a student of few bits cannot be trained, or is to be trained on."""
    settings = plan.config.student
    weights, key = settings.quantize.weights, f"student.quantize.weights {settings.quantize.weights}"
    given = bits_of(plan.models.student) if settings.model is not None else None
    if given is not None and plan.trains:
        raise UserError(
            f"student.model {settings.model} has {given} weights, which cannot be trained: give the student that it "
            "was made from, and student.quantize, or make its weights floats by `llmdistill export --to dense`"
        )
    if plan.config.teacher.is_sharded and bits_of(plan.models.teacher) is not None and plan.method.needs_teacher:
        raise UserError(
            f"teacher.sharding {plan.config.teacher.sharding}: the {bits_of(plan.models.teacher)} weights of "
            f"{plan.config.teacher.model} cannot be sharded: take replicated"
        )
    if weights == "none":
        return
    check_torchao(key)
    if plan.zero_stage == 3:
        raise UserError(
            f"{key}: the scales of a matrix need all of it, and ZeRO-3 keeps shares: take ZeRO-2, or none as weights"
        )
    if settings.model is not None or settings.shape is not None:  # factors are linears in any case
        quantized_linears(build_reference(plan.models.student))


def _check_keep_best(plan: Plan) -> None:
    """Raise a UserError if no validation can tell which student is the best."""
    config, by = plan.config, plan.config.train.keep_best
    if by is None or not plan.trains:
        return
    if config.data.valid is None:
        raise UserError(f"train.keep_best is {by}, but there is no validation set: name one as data.valid, or set null")
    if by == "score" and plan.task.validation_metric is None:
        raise UserError(
            f"train.keep_best is score, but data of the kind {config.data.kind} have only a validation loss: take loss"
        )


def check_can_cache(plan: Plan) -> None:
    """Raise a UserError if no cache can take the place of a run's teacher."""
    if not plan.method.needs_teacher:
        names = " + ".join(plan.config.methods())
        raise UserError(f"method {names} has no teacher, so there is nothing to cache: take another method, such as kd")
    changing = plan.task.changing_examples(causal=plan.models.causal)
    if changing is not None:
        raise UserError(
            f"a cache keeps one output of the teacher for each example, but {changing}: train with the teacher "
            "itself (teacher.cache null)"
        )
    if plan.models.objective.sequences == "spans":
        raise UserError(
            f"a cache keeps no outputs for spans ({plan.config.data.task.name}): train with the teacher itself "
            "(teacher.cache null)"
        )


def _check_can_ask(plan: Plan) -> None:
    """Raise a UserError if a server cannot give what a run needs of its teacher."""
    teacher, tokens = plan.config.teacher, plan.models.compared_tokens
    if plan.models.translates:
        raise UserError(
            f"teacher.url {teacher.url}: a server is asked about the student's tokens, but teacher and student have "
            "different tokenizers: train with the teacher itself (teacher.url and teacher.top_k null)"
        )
    obstacle = lacking_of_vllm(plan, remedy="train with the teacher itself (teacher.url and teacher.top_k null)")
    if obstacle is not None:
        raise UserError(f"teacher.url {teacher.url}: {obstacle}")
    if teacher.top_k is not None and teacher.top_k >= tokens:
        raise UserError(f"teacher.top_k is {teacher.top_k}, but teacher and student share {tokens} tokens: give less")


def lacking_of_vllm(plan: Plan, *, remedy: str) -> str | None:
    """Why vLLM's log-probabilities of given tokens are not all that a run needs, with a remedy; None if they are."""
    request, length = Request.of(plan.method), plan.config.data.max_length
    methods = " + ".join(plan.config.methods())
    if not plan.models.causal:
        return f"vLLM gives log-probabilities of decoders alone; {remedy}"
    if request.taps or request.sequences or not request.positions:
        return f"method {methods} needs more of its teacher than log-probabilities of tokens; {remedy}"
    if request.temperatures != (1.0,):
        asked = ", ".join(f"{each:g}" for each in request.temperatures)
        return f"the tail's mass at temperature {asked} does not follow from vLLM's answers; {remedy}"
    if plan.models.compared_tokens != plan.models.teacher.vocab_size:
        return (
            f"vLLM compares all {plan.models.teacher.vocab_size} tokens of the teacher, of which the student has "
            f"{plan.models.compared_tokens}; {remedy}"
        )
    if max_positions(plan.models.teacher, length + 1) <= length:
        return (
            f"vLLM generates a token after the {length} of data.max_length, and the teacher has no position for it; "
            f"{remedy}, or a smaller data.max_length"
        )
    return None


def can_cache(plan: Plan) -> bool:
    """Whether a cache can take the place of a run's teacher, and the same command does not make this teacher first."""
    try:
        check_can_cache(plan)
    except UserError:
        return False
    return plan.before is None


def check_top_k(settings: CacheConfig, compared_tokens: int) -> None:
    """Raise a UserError if a cache is asked to keep as many tokens as there are."""
    if settings.kept_top_k is not None and settings.kept_top_k >= compared_tokens:
        raise UserError(
            f"--cache.top_k is {settings.top_k}, but teacher and student share {compared_tokens} tokens: give "
            "less, or take --cache.content hidden_states"
        )


@dataclass(frozen=True)
class DiskNeed:
    """The most that a run's folder holds at a time, in bytes, without its log, predictions and plots (a few MB)."""

    checkpoint: int
    """One checkpoint. With LoRA this is 0: it holds the adapters alone."""
    checkpoints: int
    """The number of them, with the one that is written before the oldest is deleted."""
    student: int
    students: int
    """The number of them: untrained, trained, the one that a server gets (data.rollout.url), and with train.keep_best
    the best one and its successor."""

    @classmethod
    def of(cls, plan: Plan) -> DiskNeed:
        """Return the need of a run from its plan."""
        config, params = plan.config, plan.models.sizes["student_params"]
        saves = plan.trains and config.train.save_every is not None
        best = 2 if plan.trains and config.train.keep_best is not None else 0
        made = int(config.student.model is None)
        return cls(
            checkpoint=STATE_BYTES * params if saves and config.student.lora.rank is None else 0,
            checkpoints=config.train.keep_checkpoints + 1 if saves else 0,
            student=params * plan.models.dtype.itemsize,
            students=made + int(plan.trains) + best + int(config.data.rollout.url is not None),
        )

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.checkpoints * self.checkpoint + self.students * self.student

    def __str__(self) -> str:
        """Say it as part of a sentence."""
        parts = [(self.checkpoints, "checkpoint", self.checkpoint), (self.students, "student", self.student)]
        return " and ".join(
            f"{number} {what}{'s' if number > 1 else ''} of {byte_size(size)}"
            for number, what, size in parts
            if number * size
        )


def check_disk(plan: Plan) -> None:
    """Raise a UserError if the disk has no room for what a run will still write; rank 0 only."""
    if (plan.folder / "student").is_dir():  # what is left to write are scores and reports
        return
    need, there = DiskNeed.of(plan), nearest(plan.folder)
    missing = need.total - _held(plan.folder)
    free = shutil.disk_usage(there).free
    if missing > free:
        raise UserError(
            f"output_dir {plan.folder}: the run needs {byte_size(missing)} more there ({need}), and the disk of "
            f"{there} has {byte_size(free)} free: free some, choose another output_dir, or lower train.keep_checkpoints"
        )


def _held(folder: Path) -> int:
    """The bytes that an earlier start of the run has written of what it needs."""
    parts = ("checkpoints", "untrained", "student", "best", HANDED_OVER)
    files = (file for part in parts for file in (folder / part).rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in files)
