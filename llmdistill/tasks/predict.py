"""A classifier's answers to a split, and what they are worth."""

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
    """The class of each item, or its score: (items,), in order and on every rank, whatever their number.

    Every rank must call it; the model must be in evaluation mode.
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
            mine += zip(indices, values.tolist(), strict=False)  # a batch that only keeps step has no indices
    shares: list[Any] = [mine]
    if world.size > 1:
        shares = [None] * world.size
        dist.all_gather_object(shares, mine)
    predictions = np.full(len(items), -1, dtype=np.int64 if TASKS[task].classes else np.float64)
    for index, value in (pair for share in shares for pair in share):
        predictions[index] = value
    return predictions


def targets_of(examples: Sequence[PairExample]) -> np.ndarray:
    """What is right for each example: (examples,)."""
    return np.array([example.target for example in examples])


def score(task: str, examples: Sequence[PairExample], predictions: np.ndarray) -> dict[str, float]:
    """The metrics of a split, times 100."""
    return task_metrics(task, predictions, targets_of(examples))


def main_score(task: str, scores: Mapping[str, Mapping[str, float]]) -> float:
    """The metric that chooses settings, MNLI's on the matched split."""
    return scores[column_of(task, "dev")][TASKS[task].metrics[0]]


def chance_score(task: str, examples: Sequence[PairExample]) -> float:
    """The main metric of the best constant answer."""
    named, targets = TASKS[task], targets_of(examples)
    constants = range(len(named.classes)) if named.classes else [0.0]
    return max(task_metrics(task, np.full_like(targets, value), targets)[named.metrics[0]] for value in constants)


def write_answers(path: Path, examples: Sequence[PairExample], predictions: np.ndarray) -> None:
    """One line an example: its number, the prediction and what is right; classes as numbers."""
    rows = [
        f"{example.index}\t{value}\t{example.target}\n"
        for example, value in zip(examples, predictions.tolist(), strict=True)
    ]
    write_text(path, "".join(["index\tprediction\ttarget\n", *rows]))
