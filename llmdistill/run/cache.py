"""A run's teacher as a file: makes the cache of its outputs, and checks that a cache is that of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from llmdistill.artifacts import compare_records, differences, plain, read_record
from llmdistill.batch import POSITIONS, Batch, HeadInputs, Outputs
from llmdistill.config.cache import CacheConfig
from llmdistill.config.command_line import to_dict
from llmdistill.data.sampler import Share, TrainLoader
from llmdistill.errors import UserError
from llmdistill.files import write_json
from llmdistill.fingerprints import content_fingerprint, fingerprint
from llmdistill.models.forward import TappedModel
from llmdistill.models.heads import whole
from llmdistill.run.artifacts import input_fingerprints
from llmdistill.run.assemble import make_recorder, make_teacher, request_of
from llmdistill.run.checks import check_can_cache
from llmdistill.run.plan import Plan
from llmdistill.runtime.distributed import World, barrier, on_every, on_main
from llmdistill.tasks.base import TaskData
from llmdistill.teacher.cache_folder import (
    CACHE_FILE,
    HEAD_FILE,
    REQUEST_FILE,
    CacheFolder,
    entry_of,
    shard_name,
    write_tensors,
)
from llmdistill.teacher.rows import rows_of_samples, to_rows

_DATA_KEYS = ("kind", "train", "max_length", "max_prompt_length", "long_prompts", "task")
"""Settings of the data that decide which examples there are; the others only arrange them."""

Shard = list[list[int]]
"""The batches of one shard: the indices of their examples in the training set."""


@dataclass(frozen=True)
class _Job:
    """A cache that is made."""

    folder: Path
    plan: Plan
    settings: CacheConfig
    items: Sequence[Any]
    """The training set."""
    collate: Callable[[list[Any]], Batch]
    shards: Sequence[Shard]
    record: Mapping[str, Any]
    """The content of request.json."""
    world: World

    @property
    def top_k(self) -> int | None:
        return self.settings.top_k if self.settings.content == "top_k" else None

    @property
    def has_head(self) -> bool:
        return self.top_k is None and bool(self.plan.method.taught_positions)


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
    loader = _fixed_examples(plan, data)
    ids, lengths = _measured(loader.items)
    shards = plan_shards(ids, lengths, settings)
    kept = [index for shard in shards for batch in shard for index in batch]
    record = _record(plan, data, settings, ids[kept], lengths[kept])
    job = _Job(folder, plan, settings, loader.items, loader.collate, shards, record, world)
    missing = on_main(lambda: _claim(job), world)
    if missing:
        _write_shards(job, missing)
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


def plan_shards(ids: np.ndarray, lengths: np.ndarray, settings: CacheConfig) -> list[Shard]:
    """Return the shards of a set of examples: equal examples once, neighbours of about the same length."""
    unique = {sample: index for index, sample in enumerate(ids.tolist())}
    ordered, size = sorted(unique.values(), key=lambda index: int(lengths[index])), settings.micro_batch_size
    shards: list[Shard] = []
    tokens = settings.shard_tokens
    for batch in (ordered[start : start + size] for start in range(0, len(ordered), size)):
        if tokens >= settings.shard_tokens:
            shards.append([])
            tokens = 0
        shards[-1].append(batch)
        tokens += int(lengths[batch].sum())
    return shards


def _fixed_examples(plan: Plan, data: TaskData) -> TrainLoader[Any]:
    loader = data.loader(Share(seed=plan.config.seed, global_batch_size=1, micro_batch_size=1))
    assert isinstance(loader, TrainLoader), f"{type(loader).__name__} makes its examples anew"
    return loader


def _vocabulary(plan: Plan) -> int:
    """The number of tokens whose probabilities are compared."""
    return int(plan.teacher_config.vocab_size) if plan.vocabulary is None else plan.vocabulary


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
    return settings | {f"content of {key}": each for key, each in contents.items() if key.startswith("data.t")}


def _record(plan: Plan, data: TaskData, settings: CacheConfig, ids: np.ndarray, lengths: np.ndarray) -> dict[str, Any]:
    top_k = settings.top_k if settings.content == "top_k" else None
    if top_k is not None and top_k >= _vocabulary(plan):
        raise UserError(
            f"--cache.top_k is {top_k}, but teacher and student share {_vocabulary(plan)} tokens: give less, or take "
            "--cache.content hidden_states"
        )
    return plain(
        {
            **_origin(plan, data),
            "model": plan.config.teacher.model,
            "held": {**request_of(plan.method).record(), "top_k": top_k, "vocabulary": _vocabulary(plan)},
            "data": _data_record(plan),
            "examples": len(ids),
            "tokens": int(lengths.sum()),
            "ids": content_fingerprint(ids.tolist()),
            "settings": asdict(settings),
        }
    )


def _claim(job: _Job) -> list[int]:
    """Return the shards that must be written; raises UserError if the folder holds something else."""
    remedy = "give another --output, or remove this one"
    finished = read_record(job.folder / CACHE_FILE, remedy=remedy)
    asked = read_record(job.folder / REQUEST_FILE, remedy=remedy) if finished is None else finished
    if asked is None and job.folder.is_dir() and any(job.folder.iterdir()):
        raise UserError(f"--output {job.folder}: the folder is not empty and holds no teacher's cache; {remedy}")
    subject = f"--output {job.folder}: it holds another cache"
    old = None if asked is None else {key: asked.get(key) for key in job.record}
    compare_records(old, job.record, finished=False, subject=subject, remedy=remedy)
    if finished is None:
        write_json(job.folder / REQUEST_FILE, job.record)
    missing = [n for n in range(len(job.shards)) if entry_of(job.folder, shard_name(n), finished) is None]
    if not missing and job.has_head and entry_of(job.folder, HEAD_FILE, finished) is None:
        return [0]  # the head comes with any batch
    return missing


def _write_shards(job: _Job, missing: Sequence[int]) -> None:
    """Write this rank's share of the missing shards."""
    plan, world = job.plan, job.world
    live = make_teacher(plan, world)
    teacher = TappedModel(live.forward, make_recorder(plan, live.model, plan.method.teacher_taps))
    rounds = [missing[start : start + world.size] for start in range(0, len(missing), world.size)]
    for numbers in tqdm(rounds, unit="round", disable=None if world.is_main else True, leave=False):
        mine = numbers[world.rank] if world.rank < len(numbers) else None
        # A sharded teacher needs every rank in each forward pass.
        passes = max(len(job.shards[number]) for number in numbers) if live.sharded else 0
        if mine is not None:
            _write_shard(job, teacher, mine, passes)
            continue
        for turn in range(passes):
            _taught(job, teacher, job.shards[numbers[0]], turn)
    teacher.remove()


