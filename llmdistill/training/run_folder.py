"""The run folder: its record of the settings, and whether the run in it is new, unfinished, finished or different."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from llmdistill.artifacts import as_json, compare_records, read_record
from llmdistill.config import RunConfig
from llmdistill.config.command_line import build, set_value, to_dict
from llmdistill.config.marks import earlier_defaults, find_marked, settings_of
from llmdistill.config.strict import flatten
from llmdistill.config.teacher import OneTeacher, others_of
from llmdistill.data.references import data_fingerprint
from llmdistill.errors import UserError
from llmdistill.files import is_unused, remove_abandoned, try_lock, write_error, write_json
from llmdistill.fingerprints import fingerprint
from llmdistill.methods import METHODS
from llmdistill.runtime.distributed import World, on_main
from llmdistill.runtime.ds_config import read_ds_config
from llmdistill.tasks import task_folder
from llmdistill.teachers.cache.folder import cache_fingerprint
from llmdistill.training.callbacks.best import read_best
from llmdistill.training.checkpoints import checkpoints
from llmdistill.training.defaults import RUN_FILE, settle_as_recorded

METRICS_FILE = "metrics.json"
"""This file is written last: a folder that contains it is finished."""
LOCK_FILE = ".lock"
INPUTS = "inputs"
"""Subfolder of a run folder for the models and data that the caller had in memory. Their file names are derived from
their content, so that the same call finds its run again."""
NOT_FINITE = "not_finite"
"""Subfolder for the batches of the steps whose numbers were not finite, one subfolder for each."""
ENDED = "ended.json"
"""File in it: the step and the peak learning rate of a run that such a step has ended."""

_FREE_BLOCKS = (
    *("zero_optimization", "activation_checkpointing", "aio", "checkpoint", "comms_logger", "flops_profiler", "timers"),
    *("tensorboard", "wandb", "comet", "csv_monitor", "steps_per_print", "wall_clock_breakdown", "memory_breakdown"),
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "dump_state"),
)
"""Keys of a DeepSpeed configuration that cannot change the student: the layout of its state, and what it prints. The
sizes of the batches are those of the run's settings."""
_IMPLEMENTATION = ("torch_adam", "fused", "foreach")
"""Parameters of the optimizer that choose its implementation, not what it computes."""
_INPUTS = (("teacher", "model"), ("student", "model"), ("data", "train"))
"""Settings that name the inputs of a run; the content of these inputs is compared as well as the names."""
_DATA = ("data.train", "data.valid", "student.factorize.calibration.data")
_STEPS = "earlier_steps"
"""Key in the record of a run: for each time that its steps were increased the setting, its old value, and the step."""
_RATES = "earlier_learning_rates"
"""Key in the record of a run: the peak learning rates that it had before, the first one first."""


def run_record(config: RunConfig, world_size: int) -> dict[str, Any]:
    """Return the record that identifies a run, as plain JSON values."""
    values = to_dict(config)
    return as_json(
        {
            "config": values,
            "ds_config": read_ds_config(config.ds_config),
            "inputs": input_fingerprints(values, made_below=config.output_dir),
            "world_size": world_size,
        }
    )


def input_fingerprints(values: Mapping[str, Any], *, made_below: str | Path | None) -> dict[str, str]:
    """Return the fingerprints of the models and the data that a run reads, by setting key.

    Inputs below `made_below`, which this run or study creates itself, have none, because the settings determine them.
    """
    below = None if made_below is None else Path(made_below).resolve()
    references = {f"{block}.{name}": values[block][name] for block, name in _INPUTS}
    references["student.factorize.calibration.data"] = values["student"]["factorize"]["calibration"]["data"]
    caches = {"teacher.cache": values["teacher"].get("cache")}
    for key, other in others_of(values["teacher"]):
        references[f"{key}.model"] = other["model"]
        caches[f"{key}.cache"] = other.get("cache")
    of_cache = {key: cache_fingerprint(Path(cache)) for key, cache in caches.items() if cache is not None}
    if values["train"].get("keep_best") is not None:
        references["data.valid"] = values["data"]["valid"]
    references |= task_reference(values["data"])
    return of_cache | {
        key: data_fingerprint(reference) if key in _DATA else fingerprint(reference)
        for key, reference in references.items()
        if reference is not None and not (below is not None and Path(reference).resolve().is_relative_to(below))
    }


