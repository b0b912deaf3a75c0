"""One run from its plan to its report: score the teacher, create the student, train and score it, write the report."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from llmdistill.config import RunConfig
from llmdistill.errors import UserError
from llmdistill.methods.sft import make_sft
from llmdistill.models.configs import load_config
from llmdistill.models.load import folder_damage, load_model
from llmdistill.report.metrics_log import read_metrics_log
from llmdistill.report.table import describe_best, execution_record, fill_scores, finish_report
from llmdistill.runtime import signals
from llmdistill.runtime.devices import emulation_warning, free_memory
from llmdistill.runtime.distributed import World, exists_on_main, on_main
from llmdistill.runtime.engine import learning_rate, monitor_of
from llmdistill.runtime.terminal import print_main, warn_main
from llmdistill.step.teacher import AsyncTeacher
from llmdistill.students.counting import build_reference, count_parameters
from llmdistill.students.sizes import chosen_ranks, describe_params, describe_ranks
from llmdistill.students.speed import describe_speed
from llmdistill.tasks.base import TaskData
from llmdistill.tasks.scores import ScoreBook
from llmdistill.teachers.cache.origin import check_cache
from llmdistill.teachers.live import TeacherOnDemand
from llmdistill.training import assemble
from llmdistill.training.batches import batch_source
from llmdistill.training.calibration import check_calibration
from llmdistill.training.callbacks.base import Accumulator, Callback
from llmdistill.training.callbacks.best import read_best
from llmdistill.training.callbacks.health import Health
from llmdistill.training.callbacks.log_rows import LogRows
from llmdistill.training.callbacks.loss_watch import diverged
from llmdistill.training.callbacks.saving import Checkpoints
from llmdistill.training.callbacks.server import ServerAnswers
from llmdistill.training.callbacks.stopping import Stopping
from llmdistill.training.callbacks.validation import Validation
from llmdistill.training.checkpoints import load_checkpoint
from llmdistill.training.cost import forecast
from llmdistill.training.disk import check_disk
from llmdistill.training.headline import about, headline
from llmdistill.training.log import RunLog, check_log
from llmdistill.training.nearness import Nearness, print_nearness
from llmdistill.training.plan import Plan, make_plan
from llmdistill.training.provenance import write_run_card
from llmdistill.training.resolved import saved_sizes
from llmdistill.training.run_folder import claim_folder, finished_metrics, run_warnings, scoring_settings
from llmdistill.training.trackers import monitors
from llmdistill.training.trainer import Trainer

MakeCallback = Callable[[Trainer], Callback]
"""Makes a callback of a training, such as the callback's class."""


def run_config(config: RunConfig) -> dict[str, Any]:
    """Execute a run from its configuration, as `run_plan` does from its plan, in an existing process group.

    Raises UserError if the input is invalid, the folder contains another run, or the loss is no longer finite.
    """
    plan = make_plan(config)
    data, (counted,) = prepare_runs([plan], plan.task.read_on_all(plan.models))
    return run_plan(counted, data)


def prepare_runs(plans: Sequence[Plan], data: TaskData) -> tuple[TaskData, list[Plan]]:
    """Check the machine, the caches and the data of runs, and return the data ready for batches and the counted plans.

    Every rank must call this function.
    """
    for plan in plans:
        assemble.check_machine(plan)
        check_calibration(plan)
    data = data.prepare()
    for plan in plans:
        check_cache(plan, data.for_models(plan.models))
    return data, [assemble.with_counted_steps(plan, data) for plan in plans]


def run_plan(plan: Plan, data: TaskData) -> dict[str, Any]:
    """Execute a run from its plan unless it is finished, and return its metrics.json; every rank must call it."""
    with claim_folder(plan.recorded):
        if on_main(lambda: finished_metrics(plan.recorded)) is None:
            run_claimed(plan, data)
            gc.collect()  # engines have reference cycles, and several engines would not fit into memory
        else:
            on_main(lambda: check_students(plan.folder))
        metrics = on_main(lambda: finished_metrics(plan.recorded))
    assert metrics is not None
    return metrics


def check_students(folder: Path) -> None:
    """Check the student of a run's folder, trained and untrained, as far as they are there.

    The files are read once and hashed, at about 1.8 GB/s on one core: 9 seconds for a student of 16 GB, while scoring
    or exporting it reads the same bytes. Sizes alone would miss a flipped byte. Raises UserError, with what makes the
    file again, if one is not as it was written.
    """
    for name, again in (("untrained", "makes it again"), ("student", "trains it again from the last checkpoint")):
        made = folder / name
        damage = folder_damage(made) if made.is_dir() else None
        if damage is not None:
            raise UserError(f"{damage}; remove {made}, and the same command {again}")


