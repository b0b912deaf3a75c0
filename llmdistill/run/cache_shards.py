"""Writes the shards of a teacher's cache: by the run's own teacher, on one or several ranks, or by vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from llmdistill.batch import POSITIONS, Batch, HeadInputs, Outputs
from llmdistill.config.cache import CacheConfig
from llmdistill.errors import UserError
from llmdistill.generation.vllm_engine import EngineName, VllmScorer, choose_engine
from llmdistill.models.families import max_positions
from llmdistill.models.forward import TappedModel
from llmdistill.models.heads import whole
from llmdistill.progress import progress
from llmdistill.run.assemble import make_recorder, make_teacher, request_of
from llmdistill.run.loss_check import check_losses
from llmdistill.run.plan import Plan
from llmdistill.runtime.distributed import World
from llmdistill.teacher.cache_folder import HEAD_FILE, entry_of, shard_name, write_tensors
from llmdistill.teacher.rows import rows_of_samples, to_rows, top_rows

Shard = list[list[int]]
"""The batches of one shard: the indices of their examples in the training set."""


@dataclass(frozen=True)
class Job:
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
        return self.settings.kept_top_k

    @property
    def has_head(self) -> bool:
        return self.top_k is None and bool(self.plan.method.teacher_positions)


def plan_shards(ids: np.ndarray, lengths: np.ndarray, settings: CacheConfig) -> list[Shard]:
    """Return the shards of a set of examples: equal examples once, neighbors of about the same length."""
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


def engine_of(plan: Plan, settings: CacheConfig, world: World) -> EngineName:
    """Return what runs the teacher: "auto" means vLLM if it is installed and gives all that is kept, else "hf".

    Raises:
        UserError: vLLM is asked for and cannot do it; the message gives the reason.
    """
    return choose_engine(
        settings.engine,
        plan.teacher_path,
        no_repeat_ngram_size=0,
        world_size=world.size,
        key="--cache.engine",
        obstacle=_obstacle(plan, settings),
    )


def _obstacle(plan: Plan, settings: CacheConfig) -> str | None:
    """Why vLLM's log-probabilities of given tokens are not all that is kept; None if they are."""
    request, length = request_of(plan.method), plan.config.data.max_length
    methods = " + ".join(plan.config.methods())
    if settings.kept_top_k is None:
        return "vLLM gives no hidden states; take --cache.content top_k, or --cache.engine hf"
    if not plan.causal:
        return "vLLM gives log-probabilities of decoders alone; take --cache.engine hf"
    if request.taps or request.sequences or not request.positions:
        return f"method {methods} needs more of its teacher than log-probabilities of tokens; take --cache.engine hf"
    if request.temperatures != (1.0,):
        asked = ", ".join(f"{each:g}" for each in request.temperatures)
        return f"the tail's mass at temperature {asked} does not follow from vLLM's answers; take --cache.engine hf"
    if plan.compared_tokens != plan.teacher_config.vocab_size:
        return (
            f"vLLM compares all {plan.teacher_config.vocab_size} tokens of the teacher, of which the student has "
            f"{plan.compared_tokens}; take --cache.engine hf"
        )
    if max_positions(plan.teacher_config, length + 1) <= length:
        return (
            f"vLLM generates a token after the {length} of data.max_length, and the teacher has no position for it; "
            "take --cache.engine hf, or a smaller data.max_length"
        )
    return None


def write_shards(job: Job, missing: Sequence[int]) -> None:
    """Write this rank's share of the missing shards."""
    if job.settings.engine == "vllm":
        _write_shards_by_vllm(job, missing)
        return
    plan, world = job.plan, job.world
    live = make_teacher(plan, world)
    teacher = TappedModel(
        live.forward, make_recorder(plan, live.model, plan.method.teacher_taps), pooling=plan.method.pooling
    )
    if missing:
        _check_loss(job, teacher)
    rounds = [missing[start : start + world.size] for start in range(0, len(missing), world.size)]
    for numbers in progress(rounds, "Teacher's outputs", "rounds of shards"):
        mine = numbers[world.rank] if world.rank < len(numbers) else None
        # A sharded teacher needs every rank in each forward pass.
        passes = max(len(job.shards[number]) for number in numbers) if live.sharded else 0
        if mine is not None:
            _write_shard(job, teacher, mine, passes)
            continue
        for turn in range(passes):
            _taught(job, teacher, job.shards[numbers[0]], turn)
    teacher.remove()