def data_contents(config: RunConfig) -> dict[str, str]:
    """Return the fingerprints of what gives the examples of a run, the training data and a task's files, by key."""
    values = to_dict(config)
    # The caches that a recipe names may be the ones that are made.
    values["teacher"] = {**values["teacher"], "cache": None, "others": {}}
    contents = input_fingerprints(values, made_below=None)
    # data.train and data.task: data.valid gives no examples.
    return {key: content for key, content in contents.items() if key.startswith("data.t")}


def task_reference(data: Mapping[str, Any]) -> dict[str, str]:
    """Return the folder of a task's own files by its key, from the settings of the data; empty if they name none."""
    task = data["task"]
    named = data["kind"] == "task" and task["dir"] is not None
    return {"data.task": task_folder(task["dir"], task["name"])} if named else {}


def shaping_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration as plain JSON values, without the settings that cannot change the student."""
    shaping = as_json(config)
    keep_best, validates = shaping["train"].get("keep_best"), ("data.valid", "train.validate_every")
    # What chooses the best student shapes it.
    chosen_by = {"loss": validates, "score": (*validates, "scoring")}.get(keep_best, ())
    # ds_config is a path; its content is compared instead.
    free = [key for key in find_marked(RunConfig, "free") if key not in chosen_by]
    for key in [*free, "scoring.models", "scoring.batch_size"] if keep_best == "score" else free:
        *parents, name = key.split(".")
        block = shaping
        for parent in parents:
            block = block[parent]
        block.pop(name, None)
    for _, other in others_of(shaping["teacher"]):
        for name in find_marked(OneTeacher, "free"):
            other.pop(name, None)
    return dict(shaping)


def shaping_ds_config(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a DeepSpeed configuration as plain JSON values, without what cannot change the student."""
    shaping = {key: value for key, value in as_json(ds_config).items() if key not in _FREE_BLOCKS}
    for name in _IMPLEMENTATION:
        shaping.get("optimizer", {}).get("params", {}).pop(name, None)
    return shaping


