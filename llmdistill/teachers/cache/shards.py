"""Makes a teacher's cache: plans its shards, writes those that are missing, and closes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from llmdistill.artifacts import compare_records, read_record
from llmdistill.batch import POSITIONS, Batch, HeadInputs, Outputs, TopK
from llmdistill.config.teacher import CacheConfig
from llmdistill.errors import UserError
from llmdistill.files import is_unused, write_json
from llmdistill.losses.agreement import divergence_from
from llmdistill.models.sharded import gathered
from llmdistill.progress import progress
from llmdistill.runtime.distributed import World
from llmdistill.runtime.terminal import print_main, warn_main
from llmdistill.step.forward import TappedModel
from llmdistill.teachers.cache.folder import (
    CACHE_FILE,
    HEAD_FILE,
    REQUEST_FILE,
    entry_of,
    is_whole,
    shard_name,
    write_tensors,
)
from llmdistill.teachers.few_bits import MOST_NATS
from llmdistill.teachers.output_rows import Request, rows_of_samples, to_rows, top_rows

Shard = list[list[int]]
"""The batches of one shard: the indices of their examples in the training set."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A cache that is made."""

    folder: Path
    settings: CacheConfig
    request: Request
    shift: bool
    """Whether the label of a position is that of the next token (decoders)."""
    vocabulary: int | None
    """The first tokens, which are compared; None compares all."""
    items: Sequence[Any]
    """The training set."""
    collate: Callable[[list[Any]], Batch]
    shards: Sequence[Shard]
    record: Mapping[str, Any]
    """The content of request.json."""

    @property
    def top_k(self) -> int | None:
        return self.settings.stored_top_k

    @property
    def has_head(self) -> bool:
        return self.top_k is None and bool(self.request.positions)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Collate examples, on the CPU."""
        return self.collate([self.items[index] for index in indices]).with_positions(shift=self.shift)


def plan_shards(ids: np.ndarray, lengths: np.ndarray, settings: CacheConfig) -> list[Shard]:
    """Return the shards of a set of examples: equal examples once, neighbors of about the same length."""
    unique = {sample: index for index, sample in enumerate(ids.tolist())}  # equal examples have equal outputs
    ordered, size = sorted(unique.values(), key=lambda index: int(lengths[index])), settings.micro_batch_size
    shards: list[Shard] = []
    # As if a shard were full: the first batch then begins one.
    tokens = settings.shard_tokens
    for batch in (ordered[start : start + size] for start in range(0, len(ordered), size)):
        if tokens >= settings.shard_tokens:
            shards.append([])
            tokens = 0
        shards[-1].append(batch)
        tokens += int(lengths[batch].sum())
    return shards


def claim(job: Job) -> list[int]:
    """Return the shards that must be written; raises UserError if the folder holds something else."""
    remedy = "give another --output, or remove this one"
    finished = read_record(job.folder / CACHE_FILE, remedy=remedy, keys={"files": dict})
    request = read_record(job.folder / REQUEST_FILE, remedy=remedy) if finished is None else finished
    if request is None and job.folder.exists() and not (job.folder.is_dir() and is_unused(job.folder)):
        raise UserError(f"--output {job.folder}: the folder is not empty and holds no teacher's cache; {remedy}")
    subject = f"--output {job.folder}: it holds another cache"
    # cache.json has the sizes of the files too, which are not part of the request.
    old = None if request is None else {key: request.get(key) for key in job.record}
    if old is not None:
        # The record may be older than a setting, whose default it then had.
        old["settings"] = {**asdict(CacheConfig()), **(old["settings"] or {})}
    compare_records(old, job.record, subject=subject, remedy=remedy)
    if finished is None:
        write_json(job.folder / REQUEST_FILE, job.record)
    missing = [n for n in range(len(job.shards)) if not is_whole(job.folder, shard_name(n), finished)]
    if not missing and job.has_head and not is_whole(job.folder, HEAD_FILE, finished):
        return [0]  # the head comes with any batch
    return missing


def finish(job: Job) -> dict[str, Any]:
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


def write_by_teacher(job: Job, missing: Sequence[int], teacher: TappedModel, *, sharded: bool) -> None:
    """Write this rank's share of the missing shards; every rank must call this, as a sharded teacher needs them all."""
    world = World.current()
    rounds = [missing[start : start + world.size] for start in range(0, len(missing), world.size)]
    for numbers in progress(rounds, "Teacher's outputs", "rounds of shards"):
        has_own = world.rank < len(numbers)
        number = numbers[world.rank if has_own else 0]
        shard, finished = job.shards[number], []
        num_own = len(shard) if has_own else 0
        # A sharded teacher needs every rank in each pass, also one whose shard has fewer batches or that has none.
        for index in range(max(len(job.shards[rank]) for rank in numbers) if sharded else num_own):
            is_first = numbers is rounds[0] and index == 0
            batch, outputs, rows = _run_teacher(job, teacher, shard, index, tell=is_first and world.is_main)
            if index < num_own:
                finished.append((batch, rows))
                scaling = outputs.taps.scaling
        if has_own:
            _save(job, number, finished, scaling)