def run_claimed(plan: Plan, data: TaskData, callbacks: Sequence[MakeCallback] = ()) -> None:
    """Execute the run in its claimed folder; finished parts are not repeated. Every rank must call this function.

    `callbacks` make further callbacks of the training.
    """
    world = World.current()
    began = time.perf_counter()
    on_main(lambda: check_students(plan.folder))
    on_main(lambda: check_disk(plan))
    print_main(headline(plan, data.report))
    if not (plan.folder / "checkpoints").is_dir():  # a run that goes on has less to do
        cost = on_main(lambda: forecast(plan, world.device))
        if cost is not None:
            print_main(f"Cost        {cost}")
    emulated = emulation_warning(plan.models.dtype, world.device)
    if emulated is not None:
        warn_main(emulated)
    book = ScoreBook(plan.folder, data)
    summaries: dict[str, dict[str, Any]] = {}
    scored = {*plan.config.scoring.models} & {*plan.task.scored}
    if plan.config.teacher.model is None or (plan.source is not None and not plan.source.is_scored):
        scored -= {"teacher"}  # there is none, or none is loaded: its outputs come from elsewhere

    def score(name: str, folder: Path) -> None:
        # `params` is known when the student is made, which is before any student is scored.
        if name in scored:
            dtype, head = plan.models.dtype, plan.task.head or "lm_head"
            load = partial(load_model, str(folder), dtype=dtype, device=world.device, head=head)
            summaries[name] = book.score(name, load, data.tokenizer, params=params)

    # Loaded at its first use, which may be to score it, to make the student, or in the steps.
    teacher = TeacherOnDemand(plan)
    if "teacher" in scored:
        summaries["teacher"] = book.score(
            "teacher",
            lambda: teacher().model,
            data.teacher_tokenizer(),
            params=plan.models.sizes["teacher_params"],
            sharded=plan.config.teacher.is_sharded,
        )
    warnings = [*data.warnings(summaries.get("teacher")), *on_main(lambda: run_warnings(plan.folder))]
    for warning in warnings:
        warn_main(warning)

    untrained, trained = assemble.make_untrained(plan, teacher, data), plan.folder / "student"
    # Ranks that the calibration data decide are not known before.
    reference = build_reference(load_config(untrained))
    params = count_parameters(reference)
    sizes = {
        **plan.models.sizes,
        **saved_sizes(params, plan.config.student, plan.models.dtype, lambda: reference),
        "student_params": params,
        "ratio": params / plan.models.sizes["teacher_params"],
    }
    if isinstance(sizes.get("ranks"), str):
        sizes |= chosen_ranks(reference)
        made = f"{describe_params(sizes)} parameters ({sizes['ratio']:.0%})"
        print_main(f"Student     {made}, rank {describe_ranks(sizes)}")
    plan = replace(plan, models=replace(plan.models, sizes=sizes))
    # Before the engine takes the memory. A student of few bits is scored as floats here: the gain that is reported is
    # that of the training less what rounding costs.
    score("untrained", untrained)
    nearness = Nearness(plan, data, teacher, scored)

    def measure(key: str, name: str, folder: Path) -> list[str]:
        load = partial(load_model, str(folder), dtype=plan.models.dtype, device=world.device)
        warning = nearness.measure(key, name, load)
        return [] if warning is None else [warning]

    start_warnings = measure("untrained", "untrained", untrained)
    for warning in start_warnings:
        warn_main(warning)
    warnings = [*warnings, *start_warnings]
    if not plan.runs_teacher:
        teacher.release()

    end_warnings = list[str]()
    if plan.trains:
        if not exists_on_main(trained / "config.json"):
            with _open_training(plan, untrained, trained, teacher, data, callbacks) as (trainer, start, watching):
                trainer.run(start, watching)
            # They hold the engine, whose memory goes with the last reference.
            del trainer, watching
            teacher.release()
            free_memory(world.device)  # scoring has the room of the engine and the teacher
        score("student", trained)
        end_warnings = [*data.end_warnings(summaries), *measure("student", "trained", trained)]

    if world.is_main:
        end_warnings = [*diverged(read_metrics_log(plan.folder)), *end_warnings]
        for warning in end_warnings:
            warn_main(warning)
        warnings = [*warnings, *end_warnings]
        _report(plan, data, summaries, warnings, nearness.measured, seconds=time.perf_counter() - began)


