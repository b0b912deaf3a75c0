"""The trials of a study as plain data, in one shape for all studies: the content of study.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llmdistill.artifacts import read_record
from llmdistill.errors import UserError
from llmdistill.files import write_json
from llmdistill.tasks.base import VALID

STUDY_FILE = "study.json"
VERSION = 1
"""Of the shape of study.json; it grows when a key changes its name or its meaning."""
REFERENCE_PERPLEXITY = "reference_perplexity"
"""The metric of a set of instructions that is the perplexity of its references; `perplexity` is that of a text."""


@dataclass(frozen=True, kw_only=True)
class SetScore:
    set: str
    """The name of the set; `valid` for the validation set."""
    metric: str
    value: float


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """What a trial says of one model."""

    params: int | None = None
    scores: Sequence[SetScore] = ()
    generation_tokens_per_second: float | None = None

    def by_set(self, metric: str) -> dict[str, float]:
        """Return the values of a metric by test set, without the validation set."""
        return {score.set: score.value for score in self.scores if score.metric == metric and score.set != VALID}

    def on_validation(self, metric: str) -> float | None:
        return next((score.value for score in self.scores if (score.set, score.metric) == (VALID, metric)), None)


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """A trial of a study: what it ran, what it scored and what it cost."""

    row: str
    """The row of the study's table that it belongs to."""
    title: str
    folder: str
    """Path relative to the study's folder."""
    command: str = ""
    """Runs the trial again; "" for a trial in the study's own process."""
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The values that were tried, by dotted key; empty where nothing was chosen."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The settings in which the trials of the study differ, by dotted key."""
    chosen: bool = False
    """Whether the row shows its settings."""
    models: Mapping[str, ModelEntry] = field(default_factory=dict)
    """The scored models: teacher, untrained and student of a run, else by name."""
    seconds: float | None = None
    tokens: int | None = None
    """The tokens of the training, like the speed and the memory below."""
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    error: str | None = None

    @property
    def reason(self) -> str:
        return "it ended without scores" if self.error is None else self.error


def run_entries(metrics: Mapping[str, Any]) -> dict[str, ModelEntry]:
    """Return the models of a run from its metrics.json."""
    entries = {}
    for model in ("teacher", "untrained", "student"):
        if model not in metrics:
            continue
        scores = metrics[model]
        named = {"rougeL": "rougeL", "spearman": "spearman", "perplexity": REFERENCE_PERPLEXITY}
        tables = {key: scores[key] for key in named if isinstance(scores.get(key), Mapping)}
        values = {(name, named[key]): value for key, table in tables.items() for name, value in table.items()}
        values |= {(name, "perplexity"): text["perplexity"] for name, text in scores.get("texts", {}).items()}
        values |= {
            (name, key): value for name, column in scores.get("dev", {}).items() for key, value in column.items()
        }
        if VALID in scores:
            values[VALID, "rougeL"] = scores[VALID]["rougeL"]
        if scores.get("valid_loss") is not None:
            values[VALID, "loss"] = scores["valid_loss"]
        speed = scores.get("generation_tokens_per_second")
        entries[model] = entry_of(values, params=scores.get("params"), generation_tokens_per_second=speed)
    return entries


def entry_of(values: Mapping[tuple[str, str], float], **more: Any) -> ModelEntry:
    """Return the entry of a model from its scores by (set, metric)."""
    return ModelEntry(scores=[SetScore(set=of, metric=key, value=value) for (of, key), value in values.items()], **more)


def write_trials(folder: Path, rows: Sequence[TrialRow]) -> None:
    write_json(folder / STUDY_FILE, {"version": VERSION, "trials": [asdict(row) for row in rows]})


def read_trials(folder: Path) -> list[TrialRow]:
    """Read study.json in the folder of a study; raises UserError if it is missing, damaged or of a later version."""
    file = folder / STUDY_FILE
    remedy = "give the command of the study once more, which writes it again from the runs"
    content = read_record(file, remedy=remedy, keys={"version": int, "trials": list})
    if content is None:
        raise UserError(f"{file}: no such file; {remedy}")
    if content["version"] > VERSION:
        raise UserError(f"{file}: version {content['version']}, but this llmdistill reads up to {VERSION}: update it")
    rows = []
    for values in content["trials"]:
        models = {
            name: ModelEntry(**{**entry, "scores": [SetScore(**score) for score in entry["scores"]]})
            for name, entry in values["models"].items()
        }
        rows.append(TrialRow(**{**values, "models": models}))
    return rows