def _check_loss(job: Job, teacher: TappedModel) -> None:
    """Choose how the teacher gives its logits. Raises UserError if they do not follow from what the cache keeps."""
    if not job.plan.method.token_terms:
        return
    batch = job.collate([job.items[index] for index in job.shards[0][0]]).with_label_rows(shift=job.plan.method.shift)
    check_losses({"teacher": teacher}, batch.to(job.world.device), job.world)
    if job.top_k is None and job.plan.method.teacher_positions and not teacher.shortcut:
        raise UserError(
            "--cache.content hidden_states keeps the inputs of the LM head, but the logits of a "
            f"{teacher.model.config.model_type} are more than its product: take --cache.content top_k"
        )


def _write_shard(job: Job, teacher: TappedModel, number: int, passes: int) -> None:
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
    _save(job, number, ids, rows, counts, scaling)


def _save(
    job: Job,
    number: int,
    ids: Sequence[int],
    rows: Mapping[str, Sequence[Tensor]],
    counts: Mapping[str, Sequence[Tensor]],
    scaling: Mapping[int, float],
) -> None:
    """Write the rows of a shard's examples, and the number of rows of each example, which come in parts."""
    tensors = {"ids": torch.tensor(ids)} | {name: torch.cat(list(parts)) for name, parts in rows.items()}
    for name, parts in counts.items():
        tensors[f"offsets.{name}"] = functional.pad(torch.cat(list(parts)).cumsum(0), (1, 0))
    write_tensors(job.folder, shard_name(number), tensors, {"scaling": json.dumps(scaling)})


def _write_shards_by_vllm(job: Job, missing: Sequence[int]) -> None:
    """Write the missing shards of the most likely tokens; vLLM drives all GPUs from this one process."""
    plan = job.plan
    assert job.top_k is not None, "vLLM gives no hidden states"
    scorer = VllmScorer(
        plan.teacher_path, k=job.top_k, max_length=plan.config.data.max_length, dtype=plan.teacher_dtype
    )
    for number in progress(missing, "Teacher's outputs", "shards"):
        examples = [job.items[index] for batch in job.shards[number] for index in batch]
        # Each example is collated alone, so that it has no padding, and its positions are those of its tokens.
        batches = [job.collate([example]).with_label_rows(shift=plan.method.shift) for example in examples]
        rows: dict[str, list[Tensor]] = {}
        counts: dict[str, list[Tensor]] = {}
        for batch, top in zip(batches, scorer.score([each.input_ids[0].tolist() for each in batches]), strict=True):
            for place in POSITIONS:
                counts.setdefault(place, []).append(rows_of_samples(batch, place))
            for place in plan.method.teacher_positions:
                for name, tensor in top_rows(top.at(batch.rows_at(place)), place).items():
                    rows.setdefault(name, []).append(tensor)
        _save(job, number, [example.sample_id for example in examples], rows, counts, {})


def _taught(job: Job, teacher: TappedModel, shard: Shard, turn: int) -> tuple[Batch, Outputs, dict[str, Tensor]]:
    """Run the teacher on a batch of a shard, by turns: the batch, on the CPU, the outputs, and the rows to keep."""
    method = job.plan.method
    indices = shard[min(turn, len(shard) - 1)]
    batch = job.collate([job.items[index] for index in indices]).with_label_rows(shift=method.shift)
    moved = batch.to(job.world.device)
    with torch.no_grad():
        outputs = teacher.teach(moved, lm_head=method.teacher_positions)
        head = next((each for each in outputs.lm_head.values() if isinstance(each, HeadInputs)), None)
        with nullcontext() if head is None else whole(head):
            if head is not None and job.top_k is None:
                _write_head(job, head)
            rows = to_rows(outputs, moved, request_of(method), top_k=job.top_k, vocabulary=job.plan.vocabulary)
    return batch, outputs, {name: each.cpu() for name, each in rows.items()}


def _write_head(job: Job, head: HeadInputs) -> None:
    """Write the LM head, once, on rank 0."""
    if not job.world.is_main or entry_of(job.folder, HEAD_FILE, None) is not None:
        return
    assert head.weight is not None, "hidden states need the head"
    tensors = {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})
    write_tensors(job.folder, HEAD_FILE, {name: each.detach().cpu() for name, each in tensors.items()}, {})
