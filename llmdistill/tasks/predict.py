"""The predictions of a classifier on a split, and the files that they are written to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from llmdistill.batch import Batch, Outputs
from llmdistill.data.pairs import EncodedPair, PairExample
from llmdistill.data.sampler import scoring_batches
from llmdistill.errors import UserError
from llmdistill.files import write_text
from llmdistill.runtime.distributed import World
from llmdistill.tasks.glue_files import BEST_SCORE, GlueTask, Split, column_of, task_named


def predict(
    forward: Callable[[Batch], Outputs],
    items: Sequence[EncodedPair],
    collate: Callable[[Sequence[EncodedPair]], Batch],
    task: GlueTask,
    *,
    batch_size: int,
    world: World,
) -> np.ndarray:
    """Predict the class or score of each item: (items,), in order and on every rank, for any number of items.

    Every rank must call this function, and the model must be in evaluation mode.
    """
    batches = scoring_batches(items, collate, batch_size=batch_size, rank=world.rank, world_size=world.size)
    mine: list[tuple[int, float]] = []
    with torch.no_grad():
        for indices, batch in batches:
            logits = forward(batch.to(world.device)).sequence_logits
            assert logits is not None, "the model has no classifier"
            values = logits.argmax(-1) if task.classes else logits[:, 0].float()
            # A batch that only keeps the ranks in step has no indices.
            mine += zip(indices, values.tolist(), strict=False)
    shares: list[Any] = [mine]
    if world.size > 1:
        shares = [None] * world.size
        dist.all_gather_object(shares, mine)
    predictions = np.full(len(items), -1, dtype=np.int64 if task.classes else np.float64)
    for index, value in (pair for share in shares for pair in share):
        predictions[index] = value
    return predictions


def write_answers(path: Path, examples: Sequence[PairExample], predictions: np.ndarray) -> None:
    """Write one line per example: its number, the prediction and the target; classes are written as numbers."""
    rows = [
        f"{example.index}\t{value}\t{example.target}\n"
        for example, value in zip(examples, predictions.tolist(), strict=True)
    ]
    write_text(path, "".join(["index\tprediction\ttarget\n", *rows]))


def write_predictions(
    folder: str | Path, task_name: str, split: Split, predictions: np.ndarray, indices: Sequence[int]
) -> Path:
    """Write one file of a submission, such as MNLI-mm.tsv, and return its path.

    Each line contains the number of the example and the prediction: the text of the label, or a score with three
    decimals within the range of STS-B. The server takes a zip file of the folder's files.

    Args:
        folder: the folder of the submission; created if necessary.
        task_name: a task of GLUE.
        split: test or, only for MNLI, test_mismatched.
        predictions: (examples,), classes or, for STS-B, scores.
        indices: PairExample.index of each example.

    Raises:
        UserError: the task or test split does not exist, or a score is not finite.
        ValueError: the numbers of predictions and indices differ, an index occurs twice, or a class does not exist.
    """
    task, name = task_named(task_name), column_of(task_name, split)
    if not split.startswith("test"):
        raise UserError(f"{task_name}: the GLUE server takes predictions of test splits, not of {split}; give test")
    if predictions.shape != (len(indices),) or len(set(indices)) < len(indices):
        raise ValueError(
            f"{task_name}: predictions of shape {predictions.shape} for {len(set(indices))} different of "
            f"{len(indices)} indices"
        )
    texts = [
        _text(task, value, f"{task_name}: example {index}") for index, value in zip(indices, predictions, strict=True)
    ]
    lines = [f"{index}\t{text}\n" for index, text in sorted(zip(indices, texts, strict=True))]
    path = Path(folder) / f"{name}.tsv"
    write_text(path, "".join(["index\tprediction\n", *lines]))
    return path


def _text(task: GlueTask, value: float, place: str) -> str:
    if task.classes:
        if value not in range(len(task.classes)):
            raise ValueError(f"{place}: {value} is no class of {', '.join(task.classes)}")
        return task.classes[int(value)]
    if not np.isfinite(value):
        raise UserError(f"{place}: the predicted score is {value}; the model is broken, train it anew")
    return f"{min(max(float(value), 0.0), BEST_SCORE):.3f}"
