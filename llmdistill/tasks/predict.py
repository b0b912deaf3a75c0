"""The predictions of a classifier on a split, and their metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from llmdistill.batch import Batch, Outputs
from llmdistill.data.pairs import EncodedPair, PairExample, pair_batches
from llmdistill.files import write_text
from llmdistill.runtime.distributed import World
from llmdistill.tasks.classification import task_metrics
from llmdistill.tasks.glue_files import TASKS, column_of


def predict(
    forward: Callable[[Batch], Outputs],
    items: Sequence[EncodedPair],
    task: str,
    *,
    pad_token_id: int,
    batch_size: int,
    world: World,
) -> np.ndarray:
    """Predict the class or score of each item: (items,), in order and on every rank, for any number of items.

    Every rank must call this function, and the model must be in evaluation mode.
    """
    batches = pair_batches(
        items, pad_token_id=pad_token_id, batch_size=batch_size, rank=world.rank, world_size=world.size
    )
    mine: list[tuple[int, float]] = []
    with torch.no_grad():
        for indices, batch in batches:
            logits = forward(batch.to(world.device)).sequence_logits
            assert logits is not None, "the model has no classifier"
            values = logits.argmax(-1) if TASKS[task].classes else logits[:, 0].float()
            # A batch that only keeps the ranks in step has no indices.
            mine += zip(indices, values.tolist(), strict=False)
    shares: list[Any] = [mine]
    if world.size > 1:
        shares = [None] * world.size
        dist.all_gather_object(shares, mine)
    predictions = np.full(len(items), -1, dtype=np.int64 if TASKS[task].classes else np.float64)
    for index, value in (pair for share in shares for pair in share):
        predictions[index] = value
    return predictions


def targets_of(examples: Sequence[PairExample]) -> np.ndarray:
    """Return the target of each example: (examples,)."""
    return np.array([example.target for example in examples])


def score(task: str, examples: Sequence[PairExample], predictions: np.ndarray) -> dict[str, float]:
    """Compute the metrics of a split, times 100."""
    return task_metrics(task, predictions, targets_of(examples))


def main_score(task: str, scores: Mapping[str, Mapping[str, float]]) -> float:
    """Return the metric by which settings are chosen; for MNLI it is that of the matched split."""
    return scores[column_of(task, "dev")][TASKS[task].metrics[0]]


def chance_score(task: str, examples: Sequence[PairExample]) -> float:
    """Return the main metric of the best constant prediction."""
    named, targets = TASKS[task], targets_of(examples)
    constants = range(len(named.classes)) if named.classes else [0.0]
    return max(task_metrics(task, np.full_like(targets, value), targets)[named.metrics[0]] for value in constants)


def write_answers(path: Path, examples: Sequence[PairExample], predictions: np.ndarray) -> None:
    """Write one line per example: its number, the prediction and the target; classes are written as numbers."""
    rows = [
        f"{example.index}\t{value}\t{example.target}\n"
        for example, value in zip(examples, predictions.tolist(), strict=True)
    ]
    write_text(path, "".join(["index\tprediction\ttarget\n", *rows]))
