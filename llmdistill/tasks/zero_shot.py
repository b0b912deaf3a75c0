"""Zero-shot tasks of decoders, which lm-evaluation-harness (the package lm_eval) defines and scores."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.config.strict import did_you_mean
from llmdistill.data.readers import first_line
from llmdistill.errors import UserError, install_command

_MAIN_METRICS = ("acc_norm", "acc", "exact_match")
"""The metric that tables show, in this order; tasks with none of them are shown by the first of their own."""
_SHARES = ("acc", "exact_match", "mc1", "mc2")
"""Beginnings of the names of metrics that are shares from 0 to 1, which tables show x 100."""


@dataclass(frozen=True, kw_only=True)
class ZeroShotTasks:
    """The tasks that the user named, and how much of them is scored."""

    names: tuple[str, ...]
    manager: Any
    """The harness's TaskManager."""
    num_fewshot: int | None
    """The number of solved examples before each question; None takes each task's own."""
    limit: int | None
    """The number of examples of each task; None takes all of them."""

    def check_data(self) -> None:
        """Load the data of all tasks into the cache of the datasets library; raise UserError if that fails."""
        # The harness loads data through libraries that raise any exception of the network and of their readers.
        try:
            self.manager.load(list(self.names))
        except Exception as error:
            raise UserError(
                f"--tasks {','.join(self.names)}: the data are not loaded ({first_line(error)}); check the network, or "
                "name tasks with local data by --task_dir"
            ) from error


def find_zero_shot(
    names: Sequence[str], task_dir: str | None, *, num_fewshot: int | None, limit: int | None
) -> ZeroShotTasks:
    """Find tasks, groups or tags by name in the harness and in the user's folder, without reading data.

    Raises:
        UserError: the harness is not installed, the folder does not exist, or a task does not exist.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(
            f"zero-shot tasks need lm-evaluation-harness ({error}): {install_command('lm-eval')}"
        ) from error
    if task_dir is not None and not Path(task_dir).is_dir():
        raise UserError(f"--task_dir {task_dir}: no such folder; give one with tasks in the harness's YAML, or none")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # Indexing the thousands of tasks of the harness takes seconds; the user's own tasks need not wait for it.
    manager = None if task_dir is None else TaskManager(include_path=task_dir, include_defaults=False)
    if manager is None or not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=task_dir)
    known = [str(name) for name in manager.all_tasks]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise UserError(f"--tasks: lm-evaluation-harness has no task {name!r}{hint} (lm_eval ls tasks lists them)")
    return ZeroShotTasks(names=tuple(names), manager=manager, num_fewshot=num_fewshot, limit=limit)


def score_zero_shot(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: ZeroShotTasks,
    *,
    batch_size: int,
    max_length: int | None,
) -> dict[str, dict[str, Any]]:
    """Score a decoder in evaluation mode on its device, in this process alone.

    `max_length` is the largest number of tokens; None takes the model's positions.

    Returns:
        For each task (the tasks of a tag stand in its place) plain JSON values: ``metrics`` {NAME: value}, ``stderr``
        {NAME: standard error} where the harness gives one, ``examples``, ``num_fewshot`` and ``version`` of the task.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    scored = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length),
        tasks=list(tasks.names),
        num_fewshot=tasks.num_fewshot,
        limit=tasks.limit,
        log_samples=False,
        task_manager=tasks.manager,
    )
    assert scored is not None, "only the first rank gets results, and there is one rank"
    # A group is reported by its own score, and a tag by the scores of its tasks.
    subtasks = scored.get("group_subtasks", {})
    reported = [
        task for name in tasks.names for task in ([name] if _select_values(name, scored) else subtasks.get(name, []))
    ]
    # The results do not name tags, so the tasks of a tag are those that neither a name nor a group accounts for.
    inside = {task for group in subtasks.values() for task in group}
    reported += [
        name
        for name in scored["results"]
        if name not in reported and name not in inside and _select_values(name, scored)
    ]
    return {name: _make_entry(name, scored) for name in reported}


def _select_values(name: str, scored: Mapping[str, Any]) -> dict[str, float]:
    # Metrics have keys of the form METRIC,FILTER; entries such as alias have not.
    values = scored["results"].get(name, {})
    return {key: value for key, value in values.items() if "," in key and isinstance(value, int | float)}


def _make_entry(name: str, scored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task's entry; the harness's keys are METRIC,FILTER, and METRIC_stderr,FILTER."""
    values, metrics, stderr = _select_values(name, scored), dict[str, float](), dict[str, float]()
    for key, value in values.items():
        metric, _, filter_name = key.partition(",")
        is_error = metric.endswith("_stderr")
        metric = metric.removesuffix("_stderr") + ("" if filter_name == "none" else f" ({filter_name})")
        (stderr if is_error else metrics)[metric] = float(value)
    counts = scored.get("n-samples", {}).get(name, {})
    return {
        "metrics": metrics,
        "stderr": stderr,
        "examples": counts.get("effective"),
        "num_fewshot": scored.get("n-shot", {}).get(name),
        "version": scored.get("versions", {}).get(name),
    }


def main_metric(metrics: Mapping[str, float]) -> str:
    """Return the name of the metric that tables show for a task."""
    return next((name for name in _MAIN_METRICS if name in metrics), next(iter(metrics)))


def is_share(metric: str) -> bool:
    """Return whether a metric is a share of the examples, which tables show x 100."""
    return metric.startswith(_SHARES)
