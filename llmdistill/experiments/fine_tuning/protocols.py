"""The settings that are tried on a benchmark, and the fine-tuned teachers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from llmdistill.config import RunConfig
from llmdistill.config.command_line import parse_run
from llmdistill.config.tasks import GridConfig, ProtocolName
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.tasks import task_key
from llmdistill.tasks.classification import CONVENTIONS, Convention
from llmdistill.tasks.glue_files import GLUE_TASKS, column_of

BEST = "best"
"""The folder of a task's best model, inside the task's folder."""


@dataclass(frozen=True, kw_only=True)
class FineTuningProtocol:
    """The settings that are tried, and the settings that all runs share."""

    learning_rates: Sequence[float]
    epochs: Sequence[int]
    seeds: Sequence[int]
    batch_size: int = 32
    max_length: int = 128
    warmup_ratio: float | None = 0.1
    """Share of the steps that are warm-up; None for the warm-up steps of the task's recipe (`recipe_of`)."""
    weight_decay: float = 0.01

    @property
    def grid(self) -> dict[str, Sequence[float]]:
        """The values that are tried, by dotted key of a run."""
        return {"train.learning_rate": self.learning_rates, "train.epochs": self.epochs}

    @property
    def num_trials(self) -> int:
        return len(self.learning_rates) * len(self.epochs) * len(self.seeds)


PROTOCOLS: dict[ProtocolName, FineTuningProtocol] = {
    # MaKD §4.1, which does not give the epochs, batch size, length, warm-up and weight decay.
    "makd": FineTuningProtocol(learning_rates=[1e-5, 2.3e-5, 3.5e-5, 4.8e-5], epochs=[3], seeds=[1, 2, 3, 4, 5]),
    # MiniLMv2 appendix C.
    "minilmv2": FineTuningProtocol(
        learning_rates=[1e-5, 1.5e-5, 2e-5, 3e-5, 5e-5], epochs=[3, 5, 10], seeds=[1, 2, 3, 4]
    ),
    # KroneckerBERT appendix A.1, "single runs"; it gives only a range of epochs, and Table 8 has the learning rate 1e-5
    # outside of the paper's own range.
    "kroneckerbert": FineTuningProtocol(learning_rates=[5e-5, 1e-4, 5e-4], epochs=[5, 10, 15], seeds=[1]),
    # MiniLM: appendices B and C of its second arXiv version; "an average of 4 runs" (Table 3). Warm-up and weight decay
    # are ours.
    "minilm": FineTuningProtocol(learning_rates=[2e-5, 3e-5, 4e-5, 5e-5], epochs=[3, 4, 5], seeds=[1, 2, 3, 4]),
    # The same for the student of 12 layers whose teacher was the authors' own: it has some rates of its own. Its batch
    # is chosen from 32 and 48 there; 32 here, except where the paper says 48.
    "minilm_v1": FineTuningProtocol(learning_rates=[2e-5, 3e-5, 4e-5, 5e-5], epochs=[3, 4, 5], seeds=[1, 2, 3, 4]),
    "custom": FineTuningProtocol(learning_rates=[2e-5], epochs=[3], seeds=[1]),
}

_SQUAD_LENGTH = {"max_length": 384}
_MINILMV2_SQUAD = {"learning_rates": [3e-5, 6e-5, 8e-5, 9e-5], "epochs": [3], **_SQUAD_LENGTH}
_KRONECKERBERT_SQUAD = {"learning_rates": [1e-4], "epochs": [1, 7, 14], "batch_size": 64, **_SQUAD_LENGTH}
_MINILM_LONGER = {"epochs": [3, 4, 5, 10]}
_MINILM_RATES = [3e-5, 4e-5, 5e-5, 6e-5]

