"""Data that the teacher of a run writes itself before the run (data.train teacher)."""

from __future__ import annotations

import fcntl
from dataclasses import replace
from pathlib import Path
from typing import IO

from llmdistill.config import RunConfig
from llmdistill.config.generation import WriteConfig
from llmdistill.config.student import CalibrationConfig
from llmdistill.data.references import TEACHER, parts_of
from llmdistill.data.sources import DataKind
from llmdistill.errors import UserError
from llmdistill.files import cache_folder, try_lock, write_error
from llmdistill.fingerprints import content_fingerprint
from llmdistill.generation.self_written import (
    OF_COMPRESS,
    OF_RUNS,
    ROWS,
    TEXT_TOKENS,
    Flags,
    choose_kind,
    request_of,
    without_length,
    write_data,
)
from llmdistill.messages import say
from llmdistill.runtime.distributed import World, on_main
from llmdistill.training.defaults import usual_examples


def names_teacher(config: RunConfig) -> bool:
    """Return whether the training or the calibration data of a run are written by its teacher."""
    references = (config.data.train, config.student.factorize.calibration.data)
    return config.data.kind in ("instructions", "text") and any(map(_is_teacher, references))


def _is_teacher(references: str | None) -> bool:
    return (
        references is not None and references != "" and any(part.reference == TEACHER for part in parts_of(references))
    )


def with_written_data(config: RunConfig, *, write: bool = True) -> RunConfig:
    """Return the run with the file that its teacher has written in place of "teacher"; every rank must call this.

    The file is written into `data.cache_dir`, once for each model and its settings, and one with more rows goes on from
    what is there. Unless `write`, a run whose file does not exist is returned as it is.

    Raises:
        UserError: as in `write_data`.
    """
    if not names_teacher(config):
        return config
    model, kind, settings = str(config.teacher.model), written_kind(config), written_settings(config)
    path = written_file(model, settings, kind, config.data.cache_dir)
    if write:
        write_once(model, settings, kind, path, OF_RUNS)
    elif not path.is_file():
        return config
    calibration = config.student.factorize.calibration
    own = None if calibration.data is None else _put(calibration.data, path)
    factorize = replace(config.student.factorize, calibration=replace(calibration, data=own))
    return replace(
        config,
        data=replace(config.data, train=_put(config.data.train, path)),
        student=replace(config.student, factorize=factorize),
    )


def written_kind(config: RunConfig) -> DataKind:
    """Return what the teacher of a run writes; a UserError if it cannot."""
    return choose_kind(str(config.teacher.model), "text" if config.data.kind == "text" else "instructions", OF_RUNS)


def written_settings(config: RunConfig) -> WriteConfig:
    """Return what the teacher of a run writes: its training data, or no more than its calibration reads."""
    if _is_teacher(config.data.train):
        return config.data.write
    calibration = config.student.factorize.calibration
    if calibration.examples is None:
        calibration = replace(calibration, examples=usual_examples(config.data.max_length))
    return for_calibration(config.data.write, calibration)


def for_calibration(settings: WriteConfig, calibration: CalibrationConfig) -> WriteConfig:
    """Return settings that write as many rows as a calibration reads, unless they say how many.

    An answer that is cut at its limit has inputs and gradients as good as another, so none is dropped for it.
    """
    rows = settings.rows
    if rows is None and settings.tokens is None:
        rows = calibration.count + calibration.checked
    return replace(settings, rows=rows, unfinished=settings.unfinished or "keep")


def written_file(model: str, settings: WriteConfig, kind: DataKind, cache_dir: str | None) -> Path:
    """Return the file of what a model writes by some settings, whose name tells both."""
    return cache_folder(cache_dir) / "written" / f"{_name(model, settings, kind)}.jsonl"


def _name(model: str, settings: WriteConfig, kind: DataKind) -> str:
    return content_fingerprint(request_of(model, settings, kind)).partition(":")[2][:16]


def write_once(model: str, settings: WriteConfig, kind: DataKind, path: Path, flags: Flags) -> None:
    """Write the file unless it is finished, while no other process does; every rank must call this function.

    The rows as they were sampled stay beside it, for files of more rows by the same settings.
    """
    locks = list[IO[str]]()  # of rank 0
    sampled = path.with_name(f"{_name(model, without_length(settings), kind)}.parts")

    def lock() -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            locks.append(sampled.with_suffix(".lock").open("w", encoding="utf-8"))
        except OSError as error:
            raise write_error(path, error) from error
        if not try_lock(locks[0]):
            say(f"Note        another process writes {path}; this one waits for it", aside=True)
            fcntl.lockf(locks[0], fcntl.LOCK_EX)

    try:
        on_main(lock)
        record = write_data(model, path, settings, kind=kind, flags=flags, kept_parts=sampled)
    finally:
        for file in locks:
            file.close()
    if World.current().is_main:
        what = "chats" if kind == "instructions" else "texts"
        say(
            f"Data        {record['rows']:,} {what} of {record['tokens']:,} tokens, written by {model}: {path}",
            aside=True,
        )


def _put(reference: str, path: Path) -> str:
    """Return a reference with the path in place of the teacher."""
    named = [(str(path) if part.reference == TEACHER else part.reference, part.weight) for part in parts_of(reference)]
    return ",".join(name if weight is None else f"{name}={weight:g}" for name, weight in named)


def written_data_exist(config: RunConfig) -> bool:
    """Return whether the teacher of a run has written its data already."""
    return not names_teacher(with_written_data(config, write=False))


def describe_writing(config: RunConfig) -> str:
    """Describe what the teacher of a run will write, or that it has."""
    settings, kind = written_settings(config), written_kind(config)
    path = written_file(str(config.teacher.model), settings, kind, config.data.cache_dir)
    if path.is_file():
        return f"the teacher has written its data already: {path}"
    what = "chats" if kind == "instructions" else "texts"
    amount = f"up to {most_tokens(config):,} tokens"
    if settings.rows is not None or settings.tokens is None:
        amount = f"{settings.rows or ROWS:,} {what} of {amount}"
    return f"the teacher first writes {amount} (data.write)"


def most_tokens(config: RunConfig) -> int:
    """Return the most tokens of the rows that the teacher of a run writes, without those that it drops."""
    settings = written_settings(config)
    longest = settings.max_prompt_tokens + settings.max_answer_tokens
    if config.data.kind == "text":
        longest = settings.max_text_tokens or TEXT_TOKENS
    rows = ROWS if settings.rows is None and settings.tokens is None else settings.rows
    return min(number for number in (settings.tokens, None if rows is None else rows * longest) if number is not None)


def calibration_file(model: object, calibration: CalibrationConfig) -> str:
    """Return the file of the calibration data that a named model writes for its own compression.

    Raises:
        UserError: the model is in memory.
        CannotWrite: the model is not able to write.
    """
    if not isinstance(model, str | Path):
        raise UserError(
            f"calibration data of the teacher are written by a model of a folder or name, and this is a "
            f"{type(model).__name__} in memory: save it first, or give data"
        )
    settings, name = for_calibration(WriteConfig(), calibration), str(model)
    kind = choose_kind(name, "auto", OF_COMPRESS)
    path = written_file(name, settings, kind, None)
    write_once(name, settings, kind, path, OF_COMPRESS)
    return str(path)
