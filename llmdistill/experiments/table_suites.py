"""Tables of models that are scored as they are: all rows side by side, by a suite of `llmdistill evaluate`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from llmdistill.config import RunConfig
from llmdistill.config.side_by_side import ChunksConfig
from llmdistill.errors import UserError
from llmdistill.experiments import chunks

Scores = Mapping[tuple[str, str], list[float]]
"""The scores x 100 over seeds by (column, metric)."""


class TableSuite(NamedTuple):
    """A suite that scores the rows of a table."""

    file: str
    """The file of its data, in tasks.data_dir."""
    check: Callable[[Path], object]
    """Raises UserError if the file is missing or malformed, or has too few examples."""
    score: Callable[[Mapping[str, str], Path, Path, RunConfig], dict[str, Any]]
    """Scores the models by their names, on a file, into a folder, with the settings of a run; returns the results."""
    scores: Callable[[Mapping[str, Any]], Scores]
    """Returns the scores of a model from its entry in the results."""


def data_file(name: str, data_dir: str | None) -> Path:
    """Return the file of a suite's data.

    Raises:
        UserError: it is missing or malformed.
    """
    suite = TABLE_SUITES[name]
    if data_dir is None:
        raise UserError(f"tasks.data_dir is missing: name the folder with {suite.file}")
    suite.check(Path(data_dir) / suite.file)
    return Path(data_dir) / suite.file


def _score_chunks(models: Mapping[str, str], file: Path, folder: Path, run: RunConfig) -> dict[str, Any]:
    named = [f"{name}={path}" for name, path in models.items()]
    config = ChunksConfig(model=named, data=str(file), output_dir=str(folder), dtype=run.train.dtype)
    if run.tasks.seeds is not None:
        config = replace(config, seeds=run.tasks.seeds)
    words = ["--model", ",".join(named), "--data", str(file), "--output_dir", str(folder), "--dtype", config.dtype]
    words += ["--seeds", ",".join(map(str, config.seeds))]
    return chunks.evaluate(config, command=f"llmdistill evaluate --suite conll2000 {shlex.join(words)}")


def _layer_scores(entry: Mapping[str, Any]) -> Scores:
    layers = enumerate(entry["nmi"], start=1)
    return {(f"NMI-{layer}", "nmi"): [100 * value for value in found["seeds"]] for layer, found in layers}


TABLE_SUITES = {
    "conll2000": TableSuite("conll2000/train.txt", chunks.check_file, _score_chunks, _layer_scores),
}
"""The suites by the name that `llmdistill evaluate --suite` takes."""
