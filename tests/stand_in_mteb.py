"""Plays MTEB's library with tasks of semantic similarity: the calls of ours, and those that it makes of a model."""

import copy
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from scipy import stats
from torch.utils.data import DataLoader

Rows = Sequence[tuple[str, str, float]]


@dataclass
class StandInTask:
    """As mteb.AbsTaskSTS, with its rows in memory."""

    name: str
    rows: Rows
    drawn: int | None = None
    """The number of rows that are drawn by the task's own generator, as in MTEB's clustering; None takes all rows."""
    modalities: tuple[str, ...] = ("text",)
    error: Exception | None = None
    """What happens when the data are loaded."""
    eval_splits: tuple[str, ...] = ("test",)
    hf_subsets: tuple[str, ...] = ("default",)
    rng_state: random.Random = field(default_factory=lambda: random.Random(42))
    data_loaded: bool = False

    @property
    def metadata(self) -> Any:
        """As mteb.TaskMetadata."""
        return SimpleNamespace(
            name=self.name, type="STS", revision="1", main_score="cosine_spearman", modalities=list(self.modalities)
        )

    def load_data(self) -> None:
        """As AbsTask.load_data."""
        if self.error is not None:
            raise self.error
        self.data_loaded = True


def evaluate(
    model: Any, tasks: StandInTask, *, cache: None, co2_tracker: bool, show_progress_bar: bool, encode_kwargs: Any
) -> Any:
    """As mteb.evaluate: texts come as a DataLoader of dictionaries, everything but the inputs by its name."""
    tasks.load_data()
    rows = tasks.rows if tasks.drawn is None else tasks.rng_state.sample(list(tasks.rows), tasks.drawn)
    sides = []
    for side in (0, 1):
        texts = [{"text": row[side]} for row in rows]
        loader = DataLoader(texts, batch_size=encode_kwargs["batch_size"])  # type: ignore[arg-type]
        of_task = {"task_metadata": tasks.metadata, "hf_split": "test", "hf_subset": "default", "prompt_type": None}
        sides.append(model.encode(loader, **of_task, **encode_kwargs))
    cosines = model.similarity_pairwise(*sides)
    score = float(stats.spearmanr(cosines.numpy(), [row[2] for row in rows]).statistic)
    values = {"cosine_spearman": score, "main_score": score, "hf_subset": "default", "languages": ["eng-Latn"]}
    result = SimpleNamespace(scores={"test": [values]}, get_score=lambda: fmean([score]))
    return SimpleNamespace(task_results=[result])


def install(monkeypatch: pytest.MonkeyPatch, tasks: Sequence[StandInTask]) -> None:
    """Install the stand-in with these tasks, which are also those of the benchmark `All`."""
    known = {task.name: task for task in tasks}

    def get_task(name: str, *, languages: Sequence[str] | None, exclusive_language_filter: bool) -> StandInTask:
        if name not in known:
            raise KeyError(f"KeyError: '{name}' not found. Did you mean: '{next(iter(known))}'?")
        if exclusive_language_filter != (languages is not None) or "eng" not in (languages or ["eng"]):
            raise ValueError(f"No subsets were found for {name}")
        return copy.deepcopy(known[name])

    def get_benchmark(name: str) -> Any:
        if name != "All":
            raise KeyError(f"'{name}' not found and no similar keys were found.")
        return SimpleNamespace(tasks=list(known.values()))

    module: Any = ModuleType("mteb")
    module.__version__ = "2.0.0"
    module.get_task, module.get_benchmark, module.evaluate = get_task, get_benchmark, evaluate
    monkeypatch.setitem(sys.modules, "mteb", module)
