"""A run's teachers: on this machine, in a cache, behind a server, in other tokens, or several of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from llmdistill.models.adapters import is_adapter
from llmdistill.models.families import max_positions
from llmdistill.models.heads import HeadName
from llmdistill.models.load import merge_adapter
from llmdistill.runtime.distributed import World, exists_on_main, on_main, wait_until_visible
from llmdistill.runtime.terminal import print_main
from llmdistill.step.forward import TappedModel
from llmdistill.step.tap_models import tap_teacher
from llmdistill.step.teacher import Teacher
from llmdistill.tasks.base import TaskData
from llmdistill.teachers.cache_folder import CacheFolder
from llmdistill.teachers.cached import CachedTeacher
from llmdistill.teachers.live import LiveTeacher, load_teacher
from llmdistill.teachers.rows import Request
from llmdistill.teachers.several import AveragedTeachers, TeachersOfRows
from llmdistill.teachers.translated import TranslatedTeacher, Translation
from llmdistill.training.plan import Plan


class TeacherOnDemand:
    """The teacher of a run, which is loaded when it is first called and stays until `release`.

    A run that is already trained and scored never loads it.
    """

    def __init__(self, plan: Plan) -> None:
        """Load nothing yet."""
        self._plan = plan
        self._loaded: LiveTeacher | None = None

    def __call__(self) -> LiveTeacher:
        """Return the loaded teacher; every rank must call it."""
        self._loaded = self._loaded or make_teacher(self._plan)
        return self._loaded

    def release(self) -> None:
        """Give its memory back; a later call would load it again."""
        self._loaded = None


def make_teacher(plan: Plan, *, head: HeadName | None = None, name: str = "") -> LiveTeacher:
    """Load a teacher in evaluation mode, by default with the head that the run needs; `name` is one of others."""
    head = plan.models.teacher_head if head is None else head
    teacher = plan.models.teachers[name]
    path, settings = teacher.path, teacher.settings
    if settings.is_sharded and is_adapter(path):
        # A rank has only a shard of the base model, so rank 0 merges an adapter first.
        merged = plan.folder / (f"teacher-{name}" if name else "teacher")
        if not exists_on_main(merged / "config.json"):
            on_main(lambda: merge_adapter(path, merged))
            wait_until_visible(merged / "config.json")
        path = merged
    return load_teacher(str(path), dtype=teacher.dtype, sharding=settings.sharding, zero=settings.zero, head=head)


def teacher_of_steps(plan: Plan, teacher: Callable[[], LiveTeacher], data: TaskData) -> Teacher | None:
    """Return what teaches in the steps of a run; `teacher` is called only if it runs in them."""
    if plan.is_cached:
        return run_teacher(_cached(str(plan.config.teacher.cache), plan), plan, data)
    if plan.source is not None:
        return run_teacher(plan.source.build(plan), plan, data)
    return run_teacher(_live(plan, teacher()), plan, data) if plan.method.needs_teacher else None


def run_teacher(first: Teacher, plan: Plan, data: TaskData) -> Teacher:
    """Return what teaches in the steps of a run: `teacher.model` alone, in other tokens, or with others beside it."""
    if plan.models.translates:
        return TranslatedTeacher(first, make_translation(plan, data), say=partial(print_main))
    settings = {name: each.settings for name, each in plan.models.teachers.items()}
    if len(settings) == 1:
        return first
    teachers = {"": first}
    for name in [*settings][1:]:
        cache = settings[name].cache
        teachers[name] = _live(plan, make_teacher(plan, name=name)) if cache is None else _cached(cache, plan)
    average = plan.config.teacher.average
    if average == "rows":
        sharded = {name for name, each in settings.items() if each.is_sharded and each.cache is None}
        return TeachersOfRows(teachers=teachers, together=frozenset(sharded))
    weights = [each.weight for each in settings.values()]
    return AveragedTeachers(teachers=teachers, weights=weights, average=average)


def make_translation(plan: Plan, data: TaskData) -> Translation:
    """Return what turns the batches of a run into those of its teacher with another tokenizer."""
    longest = max_positions(plan.models.teacher, sys.maxsize)
    return Translation(data.tokenizer, data.teacher_tokenizer(), prompts=data.teacher_prompts(), longest=longest)


def _cached(folder: str, plan: Plan) -> CachedTeacher:
    world = World.current()
    request = Request.of(plan.method)
    return CachedTeacher(CacheFolder(Path(folder)), request, shift=plan.method.shift, device=world.device)


def _live(plan: Plan, teacher: LiveTeacher) -> TappedModel:
    return tap_teacher(
        plan.method,
        teacher.model,
        forward=teacher.forward,
        vocabulary=plan.models.vocabulary,
        compiled=plan.config.train.compile,
    )