@contextmanager
def _open_training(
    plan: Plan,
    untrained: Path,
    trained: Path,
    teacher: TeacherOnDemand,
    data: TaskData,
    further: Sequence[MakeCallback],
) -> Iterator[tuple[Trainer, int, list[Callback]]]:
    """Give the trainer, the steps that the last checkpoint has, and the callbacks; after the block save the student."""
    world, batches = World.current(), batch_source(plan)
    loader = data.loader(assemble.share_of(plan))
    trainer = assemble.make_trainer(plan, untrained, teacher, data, loader)
    best = assemble.make_best(plan, untrained, trainer.engine, data)
    checkpoint, start, known = load_checkpoint(trainer.engine, plan.folder), 0, None
    if checkpoint is not None:
        start, steps, known = checkpoint.step, trainer.settings.steps, checkpoint.manifest.get("loss_modes")
        on_main(lambda: check_log(plan.folder, start, checkpoint.manifest.get("log")))
        ranks = checkpoint.manifest["ranks"]
        if ranks != world.size:
            print_main(
                f"Note        step {start} was saved by {ranks} rank(s): on {world.size} the numbers go on "
                "within rounding, not bit-equal",
            )
        rate = learning_rate(trainer.settings, start)
        print_main(f"Note        going on from step {start} of {steps}, at learning rate {rate:.3g}")
    loss_modes = trainer.choose_loss_modes(start, known)
    log = RunLog(plan.folder, start=start, steps=plan.config.train.steps)
    with log.activity, monitors(plan.config, monitor_of(trainer.engine), start) as log.monitor:
        # Where methods are compared by their validation loss, it must not be the loss of each method's own.
        method = make_sft() if plan.task.validates_labels else plan.method
        validation = Validation(trainer, data.validation(assemble.share_of(plan)), method, plan.folder)
        if best is not None:
            on_main(lambda: best.check_resumed(start))
        # The loss of the untrained student, at which the curve begins; a resumed run has logged it already.
        if start == 0 and validation.batches and not plan.task.validates_labels:
            log.add_figures(0, {"valid_loss": validation.loss()})
        health, rows = Health.of(plan, trainer, log.rows), LogRows(log, trainer)
        others = [make(trainer) for make in further]
        accumulators = {"log": rows, **health.accumulators} | {
            f"{place}.{type(callback).__name__}": callback
            for place, callback in enumerate(others)
            if isinstance(callback, Accumulator)
        }
        saving = Checkpoints(trainer, plan.folder, loss_modes, accumulators)
        if checkpoint is not None:
            saving.restore(checkpoint.manifest.get("figures", {}))
        has_server = isinstance(trainer.teacher, AsyncTeacher) or batches.asks_server
        # `Callback.reads` and `gives` say which one must come before which.
        callbacks: list[Callback] = [
            Stopping(),
            *([ServerAnswers(trainer)] if has_server else []),
            health,
            *batches.callbacks(trainer),
            *([validation] if validation.batches else []),
            *([best] if best is not None else []),
            *others,
            rows,
            saving,
        ]
        # From here on a signal ends the run after a whole step, which is saved; up to here there is nothing to save.
        with signals.waiting():
            yield trainer, start, callbacks
    if world.is_main and batches.student_copy is not None:
        # The weights as a server has read them; from now on it gets no others.
        shutil.rmtree(batches.student_copy, ignore_errors=True)
    report = data.after_training(loader)
    if report is not None:
        print_main(f"Data        {report}")
    if best is None:
        assemble.student_saver(plan, untrained, trainer.engine)(trained)
    else:
        print_main(f"Student     {describe_best(best.move_to(trained))}")
    # After saving, which gathers the weights from the engine.
    trainer.engine.destroy()
    slower = describe_speed(load_config(trained), world.device) if world.is_main else None
    if slower is not None:
        print_main(f"Speed       {slower}")


def _report(
    plan: Plan,
    data: TaskData,
    summaries: dict[str, dict[str, Any]],
    warnings: list[str],
    nearness: dict[str, dict[str, Any]],
    *,
    seconds: float,
) -> None:
    log = read_metrics_log(plan.folder)
    record = execution_record(plan.config.scoring.decoding, log, plan.models.sizes["teacher_params"])
    record["about"] = about(plan, data.report)
    if plan.models.teacher_origin is not None:
        record["teacher_origin"] = plan.models.teacher_origin
    best = read_best(plan.folder)
    results = data.results(summaries, log, plan.models.sizes)
    left_out = plan.models.sizes["student_params"] - plan.models.sizes["saved_params"]
    if left_out and "student" in results:
        results["student"] = {**results["student"], "params": results["student"]["params"] - left_out}
    metrics = {
        **results,
        "asked": scoring_settings(plan.config),
        **({"nearness": nearness} if nearness else {}),
        "warnings": warnings,
        **({} if best is None else {"kept": best}),
        "run": {**record, "seconds": round(seconds, 2)},
    }
    scores = data.table(results)
    table = fill_scores(scores, nearness, log)
    # Without test sets the last table has it, if there is one.
    print_nearness(plan.folder, nearness, with_table=bool(scores.columns) or not results)
    write_run_card(plan, metrics, table, data.report)
    finish_report(plan.folder, metrics, table)
