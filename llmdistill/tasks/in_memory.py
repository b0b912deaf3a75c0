"""Scores a model in memory on the dev splits of benchmarks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.config import DataConfig, RunConfig, TaskConfig
from llmdistill.errors import UserError
from llmdistill.runtime.distributed import World
from llmdistill.tasks import task_key
from llmdistill.tasks.base import ScoredModel
from llmdistill.tasks.benchmark import Benchmark, benchmark_class


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
    ending = {"sequence": "ForSequenceClassification", "span": "ForQuestionAnswering", "lm_head": "ForMaskedLM"}[
        found.head
    ]
    if not type(model).__name__.endswith(ending):
        head = {"sequence": "classifier", "span": "head for spans", "lm_head": "language-model head"}[found.head]
        raise UserError(
            f"model is a {type(model).__name__} without {head}: give one that is fine-tuned on {found.title(key)}"
        )
    found.check_fine_tuned(model.config, key, named="model")
    settings = DataConfig(kind="task", max_length=max_length, task=TaskConfig(name=key, dir=data_dir))
    benchmark = cast(Benchmark, found(RunConfig(ds_config="", data=settings), trains=False))
    data = benchmark.dev_data(tokenizer, model.config, batch_size)
    world = World(rank=0, size=1, device=model.device)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) if predictions is None else predictions
        scored = ScoredModel(model=model, tokenizer=tokenizer, predictions=folder, world=world, sharded=False)
        return data.summary({name: data.score_set(name, scored) for name in data.sets})
