"""The one place where a plan becomes objects: teacher, student, engine, batches and trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llmdistill.batch import Batch, Loader
from llmdistill.data.sampler import Share
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.models.adapters import is_adapter
from llmdistill.models.classifier import read_classifier, set_classifier
from llmdistill.models.forms import adapt
from llmdistill.models.load import load_model
from llmdistill.models.pooling import has_dense
from llmdistill.models.sharded_load import Sharding, load_sharded
from llmdistill.runtime.devices import has_compiler
from llmdistill.runtime.distributed import World, exists_on_main, on_every, on_main, wait_until_visible
from llmdistill.runtime.ds_check import check_ds_config, compiles_optimizer
from llmdistill.runtime.engine import Template, add_projectors, build_engine, save_student
from llmdistill.runtime.environment import kernels
from llmdistill.runtime.terminal import print_main, warn_main
from llmdistill.step.compile import check_compilers
from llmdistill.step.tap_models import tap_student
from llmdistill.students.convert import compress_folder, make_student
from llmdistill.tasks.base import ScoredModel, TaskData
from llmdistill.teachers.live import TeacherOnDemand
from llmdistill.teachers.source import LoadedTeacher, TeacherContext
from llmdistill.training.batch_source import LoaderParts
from llmdistill.training.batches import batch_source
from llmdistill.training.calibration import measure_parts, measure_weights, nearest_rotation
from llmdistill.training.callbacks.best import BestStudent
from llmdistill.training.checks import check_liger
from llmdistill.training.plan import Plan
from llmdistill.training.trackers import check_access
from llmdistill.training.trainer import Trainer


def make_untrained(plan: Plan, teacher: Callable[[], LoadedTeacher], data: TaskData) -> Path:
    """Return the folder of the untrained student: `student.model`, or a student that is made from the teacher.

    The student is made once, by rank 0; a resumed run uses the same folder. What calibration data decide is measured on
    all ranks, on the run's teacher (which is loaded only then) and data. Every rank must call this function.
    """
    world = World.current()
    if plan.config.student.model is not None:
        return locate(plan.config.student.model)
    folder = plan.folder / "untrained"
    made = folder / "config.json"
    if not exists_on_main(made):
        settings, of_models, device = plan.config.student, plan.models, world.device
        # A decoder on no task has the head of the teacher's folder in the run too.
        is_whole = of_models.causal and plan.task.head is None
        with_saved_head = teacher if is_whole else TeacherOnDemand(plan, head="saved")
        weighted = measure_weights(plan, with_saved_head, data)
        importance = measure_parts(plan, with_saved_head, data)

        def make() -> None:
            path = of_models.teacher_path
            if settings.shape is not None:
                seed, head = plan.config.seed, of_models.student_head
                make_student(path, folder, settings, seed=seed, head=head, importance=importance)
                return
            # An encoder folder may contain other heads than the run needs; a decoder keeps the head of its folder.
            head = "saved" if of_models.causal else of_models.student_head
            compress_folder(path, folder, settings, device=device, head=head, weighted=weighted)

        on_main(make)
        wait_until_visible(made)
    return folder


def load_student(plan: Plan, folder: Path, dtype: torch.dtype, *, shard: bool = False) -> PreTrainedModel:
    """Load the student with the head that the run needs; a missing head is initialized by torch's random generator.

    `shard` loads it in shards if the run trains it at ZeRO stage 3; every rank must then call this function.
    """
    load = load_model
    if shard and plan.zero_stage == 3 and not is_adapter(folder):
        load = partial(load_sharded, sharding=Sharding(plan.ds_config))
    model = load(
        str(folder), dtype=dtype, head=plan.models.student_head, new_head=True, num_classes=plan.task.num_outputs
    )
    plan.task.configure(model)
    return model


def check_machine(plan: Plan) -> None:
    """Raise a UserError if this machine, DeepSpeed or a server does not support a setting; warn of slow losses."""
    world = World.current()
    check_ds_config(plan.ds_config, plan.config.ds_config)
    if (source := plan.source) is not None:
        on_every(lambda: source.check_available(plan))
    on_every(batch_source(plan).check_available)
    on_main(lambda: check_access(plan.config.train.report_to or []))
    if plan.layer_kernels == "compiled":
        check_compilers(world.device)
    if plan.config.train.liger is True:
        check_liger(plan, world.device)
    if compiles_optimizer(plan.ds_config) and world.device.type == "cpu" and not has_compiler():
        raise UserError(
            f"{plan.config.ds_config}: DeepSpeed compiles this optimizer, but no C++ compiler was found: install one "
            "(Debian and Ubuntu: apt-get install g++), or take a ds_config without offload_optimizer, such as zero2"
        )
    losses = kernels()
    if losses.state == "warning" and world.device.type == "cuda":
        warn_main(f"{losses.what}: {losses.said}; {losses.remedy}")


def make_engine(plan: Plan, student_folder: Path, embeddings: Tensor | None) -> tuple[Any, nn.ModuleDict]:
    """Return the DeepSpeed engine of the student, and the projectors, which map its widths to the teacher's.

    `embeddings` is the first value of the projector for embeddings of sentences, None without one.
    """
    config = plan.config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # initializes a missing head equally on every rank
        student = load_student(plan, student_folder, plan.models.dtype, shard=True)
    if plan.models.copies_classifier:
        set_classifier(student, read_classifier(str(plan.models.teacher_path), plan.models.teacher_head))
    adapt(student, config.student, config.seed)
    # After the adapters, which freeze all weights that are there.
    projectors = add_projectors(student, plan.method.projections, config.seed, embeddings=embeddings)
    return build_engine(student, plan.ds_config, config.train), projectors


def with_counted_steps(plan: Plan, data: TaskData) -> Plan:
    """Return the plan with train.epochs and train.warmup_ratio converted to steps by the size of the training set.

    The same examples give the same number of steps, so a resumed run has the same plan.
    """
    config, train = plan.config, plan.config.train
    if not plan.trains:
        return plan
    steps, notes = train.steps, plan.notes
    if train.epochs is not None:
        steps = data.num_steps(train.epochs, train.global_batch_size)
        notes = [*notes, f"{train.epochs} epoch(s) are {steps:,} steps"]
    return replace(plan, config=replace(config, train=train.with_steps(steps)), notes=notes)


def share_of(plan: Plan) -> Share:
    """Return this rank's share of the batches."""
    world = World.current()
    return Share(
        seed=plan.config.seed,
        global_batch_size=plan.config.train.global_batch_size,
        micro_batch_size=plan.split.micro_batch_size,
        rank=world.rank,
        world_size=world.size,
    )


