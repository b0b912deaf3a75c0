"""Scores a model in memory on the dev splits of benchmarks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.config import DataConfig, GenerationConfig, RunConfig, TaskConfig, TrainConfig
from llmdistill.errors import UserError
from llmdistill.runtime.distributed import World
from llmdistill.tasks import task_key
from llmdistill.tasks.base import ScoredModel
from llmdistill.tasks.benchmark import HEADS, Benchmark, benchmark_class


def scored_benchmark(names: Iterable[str]) -> type[Benchmark]:
    """Return the class of the tasks that one model is scored on.

    Raises:
        UserError: a task does not exist, or the tasks need different heads.
    """
    found = {benchmark_class(task_key(name, key="data")) for name in names}
    if len({each.head for each in found}) > 1:
        raise UserError("data holds tasks that need different heads: evaluate them one by one")
    return found.pop()


def score_task(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    *,
    data_dir: str | None,
    max_length: int,
    batch_size: int,
    predictions: Path | None = None,
) -> dict[str, Any]:
    """Score a fine-tuned model in evaluation mode on the dev splits of a task, in this process alone.

    `task` is as the user wrote it, such as rte or SST-2; data_dir None takes the data set on the hub, and predictions
    None keeps none. The result is that of the task's `TaskData.summary`.

    Raises:
        UserError: the task does not exist, the model has no head for it, or a file is missing or malformed.
    """
    key = task_key(task, key="data")
    found = benchmark_class(key)
    found.check_folder(data_dir, key, setting="data_dir")
    head, (ending, *_) = HEADS[found.head]
    if not type(model).__name__.endswith(ending):
        raise UserError(
            f"model is a {type(model).__name__} without {head}: give one that is fine-tuned on {found.title(key)}"
        )
    found.check_fine_tuned(model.config, key, named="model")
    with TemporaryDirectory() as scratch:
        task_config = TaskConfig(name=key, dir=data_dir)
        settings = DataConfig(kind="task", max_length=max_length, task=task_config, cache_dir=scratch)
        train, scoring = TrainConfig(micro_batch_size=batch_size), GenerationConfig(batch_size=batch_size)
        benchmark = found(RunConfig(ds_config="", data=settings, train=train, scoring=scoring), trains=False)
        benchmark.only_scores = True
        if found.head == "lm_head":  # the name of a class does not tell whether a model can write
            benchmark.check_model("model", "in memory", model.config)
        data = benchmark.opened(benchmark.stored(tokenizer), tokenizer, model.config)
        scored = ScoredModel(
            model=model,
            tokenizer=tokenizer,
            predictions=Path(scratch) / "predictions" if predictions is None else predictions,
            world=World(rank=0, size=1, device=model.device),
            sharded=False,
        )
        return dict(data.summary({name: data.score_set(name, scored) for name in data.sets}))
