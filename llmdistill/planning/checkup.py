"""Checks a run before it is launched: its models on one real batch, in a single process and without DeepSpeed."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from llmdistill.batch import Batch
from llmdistill.config import CalibrationConfig, RunConfig
from llmdistill.data.prompts import tokenizer_gaps
from llmdistill.errors import UserError
from llmdistill.methods import Method, build_method
from llmdistill.methods.sft import make_sft
from llmdistill.models.forms import adapt
from llmdistill.progress import progress
from llmdistill.runtime.distributed import World
from llmdistill.runtime.engine import add_projectors
from llmdistill.runtime.environment import Finding
from llmdistill.step.loss_modes import choose_modes_of_models
from llmdistill.step.tap_models import tap_student, tap_teacher
from llmdistill.step.teacher import Teacher, live_models
from llmdistill.tasks.base import TaskData
from llmdistill.teachers.live import TeacherOnDemand
from llmdistill.teachers.source import TeacherContext
from llmdistill.training.assemble import load_student, make_untrained, share_of
from llmdistill.training.callbacks.uneven_terms import only_term, uneven_terms
from llmdistill.training.plan import Plan, make_plans
from llmdistill.training.resolved import RunModels
from llmdistill.training.written_data import describe_writing, names_teacher, with_written_data

_SAME = 1e-2
"""The largest gradient of a term with the teacher as its own student, as a share of that with the student."""
_GAP_REMEDY = "copy the teacher's tokenizer files into the student's folder, if it shall be asked as the teacher is"


@dataclass(frozen=True)
class TermSize:
    """One term of the loss in one step."""

    value: float
    """The unweighted term, averaged over its positions."""
    gradient: float
    """The norm of the gradient of the weighted term with respect to the student's parameters."""


