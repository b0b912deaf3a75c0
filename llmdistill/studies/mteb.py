"""Scores of several encoders on MTEB side by side, such as those of a run: teacher, untrained student and student."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from llmdistill.config.side_by_side import MtebConfig
from llmdistill.messages import say
from llmdistill.models.configs import load_config
from llmdistill.models.families import max_positions
from llmdistill.models.pooling import SentenceSettings, read_sentence_settings
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.objective import Pooling
from llmdistill.report.tables import TitledTable
from llmdistill.students.counting import count_parameters
from llmdistill.studies.side_by_side import ComparedModels, ModelScores, ModelSuite
from llmdistill.tasks.mteb import SentenceEncoder, find_mteb

_TOKENS = 512
"""Largest number of tokens of a text where neither the user nor the files say one."""


def _score(config: MtebConfig, models: ComparedModels) -> ModelScores:
    """Score each model on the tasks; each score is kept, so that the same command goes on with the next task."""
    models.check_kind(causal=False, reason="embeddings of sentences are scored for encoders: give an encoder")
    settings = {}
    for name, path in models.paths.items():
        # As the files beside the model say, else the mean of its outputs.
        stored = read_sentence_settings(path) or SentenceSettings(pooling=Pooling(), max_length=None)
        length = max_positions(load_config(path), config.max_length or stored.max_length or _TOKENS)
        settings[name] = replace(stored, max_length=length)
    tasks = find_mteb(config.tasks, config.benchmark, config.languages)
    own = {name: {"dtype": models.dtype, "embeddings": asdict(of_model)} for name, of_model in settings.items()}
    of_tasks = {task.name: task.score_settings() for task in tasks}
    trials = models.trials(
        {(name, task): {**of_task, **own[name]} for name in models.paths for task, of_task in of_tasks.items()}
    )
    by_name = {task.name: task for task in tasks}
    for task in dict.fromkeys(task for (_, task), trial in trials.items() if trial.read_scores() is None):
        by_name[task].check_data()
    loaded: dict[str, tuple[int, SentenceEncoder]] = {}

    def score(name: str, task: str) -> dict[str, Any]:
        if name not in loaded:
            loaded.clear()  # the model before it, whose tasks are done
            say(f"{name}: {models.paths[name]} ...")
            model = models.load(name, "embedding")
            encoder = SentenceEncoder(model, load_tokenizer(models.paths[name]), settings[name])
            loaded[name] = count_parameters(model), encoder
        say(f"{name}: {task} ...")
        params, encoder = loaded[name]
        return {"params": params, **by_name[task].score(encoder, batch_size=config.batch_size)}

    scores = models.score_all(trials, score)
    entries = {}
    for name, path in models.paths.items():
        pooling, longest = settings[name].pooling, settings[name].max_length
        of_model = {task: scores[name, task] for task in by_name}
        normalized = ", normalized" if pooling.normalize else ""
        entries[name] = {
            "path": str(path),
            "params": next(iter(of_model.values()))["params"],
            "embeddings": f"{' and '.join(pooling.modes)} of at most {longest} tokens{normalized}",
            "tasks": {
                task: {key: value for key, value in of_task.items() if key != "params"}
                for task, of_task in of_model.items()
            },
        }
    details = {f"Embeddings of {name}": entry["embeddings"] for name, entry in entries.items()}
    return ModelScores(results={"models": entries}, details=details)


def make_table(results: Mapping[str, Any]) -> TitledTable:
    """Return a row for each model: the mean of the tasks, and each task by its main score."""
    models = results["models"]
    tasks = next(iter(models.values()))["tasks"]
    averaged = len(tasks) > 1
    header = ["", "params", *["average"] * averaged, *(f"{name} {task['metric']}" for name, task in tasks.items())]
    rows = []
    for name, model in models.items():
        scores = [task["score"] for task in model["tasks"].values()]
        shown = (f"{100 * score:.2f}" for score in ([fmean(scores)] * averaged + scores))
        rows.append([name, f"{model['params']:,}", *shown])
    what = "Tasks of MTEB" if results["benchmark"] is None else f"The benchmark {results['benchmark']} of MTEB"
    languages = "" if results["languages"] is None else f", in {', '.join(results['languages'])}"
    title = f"{what}{languages}, main scores x 100, each the mean of its splits and subsets"
    return TitledTable(title, header, rows)


SUITE = ModelSuite(
    name="mteb",
    title="MTEB",
    settings=("tasks", "benchmark", "languages", "max_length"),
    values=lambda names, results: {(names[1], results["metric"]): results["score"]},
    score=_score,
    table=make_table,
    template="mteb",
    closing="The scores of each model on each task are in a folder of its name, and all of them in results.json.",
)
