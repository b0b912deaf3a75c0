"""Makes the cache of a run's teacher: chooses what runs the teacher, and writes the shards that are missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llmdistill.batch import POSITIONS, Positions
from llmdistill.config.strict import did_you_mean
from llmdistill.config.teacher import CacheConfig
from llmdistill.errors import UserError
from llmdistill.generation.vllm_engine import EngineName, VllmScorer, choose_engine
from llmdistill.runtime.distributed import World, barrier, on_main
from llmdistill.step.loss_modes import choose_loss_modes
from llmdistill.step.tap_models import tap_teacher
from llmdistill.teachers.cache.origin import ONLY_WHOLE, record_of
from llmdistill.teachers.cache.shards import Job, claim, finish, plan_shards, write_by_scorer, write_by_teacher
from llmdistill.teachers.live import make_teacher
from llmdistill.teachers.output_rows import Request, rows_of_samples
from llmdistill.teachers.source import TeacherData, TeacherPlan


def make_cache(plan: TeacherPlan, data: TeacherData, settings: CacheConfig, folder: Path) -> dict[str, Any]:
    """Run the teacher of a run over its training set and keep its outputs in a folder; every rank must call this.

    What is there already is kept, whichever ranks wrote it. The shards are the same on any number of ranks. Returns the
    content of cache.json. Raises UserError if the method or the data allow no cache, or the folder has something else.
    """
    if plan.cache_obstacle is not None:
        raise UserError(plan.cache_obstacle)
    name = settings.teacher
    if name not in plan.models.teachers:
        known = did_you_mean(name, plan.models.teachers)
        raise UserError(f"--cache.teacher {name}: the run has no such teacher{known}")
    source = plan.source
    assert source is not None, "without a teacher there is no cache"
    settings = source.cache_settings(plan, settings)
    scorer = source.scorer(plan)
    if scorer is None:
        check_top_k(settings, plan.models.compared_tokens)
        if source.needs_whole and settings.stored_top_k is not None:
            raise UserError(f"--cache.content {settings.content}: {ONLY_WHOLE}; take hidden_states")
        settings = replace(settings, engine=engine_of(plan, settings))
    items, collate = source.examples(plan, data, name)
    ids, lengths = np.array([(item.sample_id, len(item)) for item in items], dtype=np.int64).T
    shards = plan_shards(ids, lengths, settings)
    in_order = [index for shard in shards for batch in shard for index in batch]
    # In the order of the shards, so that the checksum of the ids covers the plan of the shards too.
    record = record_of(plan, data, settings, ids[in_order], lengths[in_order])
    job = Job(
        folder=folder,
        settings=settings,
        request=Request.of(plan.method),
        shift=plan.method.shift,
        vocabulary=plan.models.vocabulary,
        items=items,
        collate=collate,
        shards=shards,
        record=record,
    )
    missing = on_main(lambda: claim(job))
    if missing:
        _write(plan, job, missing, scorer)
        barrier()  # rank 0 would otherwise look for the shards that others still write
    return on_main(lambda: finish(job))


def _write(plan: TeacherPlan, job: Job, missing: Sequence[int], scorer: Callable[..., Any] | None) -> None:
    """Write the missing shards by a scorer, by vLLM, which drives all GPUs from one process, or by the live teacher."""
    if scorer is not None:
        # A server answers all ranks at once, so each of them writes its share.
        write_by_scorer(job, missing[World.current().rank :: World.current().size], scorer)
        return
    if job.settings.engine == "vllm":
        assert job.top_k is not None, "vLLM gives no hidden states"
        length = plan.config.data.max_length
        vllm = VllmScorer(
            plan.models.teachers[""].path, k=job.top_k, max_length=length, dtype=plan.models.teachers[""].dtype
        )
        write_by_scorer(job, missing, vllm.score)
        return
    live = make_teacher(plan, name=job.settings.teacher)
    teacher = tap_teacher(plan.method, live.model, forward=live.forward, layer_kernels=plan.layer_kernels)
    if plan.method.token_terms:
        choose_loss_modes({"teacher": teacher}, job.batch(job.shards[0][0]).to(World.current().device))
        if job.has_head and not teacher.shortcut:
            raise UserError(
                "--cache.content hidden_states keeps the inputs of the LM head, but the logits of a "
                f"{teacher.model.config.model_type} are more than its product: take --cache.content top_k"
            )
    write_by_teacher(job, missing, teacher, sharded=live.sharded)
    teacher.remove()


def count_examples(plan: TeacherPlan, data: TeacherData) -> dict[Positions, int]:
    """Count the positions of each kind in a training set, equal examples once; a UserError if no cache is possible."""
    if plan.cache_obstacle is not None:
        raise UserError(plan.cache_obstacle)
    items, collate = data.teacher_examples()
    counts, seen = dict.fromkeys(POSITIONS, 0), set[int]()
    for item in items:
        if item.sample_id in seen:
            continue
        seen.add(item.sample_id)
        batch = collate([item]).with_positions(shift=plan.method.shift)
        for place in POSITIONS:
            counts[place] += int(rows_of_samples(batch, place).sum())
    return counts


def engine_of(plan: TeacherPlan, settings: CacheConfig) -> EngineName:
    """Return what runs the teacher: "auto" is vLLM if it can, else "hf"; UserError if vLLM is named and cannot."""
    world = World.current()
    obstacle = plan.vllm_obstacle
    if settings.stored_top_k is None:
        obstacle = "vLLM gives no hidden states; take --cache.content top_k, or --cache.engine hf"
    return choose_engine(
        settings.engine,
        plan.models.teachers[""].path,
        no_repeat_ngram_size=0,
        world_size=world.size,
        key="--cache.engine",
        obstacle=obstacle,
    )


def check_top_k(settings: CacheConfig, compared_tokens: int) -> None:
    """Raise a UserError if the settings of a cache keep as many tokens as there are."""
    if settings.stored_top_k is not None and settings.stored_top_k >= compared_tokens:
        raise UserError(
            f"--cache.top_k is {settings.top_k}, but teacher and student share {compared_tokens} tokens: give "
            "less, or take --cache.content hidden_states"
        )
