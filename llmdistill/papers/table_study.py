"""Runs the rows of a table of encoders: distills the student of each recipe, and fine-tunes every model on the tasks.

Each row is what a user would run for it alone: its recipe as a run of the main job, and then a study of fine-tuning
over its student, or the recipe's own second stage. The rows of other tables are scored side by side as they are. What
is finished is kept, so that the same command goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from llmdistill.artifacts import read_record
from llmdistill.config import DataConfig, RunConfig, TaskConfig
from llmdistill.config.command_line import changed
from llmdistill.config.side_by_side import ChunksConfig
from llmdistill.config.strict import did_you_mean
from llmdistill.config.tasks import GridConfig, TasksConfig
from llmdistill.data.sources import text_files
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.messages import say
from llmdistill.models.configs import load_config
from llmdistill.papers import chunks
from llmdistill.papers.fine_tuning.protocols import FineTuningProtocol, protocol_of
from llmdistill.papers.fine_tuning.results import dev_columns
from llmdistill.papers.published import Measured
from llmdistill.progress import progress
from llmdistill.report.paper import PublishedTable, TableRow
from llmdistill.studies.launcher import Launcher
from llmdistill.studies.trials import Progress, Result, Trial, changed_values, make_trial, write_recipe
from llmdistill.tasks.benchmark import Benchmark, named_benchmark
from llmdistill.training.plan import make_plans

_CHUNKS = "conll2000/train.txt"
"""The file of CoNLL-2000, in tasks.data_dir."""


@dataclass(frozen=True, kw_only=True)
class TableStudy:
    table: PublishedTable
    configs: Mapping[str, RunConfig]
    """The whole configuration of each row that is run, by the row's key, with the user's settings. A row that is only
    fine-tuned has that of another row, for its settings of fine-tuning and its teacher."""
    models: Mapping[str, str]
    """Folder or hub name of the model of each row that is only fine-tuned."""
    root: Path
    launcher: Launcher
    command: str = ""
    """The command as the user typed it."""

    def row(self, key: str) -> TableRow:
        return next(row for row in self.table.rows if row.name == key)

    @property
    def tasks(self) -> TasksConfig:
        """The settings of fine-tuning, which all rows share."""
        return next(iter(self.configs.values())).tasks

    @property
    def names(self) -> list[str]:
        return self.tasks.names

    def trial(self, key: str) -> Trial:
        """Return the run of a row's recipe, which ends with the student; rows of the same student have the same run."""
        row = self.row(key)
        name = str(row.recipe).replace("/", "-")
        return make_trial(self.root, self.configs[key], name, {"tasks.names": []}, title=row.label)

    def model(self, key: str) -> str:
        return self.models[key] if key in self.models else str(self.trial(key).folder / "student")

    def folder(self, key: str) -> Path:
        """Return the folder of a row's fine-tuning."""
        if self.is_second_stage(key):
            return self.trial(key).folder / "tasks" / self.configs[key].tasks.rows[-1]
        return self.root / "tasks" / key

    def is_second_stage(self, key: str) -> bool:
        """Whether a row is fine-tuned by the second stage of its own run, from a fine-tuned teacher."""
        return self.table.second_stage and key not in self.models

    def recipes(self) -> list[str]:
        """Return the keys of the rows whose students are trained."""
        return [key for key in self.configs if key not in self.models]

    def protocols(self) -> dict[str, FineTuningProtocol]:
        return {title: protocol_of(self.tasks, title) for title in self.titles()}

    def titles(self) -> list[str]:
        """Return the names of the tasks in tables, which are those of their folders."""
        return [found.title(key) for found, key in self._benchmarks()]

    def _benchmarks(self) -> list[tuple[type[Benchmark], str]]:
        return [named_benchmark(name) for name in self.names]

    def missing(self) -> list[str]:
        """Return what must be brought before anything can run: models, texts and data sets, one sentence each."""
        folder, setting = self.tasks.data_dir, "tasks.data_dir"
        checks: list[Callable[[], object]] = [
            *(partial(load_config, locate(model)) for model in self.models.values()),
            *(partial(text_files, self.configs[key].data.train) for key in self.recipes()),
            *(partial(make_plans, self.trial(key).config) for key in self.recipes()),
            *(partial(found.check_folder, folder, key, setting=setting) for found, key in self._benchmarks()),
            *(partial(found.check_further, self.tasks.out_of_domain, key) for found, key in self._benchmarks()),
            *([] if self.table.suite is None else [partial(_chunk_file, folder)]),
        ]
        sentences = []
        for check in checks:
            try:
                check()
            except UserError as error:
                sentences.append(str(error))
        return list(dict.fromkeys(sentences))

    def check(self) -> None:
        """Raises UserError with everything that must be brought, and else for the first malformed file of a task.

        The tasks come after hours of training, so their data are read, or loaded from the hub, before it.
        """
        missing = self.missing()
        if len(missing) == 1:
            raise UserError(missing[0])
        if missing:
            listed = "; ".join(f"({number}) {sentence}" for number, sentence in enumerate(missing, start=1))
            raise UserError(f"{len(missing)} things are missing for the table: {listed}")
        tasks, section = self.tasks, "data.task."
        own = {key.removeprefix(section): each for key, each in tasks.run_settings.items() if key.startswith(section)}
        values = {"dir": tasks.data_dir, "limit": tasks.limit, "out_of_domain": tasks.out_of_domain, **own}
        settings = changed(TaskConfig(), values, key="data.task")
        for found, key in self._benchmarks():
            data = DataConfig(kind="task", task=replace(settings, name=key))
            found(replace(next(iter(self.configs.values())), data=data), trains=False).read_files()