def _identity(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are equal for two records of the same run."""
    inputs = {f"content of {key}": value for key, value in record["inputs"].items()}
    ds_config = shaping_ds_config(record["ds_config"])
    return {**shaping_settings(record["config"]), **inputs, "ds_config": ds_config}


def _complete(old: Mapping[str, Any], new: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of an earlier version, in which each setting that is new since then has its default."""
    added = {key: defaults.get(key) for key in new if key not in old}
    blocks = {
        key: _complete(value, new[key], defaults.get(key, {}))
        for key, value in old.items()
        if isinstance(value, dict) and isinstance(new.get(key), dict)
    }
    return {**old, **blocks, **added}


def _compare(folder: Path, old: Mapping[str, Any] | None, new: dict[str, Any], *, may_go_on: bool) -> None:
    """Raise a UserError unless two records are of one run; what may change is added to the new one with its old values.

    The learning rate may be lower if a step whose loss or gradient was not finite has ended the run, which could not
    continue otherwise. With `may_go_on` the steps may be more: the batch of a step depends only on the seed and the
    number of the step, so the student differs from that of one long run only by the schedule of the learning rate.
    """
    if old is not None:
        settings = {name: METHODS[name].settings for name in new["config"] if name in METHODS}
        methods = {name: kind() for name, kind in settings.items() if kind is not None}
        defaults = to_dict(RunConfig(method_settings=methods))
        for key, value in earlier_defaults(RunConfig).items():
            set_value(defaults, key, value)
        old = {**old, "config": _complete(old["config"], new["config"], as_json(defaults))}
        was, now = old["config"]["train"], new["config"]["train"]
        earlier = {key: list(old.get(key, ())) for key in (_RATES, _STEPS)}
        changed: dict[str, Any] = {}
        if now["learning_rate"] < was["learning_rate"]:
            ended = read_record(folder / NOT_FINITE / ENDED, remedy="remove the file", keys={"learning_rate": float})
            if ended is not None and ended["learning_rate"] == was["learning_rate"]:
                changed["learning_rate"] = now["learning_rate"]
                earlier[_RATES].append(was["learning_rate"])
        for key in ("steps", "epochs"):
            if not may_go_on or None in (was[key], now[key]) or now[key] <= was[key]:
                continue
            saved = checkpoints(folder)
            if not saved and (folder / "student").exists():
                raise UserError(
                    f"train.{key} was {was[key]} and is now {now[key]}, but {folder} has no checkpoint to go on from: "
                    "choose another output_dir"
                )
            changed[key] = now[key]
            earlier[_STEPS] += [{"key": key, "value": was[key], "step": saved[-1].step}] if saved else []
        new |= {key: values for key, values in earlier.items() if values}
        old = {**old, "config": {**old["config"], "train": {**was, **changed}}}
    compare_records(
        None if old is None else _identity(old),
        _identity(new),
        subject=f"output_dir {folder}: it holds a run of another configuration",
        remedy="choose another output_dir, or give the same settings to go on with it",
    )


def _read(folder: Path) -> dict[str, Any] | None:
    remedy = "choose another output_dir or remove this one"
    return read_record(folder / RUN_FILE, remedy=remedy, keys={"config": dict, "inputs": dict, "ds_config": dict})


def with_earlier_defaults(config: RunConfig) -> RunConfig:
    """Return the settings with which the run in the folder began, where a default has changed in between.

    The same command then goes on with a run of an earlier version. Raises UserError for a damaged record.
    """
    if config.output_dir is None:
        return config
    record = _read(Path(config.output_dir))
    if record is None:
        return config
    values, fields = to_dict(config), settings_of(RunConfig)
    given, recorded = flatten(values), flatten(record["config"])
    back = {
        key: earlier
        for key, earlier in earlier_defaults(RunConfig).items()
        if given[key] == fields[key].default and recorded.get(key, earlier) == earlier
    }
    for key, earlier in back.items():
        set_value(values, key, earlier)
    return build(values, RunConfig, METHODS) if back else config


def finished_metrics(config: RunConfig) -> dict[str, Any] | None:
    """Return the metrics of a finished run, None if it is unfinished or lacks scores; a UserError if it is another."""
    assert config.output_dir is not None
    folder, config = Path(config.output_dir), with_earlier_defaults(config).with_learning_rate()
    remedy = "remove the file, and the run is finished again"
    metrics = read_record(folder / METRICS_FILE, remedy=remedy, keys={"asked": dict})
    record = _read(folder)
    if metrics is None or record is None:
        return None
    config = settle_as_recorded(config, record["config"])  # a trial's settings may leave a choice to its run
    new = run_record(config, record.get("world_size", 1))
    _compare(folder, record, new, may_go_on=False)
    old, wanted = metrics["asked"], as_json(scoring_settings(config))
    # A trial that became a final run also has scores on the test sets; it still counts as a finished trial.
    tests = old.get("tests")
    has_all = isinstance(tests, dict) and tests.items() >= wanted["tests"].items()
    return metrics if has_all and {**old, "tests": None} == {**wanted, "tests": None} else None


def scoring_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings of the scoring and the sets to score, as plain JSON values."""
    values = to_dict(config)
    return {"scoring": values["scoring"], "valid": values["data"]["valid"], "tests": values["data"]["tests"]}


@contextmanager
def claim_folder(config: RunConfig, *, may_go_on: bool = False) -> Iterator[None]:
    """Create the run folder or check that it contains this run, and lock it for the block.

    Temporary folders that killed processes have left in it are removed. With `may_go_on` the run may have more steps
    than the folder's. Every rank must enter this context manager. Raises UserError if the folder contains a run with
    another configuration, contains a run although `resume` is never, or is locked by another process.
    """
    world = World.current()
    assert config.output_dir is not None
    folder, locks = Path(config.output_dir), list[IO[str]]()

    def claim() -> None:
        try:
            _claim(folder, run_record(config, world.size), config.resume, locks, may_go_on=may_go_on)
            for place in (folder, folder / INPUTS):
                if place.is_dir():
                    remove_abandoned(place)
        except OSError as error:
            raise write_error(folder, error) from error

    try:
        on_main(claim)
        yield
    finally:
        for lock in locks:
            lock.close()


def check_settings(config: RunConfig) -> None:
    """Raise a UserError as `claim_folder` does, before the inputs are there, which a teacher may write for hours.

    What only they tell is left to `claim_folder`: their content, the file of written data, and the steps of epochs.
    """
    assert config.output_dir is not None
    folder = Path(config.output_dir)
    old = _read_unclaimed(folder, config.resume)
    if old is None:
        return
    new = as_json({"config": to_dict(config), "ds_config": read_ds_config(config.ds_config), "inputs": {}})
    recorded = flatten(old["config"])
    for key in (*_DATA, "train.steps", "train.epochs"):
        if key in recorded:
            set_value(new["config"], key, recorded[key])
    _compare(folder, {**old, "inputs": {}}, new, may_go_on=True)


def _read_unclaimed(folder: Path, resume: str) -> dict[str, Any] | None:
    """Read the record of the run in a folder, if there is one; a UserError if the folder cannot hold a run."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir {folder}: it is a file; choose another output_dir or remove the file")
    old = _read(folder)
    if old is None and folder.is_dir() and not is_unused(folder, INPUTS, LOCK_FILE):
        raise UserError(f"output_dir {folder}: the folder is not empty and holds no run; choose another or empty it")
    if old is not None and resume == "never":
        raise UserError(
            f"output_dir {folder}: it holds a run already, and resume is never; choose another folder or resume auto"
        )
    return old