def make_trainer(
    plan: Plan,
    student_folder: Path,
    teacher: TeacherOnDemand,
    data: TaskData,
    loader: Loader,
) -> Trainer:
    """Create the trainer from engine, hooks, loader and method; `teacher` is called only if it runs in the steps."""
    method, step_teacher = plan.method, None
    if plan.source is not None:

        def first_batch() -> Batch:
            # A loader of its own, because that of the run may read a stream.
            return data.loader(share_of(plan)).micro_batches(0)[0]

        step_teacher = plan.source.build(TeacherContext(plan, data, teacher, first_batch))
    if plan.layer_kernels == "compiled":
        print_main("Note        the layers are compiled, once: the first steps take longer (train.compile)")
    embeddings = None
    if step_teacher is not None and {"sentence", "dense"} & method.projections.keys() and not has_dense(student_folder):
        # Of the student before the engine, which may shard its weights or round them.
        untrained = partial(load_student, plan, student_folder, torch.float32)
        embeddings = nearest_rotation(method, untrained, step_teacher, data.teacher_examples())
    # The hooks come last, because they must wrap those of DeepSpeed.
    engine, projectors = make_engine(plan, student_folder, embeddings)
    return Trainer(
        engine=engine,
        student=tap_student(
            method,
            engine.module,
            forward=engine,
            projectors=projectors,
            vocabulary=plan.models.vocabulary,
            layer_kernels=plan.layer_kernels,
        ),
        teacher=step_teacher,
        method=method,
        loader=batch_source(plan).make_loader(
            LoaderParts(
                loader=loader,
                teacher=step_teacher,
                engine=engine,
                tokenizer=data.tokenizer,
                save=student_saver(plan, student_folder, engine),
            )
        ),
        settings=plan.config.train,
        seed=plan.config.seed,
    )


def student_saver(plan: Plan, untrained: Path, engine: Any) -> Callable[[Path], None]:
    """Return the function that saves the engine's student as a model in a folder; every rank must call it."""
    return partial(
        save_student,
        engine,
        template=Template(untrained, partial(load_student, plan, untrained)),
        settings=plan.config.student,
        prompt=plan.config.data.prompt,
        pooling=plan.method.pooling,
    )


def make_best(plan: Plan, untrained: Path, engine: Any, data: TaskData) -> BestStudent | None:
    """Return what keeps the best student of the run; None if the run keeps its last one."""
    by = plan.config.train.keep_best
    if by is None:
        return None

    def score() -> float:
        scored = ScoredModel(
            model=engine.module,
            tokenizer=data.tokenizer,
            predictions=plan.folder / "predictions" / "validations",
            sharded=engine.zero_optimization_stage() == 3,
        )
        engine.eval()  # without dropout
        try:
            return data.validation_score(scored)
        finally:
            engine.train()

    return BestStudent(
        folder=plan.folder,
        metric="loss" if by == "loss" else str(plan.task.validation_metric),
        save=student_saver(plan, untrained, engine),
        score=None if by == "loss" else score,
    )
