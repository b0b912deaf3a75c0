"""A run's teacher as a file: makes the cache of its outputs, and checks that a cache is that of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmdistill.artifacts import as_json, differences
from llmdistill.batch import POSITIONS, Positions
from llmdistill.config import RunConfig
from llmdistill.config.command_line import to_dict
from llmdistill.config.strict import did_you_mean
from llmdistill.config.teacher import CacheConfig
from llmdistill.errors import UserError
from llmdistill.fingerprints import content_fingerprint, fingerprint
from llmdistill.generation.vllm_engine import EngineName, VllmScorer, choose_engine
from llmdistill.runtime.distributed import World, barrier, on_every, on_main
from llmdistill.step.loss_check import check_losses
from llmdistill.step.tap_models import tap_teacher
from llmdistill.tasks.base import TaskData
from llmdistill.teachers.cache.folder import CacheFolder
from llmdistill.teachers.cache.shards import Job, claim, finish, plan_shards, write_by_scorer, write_by_teacher
from llmdistill.teachers.live import make_teacher
from llmdistill.teachers.rows import Request, rows_of_samples
from llmdistill.teachers.source import TeacherSource
from llmdistill.training.checks import check_can_cache, check_top_k, vllm_obstacle
from llmdistill.training.plan import Plan
from llmdistill.training.resolved import RunModels
from llmdistill.training.run_folder import input_fingerprints

_DATA_KEYS = ("kind", "train", "prompt", "max_length", "max_prompt_length", "long_prompts", "turns", "task")
"""Settings of the data that decide which examples there are; the others only arrange them."""
_TEXT_KEYS = ("field", "fraction", "sampling_exponent", "valid_sequences")
"""The same of data.text, for texts."""
_ONLY_WHOLE = "several teachers, and one with another tokenizer, are compared by their whole distributions"


def make_cache(plan: Plan, data: TaskData, settings: CacheConfig, folder: Path) -> dict[str, Any]:
    """Run the teacher of a run over its training set and keep its outputs in a folder; every rank must call this.

    What is there already is kept, whichever ranks wrote it. The shards are the same on any number of ranks. Returns the
    content of cache.json. Raises UserError if the method or the data allow no cache, or the folder has something else.
    """
    check_can_cache(plan)
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
            raise UserError(f"--cache.content {settings.content}: {_ONLY_WHOLE}; take hidden_states")
        settings = replace(settings, engine=engine_of(plan, settings))
    items, collate = source.examples(plan, data, name)
    ids, lengths = np.array([(item.sample_id, len(item)) for item in items], dtype=np.int64).T
    shards = plan_shards(ids, lengths, settings)
    in_order = [index for shard in shards for batch in shard for index in batch]
    # In the order of the shards, so that the checksum of the ids covers the plan of the shards too.
    record = _record(plan, data, settings, ids[in_order], lengths[in_order])
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


def _write(plan: Plan, job: Job, missing: Sequence[int], scorer: Callable[..., Any] | None) -> None:
    """Write the missing shards by a scorer, by vLLM, which drives all GPUs from one process, or by the live teacher."""
    if scorer is not None:
        # A server answers all ranks at once, so each of them writes its share.
        write_by_scorer(job, missing[World.current().rank :: World.current().size], scorer)
        return
    if job.settings.engine == "vllm":
        assert job.top_k is not None, "vLLM gives no hidden states"
        length = plan.config.data.max_length
        vllm = VllmScorer(plan.models.teacher_path, k=job.top_k, max_length=length, dtype=plan.models.teacher_dtype)
        write_by_scorer(job, missing, vllm.score)
        return
    live = make_teacher(plan, name=job.settings.teacher)
    teacher = tap_teacher(plan.method, live.model, forward=live.forward, layer_kernels=plan.layer_kernels)
    if plan.method.token_terms:
        check_losses({"teacher": teacher}, job.batch(job.shards[0][0]).to(World.current().device))
        if job.has_head and not teacher.shortcut:
            raise UserError(
                "--cache.content hidden_states keeps the inputs of the LM head, but the logits of a "
                f"{teacher.model.config.model_type} are more than its product: take --cache.content top_k"
            )
    write_by_teacher(job, missing, teacher, sharded=live.sharded)
    teacher.remove()


def check_cache(plan: Plan, data: TaskData) -> None:
    """Check that a run's teacher.cache is one of its teacher, data and method, and undamaged; every rank must call it.

    Every file is read once, by one of the ranks. Raises UserError if there is no finished cache, it is that of another
    teacher, tokenizer, number format, data or method, or a file is damaged.
    """
    for name, teacher in plan.models.teachers.items():
        if teacher.settings.cache is None or plan.source is None:
            continue
        folder = on_every(partial(CacheFolder, Path(teacher.settings.cache)))
        on_main(partial(_check_origin, plan, plan.source, data, folder, name))
        folder.check_files()
        on_main(partial(_check_examples, plan, plan.source, data, folder, name))


def count_examples(plan: Plan, data: TaskData) -> dict[Positions, int]:
    """Count the positions of each kind in a training set, equal examples once; a UserError if no cache is possible."""
    check_can_cache(plan)
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


def engine_of(plan: Plan, settings: CacheConfig) -> EngineName:
    """Return what runs the teacher: "auto" is vLLM if it can, else "hf"; UserError if vLLM is named and cannot."""
    world = World.current()
    obstacle = vllm_obstacle(plan)
    if settings.stored_top_k is None:
        obstacle = "vLLM gives no hidden states; take --cache.content top_k, or --cache.engine hf"
    return choose_engine(
        settings.engine,
        plan.models.teacher_path,
        no_repeat_ngram_size=0,
        world_size=world.size,
        key="--cache.engine",
        obstacle=obstacle,
    )


def _origin(models: RunModels, data: TaskData, name: str) -> dict[str, Any]:
    """Return what the outputs of a teacher depend on, besides the examples."""
    teacher = models.teachers[name]
    tokenizer = data.teacher_tokenizer() if models.translates else data.tokenizer
    return {
        "teacher": fingerprint(teacher.path),
        "tokenizer": content_fingerprint(sorted(tokenizer.get_vocab().items())),
        "dtype": str(teacher.dtype).removeprefix("torch."),
    }


def _data_record(config: RunConfig) -> dict[str, Any]:
    values = to_dict(config)
    # The caches that a recipe names may be the ones that are made.
    values["teacher"] = {**values["teacher"], "cache": None, "others": {}}
    contents = input_fingerprints(values, made_below=None)
    settings = {f"data.{key}": values["data"][key] for key in _DATA_KEYS}
    if values["data"]["kind"] == "text":
        text = values["data"]["text"]
        settings |= {"data.valid": values["data"]["valid"], **{f"data.text.{key}": text[key] for key in _TEXT_KEYS}}
        # The seed draws the documents of a fraction.
        settings |= {"seed": values["seed"]} if text["fraction"] < 1 else {}
    # data.train and data.task: data.valid gives no examples.
    return settings | {f"content of {key}": each for key, each in contents.items() if key.startswith("data.t")}


def _record(plan: Plan, data: TaskData, settings: CacheConfig, ids: np.ndarray, lengths: np.ndarray) -> dict[str, Any]:
    return as_json(
        {
            **_origin(plan.models, data, settings.teacher),
            "model": plan.models.teachers[settings.teacher].settings.model,
            "held": {
                **Request.of(plan.method).record(),
                "top_k": settings.stored_top_k,
                "vocabulary": plan.models.compared_tokens,
            },
            "data": _data_record(plan.config),
            "examples": len(ids),
            "tokens": int(lengths.sum()),
            "ids": content_fingerprint(ids.tolist()),
            "settings": asdict(settings),
        }
    )


def _check_origin(plan: Plan, source: TeacherSource, data: TaskData, folder: CacheFolder, name: str) -> None:
    """Raises UserError if a cache is that of another teacher, tokenizer, number format, vocabulary or method."""
    record, key = folder.record, f"{plan.models.teachers[name].key}.cache {folder.folder}"
    if source.needs_whole and record["held"]["top_k"] is not None:
        raise UserError(f"{key}: it holds the most likely tokens, but {_ONLY_WHOLE}; make it with hidden_states")
    remedy = "name the cache of this run, or make it with `llmdistill cache` and the settings of this run"
    expected = {**_origin(plan.models, data, name), "vocabulary": plan.models.compared_tokens}
    held = {**record, "vocabulary": record["held"]["vocabulary"]}
    if record["held"]["top_k"] is None:
        del expected["vocabulary"]  # the head has the logits of all tokens
    for what, new in expected.items():
        if held.get(what) != new:
            model = f" ({record['model']})" if what == "teacher" else ""
            raise UserError(f"{key}: its {what} is {held.get(what)}{model}, and that of this run is {new}; {remedy}")
    lacking = Request.of(plan.method).find_missing(record["held"])
    if lacking is not None:
        methods = " + ".join(plan.config.methods())
        raise UserError(f"{key}: it does not hold {lacking}, which method {methods} needs; {remedy}")


def _check_examples(plan: Plan, source: TeacherSource, data: TaskData, folder: CacheFolder, name: str) -> None:
    """Raises UserError if an example of the training set is not in a cache."""
    ids = [item.sample_id for item in source.examples(plan, data, name)[0]]
    missing = folder.find_missing(ids)
    if not missing:
        return
    why = "its data are others"
    for setting in differences(folder.record["data"], _data_record(plan.config))[:1]:
        why = f"{setting.key} was {setting.old} and is now {setting.new}"
    key = plan.models.teachers[name].key
    raise UserError(
        f"{key}.cache {folder.folder}: {len(missing):,} of the {len(ids):,} examples are not in it, first "
        f"the one with the id {missing[0]}; {why}: make a cache with `llmdistill cache` and the settings of this run"
    )
