"""The batches of a run, created from its plan and the examples of the task."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from llmdistill.batch import Batch, Loader
from llmdistill.data.prefetch import Prefetched
from llmdistill.data.sampler import Share
from llmdistill.generation.rollout import OnPolicyLoader
from llmdistill.run.plan import Plan
from llmdistill.runtime.distributed import World
from llmdistill.tasks.base import TaskData


def count_steps(plan: Plan, data: TaskData) -> Plan:
    """Return the plan with train.epochs and train.warmup_ratio converted to steps by the size of the training set.

    The same examples give the same number of steps, so a resumed run has the same plan.
    """
    config, train = plan.config, plan.config.train
    if not plan.trains:
        return plan
    steps, notes = train.steps, plan.notes
    if train.epochs is not None:
        steps = data.num_steps(train.epochs, train.global_batch_size)
        notes = [*notes, f"{train.epochs} epoch(s) are {steps:,} steps"]
    return replace(plan, config=replace(config, train=train.with_steps(steps)), notes=notes)


def share_of(plan: Plan, world: World) -> Share:
    """Return this rank's share of the batches."""
    return Share(
        seed=plan.config.seed,
        global_batch_size=plan.config.train.global_batch_size,
        micro_batch_size=plan.split.micro_batch_size,
        rank=world.rank,
        world_size=world.size,
    )


def prepare_loader(plan: Plan, loader: Any, engine: Any, data: TaskData, world: World) -> Loader:
    """Wrap the loader for the training loop: a thread prepares the batches, or the student answers them (on-policy)."""
    config = plan.config
    if config.data.on_policy == 0:
        with_label_rows = partial(Batch.with_label_rows, shift=plan.method.shift)
        return Prefetched(loader, steps=config.train.steps, device=world.device, prepare=with_label_rows)
    tokenizer: Any = data.tokenizer
    return OnPolicyLoader(
        loader,
        engine.module,
        share=config.data.on_policy,
        seed=config.seed,
        max_new_tokens=config.data.max_length - config.data.max_prompt_length,
        end_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        rank=world.rank,
        world_size=world.size,
        synced=engine.zero_optimization_stage() == 3,
    )