def _claim(folder: Path, record: dict[str, Any], resume: str, locks: list[IO[str]], *, may_go_on: bool) -> None:
    old = _read_unclaimed(folder, resume)
    _compare(folder, old, record, may_go_on=may_go_on)
    if old is not None and len(record.get(_STEPS, ())) > len(old.get(_STEPS, ())):
        locks.append(_lock(folder))  # another process may be at the end that is forgotten
        # Before the record has the new steps: after a kill in between it is done again.
        forget_end(folder)
    write_json(folder / RUN_FILE, record)
    # The record has made the folder in which the lock lies.
    locks += [] if locks else [_lock(folder)]


def _lock(folder: Path) -> IO[str]:
    """Lock the folder until the returned file is closed; do nothing if the file system does not support locks."""
    file = (folder / LOCK_FILE).open("w", encoding="utf-8")
    if not try_lock(file):
        file.close()
        raise UserError(
            f"output_dir {folder}: another process is at this run; wait for it, stop it, or choose another folder"
        )
    return file


def forget_end(folder: Path) -> None:
    """Remove the results of a finished run, so that it resumes from its last checkpoint, and the best student so far.

    Rank 0 only.
    """
    for name in (METRICS_FILE, "report.md", "report.html", "scores/student.json"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "predictions" / "student", ignore_errors=True)
    best = read_best(folder)
    # The end of the run has moved the best student from there.
    if best is not None and (folder / "student").is_dir() and not (folder / best["student"]).exists():
        (folder / best["student"]).parent.mkdir(exist_ok=True)
        (folder / "student").rename(folder / best["student"])
    shutil.rmtree(folder / "student", ignore_errors=True)


def run_warnings(folder: Path) -> list[str]:
    """Return what the report of a run with changes must say; more steps matter where the learning rate is scheduled."""
    record = _read(folder) or {}
    train, warnings = record.get("config", {}).get("train", {}), []
    if record.get(_RATES):
        rates = ", then ".join(f"{rate:g}" for rate in record[_RATES])
        warnings.append(
            f"the learning rate was {rates} until the loss or the gradient was not finite; the run went on from its "
            f"last checkpoint with {train['learning_rate']:g}"
        )
    earlier = record.get(_STEPS, [])
    if earlier and not (train["schedule"] == "constant" and train["warmup_ratio"] is None):
        changes = ", then ".join(f"{change['value']} until step {change['step']}" for change in earlier)
        key = earlier[-1]["key"]
        warnings.append(
            f"train.{key} was {changes}, and the run went on with {train[key]}: the learning rate of each step is that "
            f"of the number of {key} at its time, so the student is not that of one run of {train[key]} {key}"
        )
    return warnings