def _save(
    job: Job, number: int, made: Iterable[tuple[Batch, Mapping[str, Tensor]]], scaling: Mapping[int, float]
) -> None:
    """Write a shard of batches, on the CPU, and the rows of their examples."""
    ids, rows, counts = list[int](), dict[str, list[Tensor]](), dict[str, list[Tensor]]()
    for batch, of_batch in made:
        ids += [sample_id for row in batch.sample_ids for sample_id in row]
        for name, tensor in of_batch.items():
            rows.setdefault(name, []).append(tensor)
        for place in POSITIONS:
            counts.setdefault(place, []).append(rows_of_samples(batch, place))
    tensors = {"ids": torch.tensor(ids)} | {name: torch.cat(parts) for name, parts in rows.items()}
    for name, parts in counts.items():
        tensors[f"offsets.{name}"] = functional.pad(torch.cat(parts).cumsum(0), (1, 0))
    write_tensors(job.folder, shard_name(number), tensors, {"scaling": json.dumps(scaling)})


def write_by_scorer(job: Job, missing: Sequence[int], score: Callable[[list[list[int]]], list[TopK]]) -> None:
    """Write the missing shards of the most likely tokens from this one process.

    `score` returns those after each of the T tokens of given sequences, (T, k), with the rest at temperature 1.
    """
    for number in progress(missing, "Teacher's outputs", "shards"):
        # Each example is collated alone, so that it has no padding, and its positions are those of its tokens.
        batches = [job.batch([index]) for indices in job.shards[number] for index in indices]
        made = []
        for batch, top in zip(batches, score([packed.input_ids[0].tolist() for packed in batches]), strict=True):
            rows: dict[str, Tensor] = {}
            for place in job.request.positions:
                rows |= top_rows(top.at(batch.flat_positions(place)), place)
            made.append((batch, rows))
        _save(job, number, made, {})


def _print_rounding(head: HeadInputs, rows: Mapping[str, Tensor], request: Request) -> None:
    """Print how far hidden states in int8 move the distributions of a batch; `head` has its exact rows."""
    assert head.weight is not None, "hidden states need the head"
    place = request.positions[0]
    states_NK = rows[f"{place}.states"] * rows[f"{place}.scale"][:, None]
    rounded = head._replace(rows=states_NK.to(head.weight.dtype))
    nats = float(divergence_from(head, rounded)) / max(1, len(states_NK))
    print_main(f"Note        hidden states in int8: on the first batch {nats:.2g} nats a token from the exact ones")
    if nats > MOST_NATS:
        warn_main(f"--cache.dtype int8 moves the teacher's distributions by {nats:.2g} nats a token: take auto")


def _run_teacher(
    job: Job, teacher: TappedModel, shard: Shard, number: int, *, tell: bool
) -> tuple[Batch, Outputs, dict[str, Tensor]]:
    """Run the teacher on a batch of a shard: the batch, on the CPU, the outputs, and the rows to keep.

    The number may be beyond the last batch, which is then run again: a sharded teacher needs all ranks in each pass.
    `tell` prints what rounding changes.
    """
    batch = job.batch(shard[min(number, len(shard) - 1)])
    moved = batch.with_positions(shift=teacher.shift).to(World.current().device)
    with torch.no_grad():
        outputs = teacher.compute_targets(moved, lm_head=job.request.positions)
        head = next((output for output in outputs.lm_head.values() if isinstance(output, HeadInputs)), None)
        with nullcontext() if head is None else gathered(head.weight, head.bias):
            # Rank 0 writes the LM head, once.
            is_writer = World.current().is_main and job.top_k is None
            if head is not None and is_writer and entry_of(job.folder, HEAD_FILE, None) is None:
                assert head.weight is not None, "hidden states need the head"
                tensors = {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})
                scale = {} if head.scale.is_plain else {"scale": json.dumps(head.scale)}
                on_cpu = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
                write_tensors(job.folder, HEAD_FILE, on_cpu, scale)
            in_8_bits, vocabulary = job.settings.dtype == "int8", job.vocabulary
            rows = to_rows(outputs, moved, job.request, top_k=job.top_k, vocabulary=vocabulary, in_8_bits=in_8_bits)
            if in_8_bits and head is not None and tell:
                _print_rounding(head, rows, job.request)
    return batch, outputs, {name: tensor.cpu() for name, tensor in rows.items()}
