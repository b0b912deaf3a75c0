"""The trainer of a run, created from its plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llmdistill.batch import Loader
from llmdistill.methods.sft import make_sft
from llmdistill.models.forward import TappedModel
from llmdistill.run.assemble.data import prepare_loader, share_of
from llmdistill.run.assemble.models import make_engine, make_recorder
from llmdistill.run.plan import Plan
from llmdistill.run.trainer import Trainer
from llmdistill.runtime.distributed import World
from llmdistill.tasks.base import TaskData
from llmdistill.teacher.live import LiveTeacher


def make_trainer(
    plan: Plan,
    student_folder: Path,
    teacher: Callable[[], LiveTeacher],
    data: TaskData,
    loader: Loader,
    world: World,
) -> Trainer:
    """Create the trainer from the engine, hooks, loader and method; `teacher` is called only if the method needs it."""
    config, method = plan.config, plan.method
    engine, projectors = make_engine(plan, student_folder)
    # The recorders are created last, because their hooks must wrap the hooks of DeepSpeed.
    tapped_teacher = None
    if method.needs_teacher:
        live = teacher()
        recorder = make_recorder(plan, live.model, method.teacher_taps)
        tapped_teacher = TappedModel(live.forward, recorder, vocabulary=plan.vocabulary)
    recorder = make_recorder(plan, engine.module, method.student_taps, projectors)
    return Trainer(
        engine=engine,
        student=TappedModel(engine, recorder, vocabulary=plan.vocabulary),
        teacher=tapped_teacher,
        method=method,
        loader=prepare_loader(plan, loader, engine, data, world),
        settings=config.train,
        seed=config.seed,
        folder=plan.folder,
        world=world,
        validation=data.validation(share_of(plan, world)),
        validation_method=make_sft() if plan.task.validates_labels else None,
    )