def _write_shard(job: _Job, teacher: TappedModel, number: int, passes: int) -> None:
    """Write a shard after at least this number of forward passes, of which those after its last batch do not count."""
    shard, ids = job.shards[number], list[int]()
    rows: dict[str, list[Tensor]] = {}
    counts: dict[str, list[Tensor]] = {}
    scaling: Mapping[int, float] = {}
    for turn in range(max(passes, len(shard))):
        batch, outputs, of_batch = _taught(job, teacher, shard, turn)
        if turn >= len(shard):
            continue
        scaling = outputs.taps.scaling
        ids += [each for row in batch.sample_ids for each in row]
        for name, tensor in of_batch.items():
            rows.setdefault(name, []).append(tensor)
        for place in POSITIONS:
            counts.setdefault(place, []).append(rows_of_samples(batch, place))
    tensors = {"ids": torch.tensor(ids)} | {name: torch.cat(parts) for name, parts in rows.items()}
    for name, parts in counts.items():
        tensors[f"offsets.{name}"] = functional.pad(torch.cat(parts).cumsum(0), (1, 0))
    write_tensors(job.folder, shard_name(number), tensors, {"scaling": json.dumps(scaling)})


def _taught(job: _Job, teacher: TappedModel, shard: Shard, turn: int) -> tuple[Batch, Outputs, dict[str, Tensor]]:
    """Run the teacher on a batch of a shard, by turns: the batch, on the CPU, the outputs, and the rows to keep."""
    method = job.plan.method
    indices = shard[min(turn, len(shard) - 1)]
    batch = job.collate([job.items[index] for index in indices]).with_label_rows(shift=method.shift)
    moved = batch.to(job.world.device)
    with torch.no_grad():
        outputs = teacher.teach(moved, lm_head=method.taught_positions)
        head = next((each for each in outputs.lm_head.values() if isinstance(each, HeadInputs)), None)
        with nullcontext() if head is None else whole(head):
            if head is not None and job.top_k is None:
                _write_head(job, head)
            rows = to_rows(outputs, moved, request_of(method), top_k=job.top_k, vocabulary=job.plan.vocabulary)
    return batch, outputs, rows


def _write_head(job: _Job, head: HeadInputs) -> None:
    """Write the LM head, once, on rank 0."""
    if not job.world.is_main or entry_of(job.folder, HEAD_FILE, None) is not None:
        return
    tensors = {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})
    write_tensors(job.folder, HEAD_FILE, {name: each.detach().cpu() for name, each in tensors.items()}, {})


def _finish(job: _Job) -> dict[str, Any]:
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
    asked = {**_origin(plan, data), "vocabulary": _vocabulary(plan)}
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
    ids = [item.sample_id for item in _fixed_examples(plan, data).items]
    missing = folder.missing(ids)
    if not missing:
        return
    found = differences(folder.record["data"], _data_record(plan))
    why = f"{found[0].key} was {found[0].old} and is now {found[0].new}" if found else "its data are others"
    raise UserError(
        f"teacher.cache {folder.folder}: {len(missing):,} of the {len(ids):,} training examples are not in it, first "
        f"the one with the id {missing[0]}; {why}: make a cache with `llmdistill cache` and the settings of this run"
    )
