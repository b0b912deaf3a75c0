"""Runs the study: checks all settings first, then runs the tasks one after the other and writes the report."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from llmdistill.artifacts import read_record, read_result, write_result
from llmdistill.config.tasks import FineTuningConfig
from llmdistill.errors import UserError
from llmdistill.files import check_writable, file_name
from llmdistill.fingerprints import fingerprint
from llmdistill.messages import print_result
from llmdistill.models.configs import load_config
from llmdistill.models.families import is_causal, shape_of
from llmdistill.models.heads import HeadName
from llmdistill.models.load import load_model
from llmdistill.papers.fine_tuning.protocols import BEST, short_names, teacher_of
from llmdistill.papers.fine_tuning.results import compute_averages, fine_tuning_report
from llmdistill.papers.fine_tuning.task_study import TaskStudy
from llmdistill.report.record import describe_hardware, make_record
from llmdistill.runtime.distributed import World, on_main, process_group
from llmdistill.runtime.ds_config import read_ds_config
from llmdistill.runtime.launch import launched_ranks
from llmdistill.runtime.speed import measure_speed, parameter_split
from llmdistill.runtime.terminal import print_main, quiet_libraries, quiet_transformers
from llmdistill.studies.launcher import InProcess, Launcher
from llmdistill.studies.trials import Trial
from llmdistill.tasks.benchmark import find_benchmark, find_benchmarks
from llmdistill.tasks.glue import GLUE
from llmdistill.training.job import run_config


def run(config: FineTuningConfig, *, command: str, as_json: bool, launcher_flags: Sequence[str] = ()) -> None:
    """Fine-tune, choose, measure and print; every rank of the launcher must call this function.

    `command` is what the user typed, and `launcher_flags` are for runs that have their own processes. Raises UserError
    for bad input, or if the folder belongs to a run with other settings.
    """
    quiet_transformers()
    read_ds_config(config.ds_config)  # reports a mistake before waiting for the other ranks
    check_writable(output_dir(config), "--output_dir")
    # With --json, stdout contains only the result.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        if config.trials_at_once > 1:
            if launched_ranks() > 1:
                raise UserError(
                    f"--trials_at_once {config.trials_at_once}: each trial has a launcher of its own, but this command "
                    "itself runs on several ranks of a launcher: leave one of them out"
                )
            world, launcher = World.alone(), Launcher(tuple(launcher_flags), config.trials_at_once)
            launcher.check()
            results = fine_tune(config, command=command, launcher=launcher)
        else:
            with process_group() as world:
                quiet_libraries()
                results = fine_tune(config, command=command)
    if not world.is_main:
        return
    if as_json:
        print_result(results)
    else:
        fine_tuning_report(output_dir(config), results).print()


def fine_tune(
    config: FineTuningConfig, *, command: str, prefix: str = "--", launcher: Launcher | None = None
) -> dict[str, Any]:
    """Check, fine-tune, choose, measure and write the report in an existing process group; every rank must call it.

    `prefix` is that of the settings' names in error messages. A `launcher` runs each trial in its own process; by
    default the trials run in this process group. Raises UserError as `run`.
    """
    world = World.current()
    names = list(GLUE) if config.tasks is None else find_benchmarks(config.tasks, setting=f"{prefix}tasks")
    for task in names:
        benchmark, key = find_benchmark(task)
        benchmark.check_folder(config.data_dir, key, setting=f"{prefix}data_dir")
    studies = {
        task: TaskStudy(
            folder=output_dir(config) / task,
            config=config,
            task=task,
            teacher=None if config.teacher is None else teacher_of(config.teacher, task, names, key=f"{prefix}teacher"),
            drawn=_drawn(config, task, names, prefix),
        )
        for task in names
    }
    for study in studies.values():
        assert study.plan is not None  # resolves and checks the settings, of all tasks before the first one runs
    data = {name: study.benchmark.read_on_all(study.plan.models) for name, study in studies.items()}
    first = next(iter(studies.values()))
    runner = InProcess(lambda trial: run_config(trial)) if launcher is None else launcher
    runs = {name: study.protocol.num_trials for name, study in studies.items()}
    counted = ", ".join(f"{name} {count}" for name, count in runs.items())
    methods = " + ".join(config.methods()) + ("" if config.teacher is None else f" from {config.teacher}")
    classifier = "; the classifier starts as the teacher's" if first.plan.models.copies_classifier else ""
    print_main(
        f"Model       {config.model}\n"
        f"Method      {methods} (terms: {', '.join(first.plan.method.weights)}){classifier}\n"
        f"Runs        {sum(runs.values())} by the protocol {config.protocol}: {counted}\n"
        f"Output      {output_dir(config)}"
    )
    sizes = on_main(lambda: _measure(config, first))
    tasks = {name: study.conduct(data[name], runner) for name, study in studies.items()}
    results = {
        "model": config.model,
        "teacher": config.teacher,
        "baseline": config.baseline,
        "methods": config.methods(),
        "protocol": config.protocol,
        "limit": config.limit,
        "params": sizes["params"],
        "speed": sizes.get("speed"),
        "speed_asked": sizes["asked"] if "speed" in sizes else None,
        "tasks": tasks,
        "averages": compute_averages(tasks),
        "warnings": [warning for task in tasks.values() for warning in task["warnings"]],
        "run": make_record(command, world.size),
    }
    if world.is_main:
        fine_tuning_report(first.root, results).write()
    return results


@dataclass(frozen=True)
class FineTuning(Trial):
    """The fine-tuning of a model on all tasks as one trial of another study.

    It is started every time, because its own trials are kept. Its scores are its results.json.
    """

    work: ClassVar[str | None] = "fine_tune"
    launcher_flags: Sequence[str] = ()
    """As of `run`."""

    @property
    def has_launchers(self) -> bool:
        return bool(self.config.trials_at_once > 1)

    def values(self) -> dict[str, Any]:
        values = asdict(self.config)
        return {**values, **values.pop("method_settings"), "launcher_flags": list(self.launcher_flags)}

    def read_scores(self) -> None:
        return None

    def read_new_scores(self) -> dict[str, Any] | None:
        return read_record(self.folder / "results.json", remedy="remove it")

    def add_seconds(self, seconds: float) -> float:
        return seconds  # its trials keep theirs


def output_dir(config: FineTuningConfig) -> Path:
    if config.output_dir is not None:
        return Path(config.output_dir)
    name = file_name(config.model)
    methods = config.methods()
    return Path("runs") / "glue" / "-".join([name, *(methods if methods != ["sft"] else [])])


def _drawn(config: FineTuningConfig, task: str, tasks: list[str], prefix: str) -> dict[str, str]:
    """Return the models that t-SNE draws: the best models of the named earlier runs, then this run's best model."""
    if config.tsne is None:
        return {}
    root, key = output_dir(config), f"{prefix}tsne_layer"
    check_drawable(task, setting=f"{prefix}tsne")
    benchmark, name = find_benchmark(task)
    models = [teacher_of(folder, task, tasks, key=f"{prefix}tsne") for folder in config.tsne]
    for path in models:
        benchmark.check_fine_tuned(load_config(path), name, named=f"{prefix}tsne {path}")
    for path in (*models, config.model):
        check_layer(config.tsne_layer, load_config(path), named=path, key=key)
    return dict(zip(short_names([*config.tsne, str(root)]), [*models, str(root / task / BEST)], strict=True))


