"""Predictions in the file format of the GLUE server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmdistill.errors import UserError
from llmdistill.files import write_text
from llmdistill.tasks.glue_files import BEST_SCORE, GlueTask, Split, column_of, task_named


def write_predictions(
    folder: str | Path, task_name: str, split: Split, predictions: np.ndarray, indices: Sequence[int]
) -> Path:
    """Write one file of a submission, such as MNLI-mm.tsv, and return its path.

    Each line contains the number of the example and the prediction: the text of the label, or a score with three
    decimals within the range of STS-B. The folder is created if necessary. The server takes a zip file of its files.

    Args:
        folder: the folder of the submission.
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