def conduct(study: TableStudy) -> dict[str, Measured]:
    """Do what is not finished, and return the scores of each row; one that fails does not stop the others."""
    trials = {key: study.trial(key) for key in study.recipes()}
    runs = {trial.folder: trial for trial in trials.values()}

    def describe(metrics: Mapping[str, Any]) -> str:
        loss = metrics["student"].get("valid_loss")
        return "trained" if loss is None else f"validation loss {loss:.4f}"

    with Progress(len(runs), describe) as shown:
        results = study.launcher.run(list(runs.values()), shown)
    by_folder = dict(zip(runs, results, strict=True))
    ended = {key: by_folder[trial.folder] for key, trial in trials.items()}
    found = {
        key: Measured(folder=str(result.trial.folder), error=result.error)
        for key, result in ended.items()
        if result.metrics is None
    }
    left = [key for key in study.configs if key not in found]
    if study.table.suite is not None:
        return found | _score_as_they_are(study, left, ended)
    for number, key in enumerate(progress(left, "Fine-tuning", "rows"), start=1):
        say(f"[{number}/{len(left)}] {study.row(key).label} on {', '.join(study.titles())} ...")
        found[key] = _fine_tune(study, key, ended.get(key))
    return found


def _chunk_file(data_dir: str | None) -> Path:
    if data_dir is None:
        raise UserError(f"tasks.data_dir is missing: name the folder with {_CHUNKS}")
    chunks.check_file(Path(data_dir) / _CHUNKS)
    return Path(data_dir) / _CHUNKS


def _score_as_they_are(study: TableStudy, keys: Sequence[str], trained: Mapping[str, Result]) -> dict[str, Measured]:
    """Score the models of rows side by side, by the suite `conll2000`, which is the only one of a published table."""
    if not keys:
        return {}
    assert study.table.suite == chunks.SUITE.name
    run, folder = study.configs[keys[0]], study.root / chunks.SUITE.name
    named, file = [f"{key}={study.model(key)}" for key in keys], str(_chunk_file(study.tasks.data_dir))
    seeds: Any = {} if run.tasks.seeds is None else {"seeds": run.tasks.seeds}
    config = ChunksConfig(model=named, data=file, output_dir=str(folder), dtype=run.train.dtype, **seeds)
    results = chunks.SUITE.evaluate(config, command=study.command)
    measured = {}
    for key in keys:
        entry = results["models"][key]
        layers = enumerate(entry["nmi"], start=1)
        measured[key] = Measured(
            folder=str(folder),
            model=entry["path"],
            scores={(f"NMI-{layer}", "nmi"): [100 * value for value in found["seeds"]] for layer, found in layers},
            params=entry["params"],
            warnings=results["warnings"] if key == keys[0] else (),
            seconds=(trained[key].seconds if key in trained else 0.0) or 0.0,
        )
    return measured


def _fine_tune(study: TableStudy, key: str, trained: Result | None) -> Measured:
    """Fine-tune the model of a row on every task, in a process of its own, and return its scores."""
    folder, file = study.folder(key), study.root / "tasks" / f"{key}.yaml"
    if study.is_second_stage(key):
        config = changed_values(study.configs[key], {"output_dir": str(study.trial(key).folder)})
        error = study.launcher.call(study.launcher.train_command(write_recipe(file, config)), file.with_suffix(".log"))
    else:
        error = study.launcher.work(
            "fine_tune", _fine_tuning(study, key), file, alone=study.launcher.trials_at_once > 1
        )
    results = None if error is not None else read_record(folder / "results.json", remedy="remove it")
    if results is None:
        return Measured(
            folder=str(folder), error=error or f"it ended without its scores; see {file.with_suffix('.log')}"
        )
    columns = dev_columns(results["tasks"].values())
    scores = {(name, key): value["seeds"] for name, metrics in columns.items() for key, value in metrics.items()}
    return Measured(
        folder=str(folder),
        model=results["model"],
        scores=scores,
        params=results["params"]["model"]["total"],
        settings={
            name: {"learning_rate": task["learning_rate"], "epochs": task["epochs"], "seeds": task["seeds"]}
            for name, task in results["tasks"].items()
        },
        warnings=tuple(results["warnings"]),
        seconds=(trained.seconds if trained is not None else 0.0) or 0.0,
        tuning_seconds=sum(task["seconds"] for task in results["tasks"].values()),
    )


def _fine_tuning(study: TableStudy, key: str) -> dict[str, Any]:
    """Return the settings of a row's fine-tuning."""
    config = study.configs[key]
    return {
        **{field.name: getattr(config.tasks, field.name) for field in fields(GridConfig)},
        "tasks": study.names,
        "model": study.model(key),
        "output_dir": str(study.folder(key)),
        "ds_config": config.ds_config,
        "dtype": config.train.dtype,
        "speed": False,
        "trials_at_once": study.launcher.trials_at_once,
        "launcher_flags": list(study.launcher.flags),
    }


def rows_to_run(table: PublishedTable, names: Sequence[str] | None) -> dict[str, TableRow]:
    """Return the rows that can be run here and were asked for, in the table's order; UserError if one cannot be."""
    known = {row.name: row for row in table.rows}
    able = {key: row for key, row in known.items() if row.missing is None}
    for name in names or ():
        if name not in known:
            near = did_you_mean(name, known)
            raise UserError(f"--rows: there is no row {name!r} in this table{near} (there are {', '.join(known)})")
        if name not in able:
            raise UserError(f"--rows: {name} is not run here: {known[name].missing}")
    return able if names is None else {key: row for key, row in able.items() if key in names}