DIFFERENT: dict[tuple[ProtocolName, str], dict[str, Any]] = {
    # MiniLM, the same appendices. Its writing students have 12 layers (the rates of the recipes) or 6.
    **{("minilm", task): _MINILM_LONGER for task in ("CoLA", "RTE", "MRPC")},
    **{("minilm_v1", task): {**_MINILM_LONGER, "learning_rates": [1.5e-5]} for task in ("CoLA", "RTE", "MRPC")},
    ("minilm", "SQuAD2"): {"learning_rates": [6e-5], "epochs": [3], **_SQUAD_LENGTH},
    ("minilm_v1", "SQuAD2"): {"learning_rates": [4e-5], "epochs": [3], "batch_size": 48, **_SQUAD_LENGTH},
    ("minilm", "MLQA"): {"learning_rates": _MINILM_RATES, "epochs": [3], "max_length": 512},
    ("minilm", "XNLI"): {"learning_rates": _MINILM_RATES, "epochs": [5], "batch_size": 128},
    ("minilm", "QuestionGeneration"): {"learning_rates": [8e-5]},
    ("minilm", "CNN-DailyMail"): {"learning_rates": [1.5e-4]},
    ("minilm", "XSum"): {"learning_rates": [1.5e-4], "epochs": [50]},
    # MiniLMv2 app. C, which gives no settings for SQuAD 1.1.
    ("minilmv2", "CoLA"): {"epochs": [25]},
    ("minilmv2", "SQuAD1"): _MINILMV2_SQUAD,
    ("minilmv2", "SQuAD2"): _MINILMV2_SQUAD,
    ("minilmv2", "MLQA"): {"learning_rates": [5e-5, 6e-5], "epochs": [3], "max_length": 512},
    ("minilmv2", "XNLI"): {"learning_rates": [5e-5, 6e-5], "epochs": [5], "batch_size": 128},
    # KroneckerBERT app. A.1, which gives only ranges of epochs: 15 to 30 for CoLA, 1 to 14 for SQuAD.
    ("kroneckerbert", "CoLA"): {"epochs": [15, 20, 30]},
    ("kroneckerbert", "SQuAD1"): _KRONECKERBERT_SQUAD,
    ("kroneckerbert", "SQuAD2"): _KRONECKERBERT_SQUAD,
    # The papers do not give these lengths; 384 is that of the other papers and of BERT.
    ("kroneckerbert", "MLQA"): _SQUAD_LENGTH,
    **{(name, task): _SQUAD_LENGTH for name in ("makd", "custom") for task in ("SQuAD1", "SQuAD2", "MLQA")},
    **{(name, "SQuAD1"): _SQUAD_LENGTH for name in ("minilm", "minilm_v1")},
    ("minilm_v1", "MLQA"): _SQUAD_LENGTH,
}
"""The settings of tasks that differ from those of the other tasks of the protocol."""

RECIPES = {
    "QuestionGeneration": "minilm/finetune-question-generation",
    "CNN-DailyMail": "minilm/finetune-cnn-dailymail",
    "XSum": "minilm/finetune-xsum",
}
"""The shipped recipe of each task on which an encoder learns to write, which no grid of classifiers fits: its lengths,
batch, epochs, learning rate and search are those of every protocol that says nothing else, with a single seed."""

SHARED = ("batch_size", "max_length", "warmup_ratio", "weight_decay")
"""The settings that all runs of a protocol share."""


def protocol_of(config: GridConfig, task: str) -> FineTuningProtocol:
    """Return the protocol for a task; settings in the configuration replace those of the protocol."""
    given = {key: getattr(config, key) for key in ("learning_rates", "epochs", "seeds", *SHARED)}
    given = {key: value for key, value in given.items() if value is not None}
    different = DIFFERENT.get((config.protocol, task), {})
    return replace(PROTOCOLS[config.protocol], **{**_settings_of(recipe_of(task)), **different, **given})


@cache
def recipe_of(task: str) -> RunConfig | None:
    """Return the shipped recipe of a task, by the task's title; None if it has none."""
    return parse_run(["--recipe", RECIPES[task]], METHODS)[0] if task in RECIPES else None


def _settings_of(recipe: RunConfig | None) -> dict[str, Any]:
    if recipe is None:
        return {}
    train = recipe.train
    return {
        "learning_rates": [train.learning_rate],
        "epochs": [train.epochs],
        "seeds": [1],
        "batch_size": train.global_batch_size,
        "max_length": recipe.data.max_length,
        "warmup_ratio": train.warmup_ratio,
        "weight_decay": train.weight_decay,
    }


def metric_of(protocol: ProtocolName, task: str) -> str | None:
    """Return the metric by which settings are chosen, that of the paper's table; None for the task's own first one."""
    if task not in GLUE_TASKS:
        return None
    columns = CONVENTIONS.get(cast(Convention, "minilm" if protocol == "minilm_v1" else protocol), {})
    return columns.get(column_of(task, "dev"), GLUE_TASKS[task].metrics[0])


def teacher_of(teacher: str, task: str, tasks: Sequence[str], *, key: str) -> str:
    """Return the folder or hub name of a task's teacher, or of another model that is fine-tuned on the task.

    `teacher` is an earlier run's folder, a path that contains {task}, or a single model, which can teach only one task;
    UserError if the folder has no model for the task, or there are several tasks for a single model.
    """
    if "{task}" in teacher:
        spellings = [task, task.lower(), task_key(task)]
        paths = [teacher.replace("{task}", spelling) for spelling in spellings]
        return next((path for path in paths if Path(path).is_dir()), paths[-1])
    folder = Path(teacher)
    best = folder / task / BEST
    if (best / "config.json").is_file():
        return str(best)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(
            f"{key} {teacher}: it holds no model for {task} (no {best / 'config.json'}); "
            "fine-tune one on it first, or name a path with {task} in it"
        )
    if len(tasks) > 1:
        raise UserError(
            f"{key} {teacher}: one model, but {len(tasks)} tasks; a model is fine-tuned on one: give a path with "
            "{task} in it or an earlier run's folder, or name one task"
        )
    return teacher


def short_names(paths: Sequence[str]) -> list[str]:
    """Return a name for each path: as many of its last parts as are needed to make the names unique."""
    parts = [Path(path).parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)
