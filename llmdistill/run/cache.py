"""A run's teacher as a file: makes the cache of its outputs, and checks that a cache is that of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmdistill.artifacts import compare_records, differences, plain, read_record
from llmdistill.batch import POSITIONS, Positions
from llmdistill.config.cache import CacheConfig
from llmdistill.config.command_line import to_dict
from llmdistill.errors import UserError
from llmdistill.files import is_unused, write_json
from llmdistill.fingerprints import content_fingerprint, fingerprint
from llmdistill.run.artifacts import input_fingerprints
from llmdistill.run.assemble import request_of
from llmdistill.run.cache_shards import Job, engine_of, plan_shards, write_shards
from llmdistill.run.checks import check_can_cache, check_top_k
from llmdistill.run.plan import Plan
from llmdistill.runtime.distributed import World, barrier, on_every, on_main
from llmdistill.tasks.base import TaskData
from llmdistill.teacher.cache_folder import (
    CACHE_FILE,
    HEAD_FILE,
    REQUEST_FILE,
    CacheFolder,
    entry_of,
    is_whole,
    shard_name,
)
from llmdistill.teacher.rows import rows_of_samples

_DATA_KEYS = ("kind", "train", "prompt", "max_length", "max_prompt_length", "long_prompts", "task")
"""Settings of the data that decide which examples there are; the others only arrange them."""
_TEXT_KEYS = ("field", "fraction", "sampling_exponent", "valid_sequences")
"""The same of data.text, for texts."""


def make_cache(plan: Plan, data: TaskData, settings: CacheConfig, folder: Path, world: World) -> dict[str, Any]:
    """Run the teacher of a run over its training set and keep its outputs in a folder; every rank must call this.

    What is there already is kept, whichever ranks wrote it. The shards are the same on any number of ranks.

    Args:
        plan: the run; its teacher, data and method decide what is kept.
        data: its examples.
        settings: what is kept of the distributions over tokens, and how it is written.
        folder: the cache.
        world: the ranks, which all see the folder.

    Returns:
        The content of cache.json.

    Raises:
        UserError: the method or the data allow no cache, or the folder holds something else.
    """
    check_can_cache(plan)
    check_top_k(plan, settings)
    settings = replace(settings, engine=engine_of(plan, settings, world))
    items, collate = data.taught_examples()
    ids, lengths = _measured(items)
    shards = plan_shards(ids, lengths, settings)
    kept = [index for shard in shards for batch in shard for index in batch]
    record = _record(plan, data, settings, ids[kept], lengths[kept])
    job = Job(folder, plan, settings, items, collate, shards, record, world)
    missing = on_main(lambda: _claim(job), world)
    if missing:
        write_shards(job, missing)
        barrier()  # rank 0 would otherwise look for the shards that others still write
    return on_main(lambda: _finish(job), world)


def check_cache(plan: Plan, data: TaskData, world: World) -> None:
    """Check that a run's teacher.cache is one of its teacher, data and method, and undamaged; every rank must call it.

    Every file is read once, by one of the ranks.

    Raises:
        UserError: there is no finished cache, it is that of another teacher, tokenizer, number format, data or method,
            or a file is damaged.
    """
    if plan.config.teacher.cache is None or not plan.method.needs_teacher:
        return
    path = Path(plan.config.teacher.cache)
    folder = on_every(lambda: CacheFolder(path), world)
    on_main(lambda: _check_origin(plan, data, folder), world)
    folder.check_files(world)
    on_main(lambda: _check_examples(plan, data, folder), world)


def _measured(items: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of examples and their numbers of tokens, without holding the examples."""
    found = np.array([(item.sample_id, len(item)) for item in items], dtype=np.int64)
    return found[:, 0], found[:, 1]


def count_examples(plan: Plan, data: TaskData) -> dict[Positions, int]:
    """Return the number of positions of each kind in the examples of a run's training set, equal examples once.

    Raises:
        UserError: the method or the data allow no cache.
    """
    check_can_cache(plan)
    items, collate = data.taught_examples()
    counts: Counter[Positions] = Counter()
    seen: set[int] = set()
    for item in items:
        if item.sample_id in seen:
            continue
        seen.add(item.sample_id)
        batch = collate([item]).with_label_rows(shift=plan.method.shift)
        counts.update({place: int(rows_of_samples(batch, place).sum()) for place in POSITIONS})
    return {place: counts[place] for place in POSITIONS}


def _origin(plan: Plan, data: TaskData) -> dict[str, Any]:
    """Return what the outputs of the teacher depend on, besides the examples."""
    return {
        "teacher": fingerprint(plan.teacher_path),
        "tokenizer": content_fingerprint(sorted(data.tokenizer.get_vocab().items())),
        "dtype": str(plan.teacher_dtype).removeprefix("torch."),
    }


