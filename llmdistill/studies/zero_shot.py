"""Zero-shot scores of several decoders side by side, such as those of a run: teacher, untrained student and student."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from transformers import PreTrainedModel

from llmdistill.config.side_by_side import ZeroShotConfig
from llmdistill.fingerprints import fingerprint
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.report.tables import TitledTable
from llmdistill.studies.side_by_side import ComparedModels, ModelScores, ModelSuite
from llmdistill.tasks.zero_shot import find_zero_shot, is_share, main_metric, score_zero_shot

_SETTINGS = ("tasks", "task_dir", "num_fewshot", "limit", "max_length", "dtype")


def _score(config: ZeroShotConfig, models: ComparedModels) -> ModelScores:
    models.check_kind(causal=True, reason="the tasks of the harness need a decoder")
    tasks = find_zero_shot(config.tasks, config.task_dir, num_fewshot=config.num_fewshot, limit=config.limit)
    depends_on = {key: getattr(config, key) for key in _SETTINGS} | {"dtype": models.dtype}
    if config.task_dir is not None:
        depends_on["content of task_dir"] = fingerprint(config.task_dir)

    def score(name: str, model: PreTrainedModel) -> dict[str, Any]:
        tokenizer, batch_size, max_length = load_tokenizer(models.paths[name]), config.batch_size, config.max_length
        return {"tasks": score_zero_shot(model, tokenizer, tasks, batch_size=batch_size, max_length=max_length)}

    on, check = ", ".join(tasks.names), tasks.check_data
    return ModelScores(
        results={"models": models.score_models(score, depends_on=depends_on, on=on, head="lm_head", check=check)}
    )


def make_table(results: Mapping[str, Any]) -> TitledTable:
    """Return a row for each model: each task by its main metric, and the mean of those that are shares."""
    models = results["models"]
    tasks = {name: main_metric(task["metrics"]) for name, task in next(iter(models.values()))["tasks"].items()}
    shares = [name for name, metric in tasks.items() if is_share(metric)]
    averaged = len(shares) > 1
    header = ["", "params", *(f"{name} {metric}" for name, metric in tasks.items()), *["average"] * averaged]
    rows = []
    for name, model in models.items():
        row = [name, f"{model['params']:,}"]
        for task, metric in tasks.items():
            scores = model["tasks"][task]
            scale, decimals = (100, 1) if is_share(metric) else (1, 3)
            text, error = f"{scale * scores['metrics'][metric]:.{decimals}f}", scores["stderr"].get(metric)
            row.append(text if error is None else f"{text} ± {scale * error:.{decimals}f}")
        if averaged:
            row.append(f"{100 * fmean(model['tasks'][task]['metrics'][tasks[task]] for task in shares):.1f}")
        rows.append(row)
    shots = results["num_fewshot"]
    how = "as the tasks say" if shots is None else f"{shots} solved examples before each question"
    limit = "" if results["limit"] is None else f", only {results['limit']} examples of each"
    title = f"Tasks of lm-evaluation-harness, shares x 100 ± standard error, {how}{limit}"
    return TitledTable(title, header, rows)


SUITE = ModelSuite(
    name="zero_shot",
    title="Zero-shot tasks",
    settings=_SETTINGS,
    values=lambda _, results: {
        (name, metric): value for name, task in results["tasks"].items() for metric, value in task["metrics"].items()
    },
    score=_score,
    table=make_table,
    template="zero_shot",
)