def check_drawable(task: str, *, setting: str) -> None:
    if not find_benchmark(task)[0].has_classes:
        raise UserError(f"{setting}: t-SNE draws the classes of examples, and {task} has none; leave it out for {task}")


def check_layer(layer: int | None, config: PreTrainedConfig, *, named: str, key: str) -> None:
    num_layers = shape_of(config).num_layers
    if layer is not None and layer > num_layers:
        raise UserError(f"{key} {layer}: {named} has {num_layers} layers; give 1 to {num_layers}")


def _measure(config: FineTuningConfig, study: TaskStudy) -> dict[str, Any]:
    """Count the parameters by part and, with `speed`, time forward passes; the results are stored, and measured once.

    Encoders are counted and timed without a head but with the pooler, as in the papers, and decoders with a classifier.
    The speed-ups are relative to the first model.
    """
    world = World.current()
    named = {"baseline": config.baseline, "teacher": study.teacher, "model": config.model}
    models = {role: path for role, path in named.items() if path is not None}
    file, dtype, device = study.root / "sizes.json", study.plan.models.dtype, world.device
    batch = {"batch_size": study.protocol.batch_size, "length": study.protocol.max_length}
    depends_on: dict[str, Any] = {
        "models": {role: fingerprint(path) for role, path in models.items()},
        "dtype": str(dtype),
    }
    if config.speed:
        depends_on |= {**batch, "hardware": describe_hardware(1)}
    earlier = read_result(file, depends_on)
    if earlier is not None:
        return earlier
    loaded = {}
    for role, path in models.items():
        head: HeadName = "sequence" if is_causal(load_config(path)) else "none"
        # A model that is not fine-tuned yet has no classifier; a new one has the same size and speed.
        loaded[role] = load_model(path, dtype=dtype, device=device, head=head, new_head=True)
    sizes: dict[str, Any] = {"params": {role: parameter_split(model) for role, model in loaded.items()}}
    if config.speed:
        repeats = 20 if device.type == "cuda" else 5
        sizes["speed"] = measure_speed(loaded, **batch, repeats=repeats, warmup=1)
    return write_result(file, depends_on, sizes)