def _data_record(plan: Plan) -> dict[str, Any]:
    values = to_dict(plan.config)
    contents = input_fingerprints(values, made_below=None)
    settings = {f"data.{key}": values["data"][key] for key in _DATA_KEYS}
    if values["data"]["kind"] == "text":
        text = values["data"]["text"]
        settings |= {"data.valid": values["data"]["valid"], **{f"data.text.{key}": text[key] for key in _TEXT_KEYS}}
        settings |= {"seed": values["seed"]} if text["fraction"] < 1 else {}
    return settings | {f"content of {key}": each for key, each in contents.items() if key.startswith("data.t")}


def _record(plan: Plan, data: TaskData, settings: CacheConfig, ids: np.ndarray, lengths: np.ndarray) -> dict[str, Any]:
    return plain(
        {
            **_origin(plan, data),
            "model": plan.config.teacher.model,
            "held": {
                **request_of(plan.method).record(),
                "top_k": settings.kept_top_k,
                "vocabulary": plan.compared_tokens,
            },
            "data": _data_record(plan),
            "examples": len(ids),
            "tokens": int(lengths.sum()),
            "ids": content_fingerprint(ids.tolist()),
            "settings": asdict(settings),
        }
    )


def _claim(job: Job) -> list[int]:
    """Return the shards that must be written; raises UserError if the folder holds something else."""
    remedy = "give another --output, or remove this one"
    finished = read_record(job.folder / CACHE_FILE, remedy=remedy, keys={"files": dict})
    asked = read_record(job.folder / REQUEST_FILE, remedy=remedy) if finished is None else finished
    if asked is None and job.folder.exists() and not (job.folder.is_dir() and is_unused(job.folder)):
        raise UserError(f"--output {job.folder}: the folder is not empty and holds no teacher's cache; {remedy}")
    subject = f"--output {job.folder}: it holds another cache"
    old = None if asked is None else {key: asked.get(key) for key in job.record}
    compare_records(old, job.record, finished=False, subject=subject, remedy=remedy)
    if finished is None:
        write_json(job.folder / REQUEST_FILE, job.record)
    missing = [n for n in range(len(job.shards)) if not is_whole(job.folder, shard_name(n), finished)]
    if not missing and job.has_head and not is_whole(job.folder, HEAD_FILE, finished):
        return [0]  # the head comes with any batch
    return missing


def _finish(job: Job) -> dict[str, Any]:
    """Write the record, then remove what stood for it."""
    finished = read_record(job.folder / CACHE_FILE, remedy="remove the file")
    names = [shard_name(number) for number in range(len(job.shards))]
    names += [HEAD_FILE] if job.has_head else []
    entries = {name: entry_of(job.folder, name, finished) for name in names}
    missing = [name for name, entry in entries.items() if entry is None]
    if missing:
        raise UserError(
            f"{job.folder / missing[0]} is missing after all ranks have written: every rank must see the same folder; "
            "start the command again"
        )
    record = {**job.record, "files": entries}
    write_json(job.folder / CACHE_FILE, record)
    for file in (job.folder / REQUEST_FILE, *((job.folder / name).with_suffix(".json") for name in names)):
        file.unlink(missing_ok=True)
    return record


def _check_origin(plan: Plan, data: TaskData, folder: CacheFolder) -> None:
    """Raises UserError if a cache is that of another teacher, tokenizer, number format, vocabulary or method."""
    record, key = folder.record, f"teacher.cache {folder.folder}"
    remedy = "name the cache of this run, or make it with `llmdistill cache` and the settings of this run"
    asked = {**_origin(plan, data), "vocabulary": plan.compared_tokens}
    held = {**record, "vocabulary": record["held"]["vocabulary"]}
    if record["held"]["top_k"] is None:
        del asked["vocabulary"]  # the head has the logits of all tokens
    for what, new in asked.items():
        if held.get(what) != new:
            name = f" ({record['model']})" if what == "teacher" else ""
            raise UserError(f"{key}: its {what} is {held.get(what)}{name}, and that of this run is {new}; {remedy}")
    lacking = request_of(plan.method).lacking(record["held"])
    if lacking is not None:
        methods = " + ".join(plan.config.methods())
        raise UserError(f"{key}: it does not hold {lacking}, which method {methods} needs; {remedy}")


def _check_examples(plan: Plan, data: TaskData, folder: CacheFolder) -> None:
    """Raises UserError if an example of the training set is not in a cache."""
    ids = [item.sample_id for item in data.taught_examples()[0]]
    missing = folder.missing(ids)
    if not missing:
        return
    found = differences(folder.record["data"], _data_record(plan))
    why = f"{found[0].key} was {found[0].old} and is now {found[0].new}" if found else "its data are others"
    raise UserError(
        f"teacher.cache {folder.folder}: {len(missing):,} of the {len(ids):,} examples are not in it, first "
        f"the one with the id {missing[0]}; {why}: make a cache with `llmdistill cache` and the settings of this run"
    )