def check_run(config: RunConfig) -> Iterator[Finding]:
    """Check a run on one micro batch of its training data, finding by finding; an error of the run ends the checks.

    The student of these checks is made without calibration data, which takes seconds.
    """
    # At most 8 sequences in a batch, models in one process, and a student that needs no measurement. The size divides
    # the global batch, as every micro batch must.
    student, size = config.student, config.train.global_batch_size
    plain = replace(student.factorize, weighting="none", allocation="uniform", calibration=CalibrationConfig())
    layers = None if student.layers == "important" else student.layers
    init = "slice" if student.init == "important" else student.init
    micro_batch_size = max(number for number in range(1, 9) if size % number == 0)
    quick = replace(
        config,
        teacher=config.teacher.replicated(),
        student=replace(student, factorize=plain, init=init, layers=layers),
        train=replace(config.train, micro_batch_size=micro_batch_size),
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            quick = with_written_data(quick, write=False)
            if names_teacher(quick):
                yield Finding("warning", "data", f"not checked: {describe_writing(quick)}")
                return
            plan = make_plans(replace(quick, output_dir=folder))[0]  # the first assistant's, if the run has assistants
            data = plan.task.read(plan.models).prepare()
            yield Finding("ok", "settings and data", data.report or "read")
            has_prompts = plan.config.data.kind == "instructions" and plan.method.needs_teacher
            if has_prompts and not plan.models.translates:
                for gap in tokenizer_gaps(data.teacher_tokenizer(), data.tokenizer):
                    yield Finding("warning", "tokenizers", gap, _GAP_REMEDY)
            if plan.trains:
                yield from _check_models(plan, data)
    except UserError as error:
        yield Finding("failure", "the run", "it cannot start", str(error))


def _check_models(plan: Plan, data: TaskData) -> Iterator[Finding]:
    world = World.current()
    batch = data.loader(share_of(plan)).micro_batches(0)[0]
    batch = batch.with_positions(shift=plan.method.shift).to(world.device)
    teacher = TeacherOnDemand(plan)
    student = load_student(plan, make_untrained(plan, teacher, data), plan.models.dtype)
    student.to(world.device)  # type: ignore[arg-type]
    adapt(student, plan.config.student, plan.config.seed)
    model: PreTrainedModel | None = None
    live_teacher: Teacher | None = None
    vocabulary = plan.models.vocabulary
    # The teacher itself, without a cache; compiling it would take longer than this one batch.
    teacher_settings, train = (
        replace(plan.config.teacher, cache=None),
        replace(plan.config.train, compile=False, liger=False),
    )
    plain = replace(plan, config=replace(plan.config, teacher=teacher_settings, train=train))
    if plain.source is not None:
        state = plain.source.check_available(plan)
        if state is not None:
            yield Finding("ok", *state)
        if plain.source.runs_here:
            model = teacher().model
            if not plan.models.translates:
                yield check_above_chance(plan.models, model, batch)
        live_teacher = plain.source.build(TeacherContext(plain, data, teacher))
    dry = measure_terms(plan.method, live_teacher, student, batch, vocabulary=vocabulary)
    if model is not None and not plan.models.translates:
        yield check_own_student(plan, model, batch, dry)
    yield from report_terms(dry)


def check_above_chance(models: RunModels, teacher: PreTrainedModel, batch: Batch) -> Finding:
    """Compare the teacher's loss on the labels with that of a guess at random."""
    title = "teacher above chance"
    targets = models.objective.targets
    if (targets is not None and targets.num_classes is None) or models.teacher_head == "none":
        return Finding("ok", title, "not applicable: the teacher predicts no classes or tokens")
    labels = make_sft(causal=models.causal, objective=models.objective)
    with torch.no_grad():
        sizes = measure_terms(labels, None, teacher, batch, gradients=False)
    guesses = {"label": ("labels", teacher.config.vocab_size)}
    if targets is not None and targets.num_classes is not None:
        guesses[f"{targets.prefix}label"] = "targets", targets.num_classes(teacher.config, batch)
    sentences, worse = [], []
    for name, size in sizes.items():
        target, num_classes = guesses[name]
        chance = math.log(num_classes)  # the cross-entropy of a uniform guess, in nats
        sentences.append(f"cross-entropy of the {target} {size.value:.2f}, at random {chance:.2f}")
        worse += [name] if not size.value < chance else []  # also for NaN
    remedy = "check that teacher, tokenizer and data belong together, and that the teacher was fine-tuned"
    return Finding("failure" if worse else "ok", title, "; ".join(sentences), remedy if worse else None)


def check_own_student(plan: Plan, teacher: PreTrainedModel, batch: Batch, dry: Mapping[str, TermSize]) -> Finding:
    """Check that the terms that compare with the teacher have no gradient if the teacher is its own student.

    Their values are zero too, but for a cross-entropy with the teacher's distribution, which is its entropy.
    """
    title = "teacher as its own student"
    names, settings = plan.config.methods(), plan.config.method_settings
    try:
        method = build_method(names, settings, plan.models.teacher, plan.models.teacher, plan.models.objective)
    except UserError:
        return Finding("ok", title, "not applicable: the map of the layers is for another depth")
    if method.projections:
        return Finding("ok", title, "not applicable: learned matrices map the widths")
    labels = {term.name for term in method.token_terms if term.divergence is None}
    labels |= {term.name for term in method.sequence_terms if not term.needs_teacher}
    # Both get hooks of their own, and the teacher's parameters are frozen.
    student = copy.deepcopy(teacher).requires_grad_(True)
    sizes = measure_terms(method, tap_teacher(method, teacher), student, batch)
    compared = {name: size for name, size in sizes.items() if name not in labels}
    # Rounding leaves a small gradient, so it is measured by that of the student; 1e-12 avoids 0 / 0.
    shares = {name: size.gradient / max(dry[name].gradient, 1e-12) for name, size in compared.items() if name in dry}
    largest = max(shares, key=lambda name: shares[name], default=None)
    if largest is None:
        return Finding("ok", title, "not applicable: no term compares with the teacher")
    if shares[largest] == 0:
        return Finding("ok", title, "no term has a gradient")
    if shares[largest] < _SAME:
        return Finding("ok", title, f"the gradient of each term is at most {shares[largest]:.1e} of the student's")
    sentence = f"the gradient of the term {largest} is {shares[largest]:.1e} of the student's"
    return Finding("failure", title, sentence, f"the term {largest} is wrong for this architecture: please report it")


def report_terms(dry: Mapping[str, TermSize]) -> Iterator[Finding]:
    """Report the value of each term in the first step, and its share of the gradient."""
    total = sum(size.gradient for size in dry.values())
    uneven = uneven_terms({name: size.gradient for name, size in dry.items()})
    for name, size in dry.items():
        share = size.gradient / total if total > 0 else 0.0
        sentence = f"{size.value:.4g}, {share:.1%} of the gradient"
        if not math.isfinite(size.value + size.gradient):
            yield Finding("failure", f"term {name}", sentence, "it is not finite: check the models and their dtype")
        elif size.gradient == 0:
            remedy = "it contributes nothing in this batch: check the labels, or give it the weight 0"
            yield Finding("warning", f"term {name}", sentence, remedy)
        elif name in uneven:
            yield Finding("warning", f"term {name}", sentence, uneven[name][1])
        else:
            yield Finding("ok", f"term {name}", sentence)


def measure_terms(
    method: Method,
    teacher: Teacher | None,
    student: PreTrainedModel,
    batch: Batch,
    *,
    vocabulary: int | None = None,
    gradients: bool = True,
) -> dict[str, TermSize]:
    """Compute each term of a method on a batch, and with `gradients` the norm of its gradient.

    The student runs once for each term, in evaluation mode, so that dropout makes no difference between models. The
    hooks of both models are removed at the end.
    """
    student.eval()
    projectors = add_projectors(student, method.projections, seed=0).to(student.device)
    learner = tap_student(method, student, projectors=projectors, vocabulary=vocabulary)
    if method.token_terms:
        choose_modes_of_models(teacher, learner, batch)
    divisors = batch.divisors()
    parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
    sizes: dict[str, TermSize] = {}
    try:
        for name in progress(method.weights, "Checking", "terms of the loss"):
            # Anew for each term, because a pass of the student drops the teacher's taps that it has used.
            with torch.no_grad():
                teacher_outputs = (
                    None if teacher is None else teacher.compute_targets(batch, lm_head=method.teacher_positions)
                )
            losses = learner.compute_losses(batch, only_term(method.bind_terms(teacher_outputs, batch, divisors), name))
            value = float(losses.terms[name].sum / divisors[method.positions[name]])
            gradients_of_parameters = (
                # A term on inner layers reaches no parameter after them.
                torch.autograd.grad(losses.total, parameters, allow_unused=True) if gradients else ()
            )
            norms = [gradient.float().norm() for gradient in gradients_of_parameters if gradient is not None]
            sizes[name] = TermSize(value, float(torch.stack(norms).norm()) if norms else 0.0)
    finally:
        for model in (learner, *live_models(teacher).values()):
            model.remove()
    return sizes
