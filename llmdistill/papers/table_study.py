"""Runs the rows of a table of encoders: distills the student of each recipe, and fine-tunes every model on the tasks.

Each row is what a user would run for it alone: its recipe as a run of the main job, and then a study of fine-tuning
over its student, or the recipe's own second stage. The rows of other tables are scored side by side as they are. What
is finished is kept, so that the same command goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from llmdistill.config import DataConfig, RunConfig, TaskConfig
from llmdistill.config.command_line import build, build_checked, to_dict, with_values
from llmdistill.config.side_by_side import ChunksConfig
from llmdistill.config.strict import did_you_mean
from llmdistill.config.tasks import FineTuningConfig, TasksConfig
from llmdistill.data.references import text_files
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.models.configs import load_config
from llmdistill.papers import phrases
from llmdistill.papers.fine_tuning.protocols import FineTuningProtocol, fine_tuning_values, protocol_of
from llmdistill.papers.fine_tuning.results import dev_columns, tuned_entries
from llmdistill.papers.fine_tuning.run import FineTuning
from llmdistill.papers.published import Measured
from llmdistill.report.paper import PublishedTable, TableRow
from llmdistill.report.trials import ModelEntry, run_entries
from llmdistill.studies.launcher import Launcher
from llmdistill.studies.study import PlannedRow, Study
from llmdistill.studies.trials import Progress, Trial, changed_values, make_trial
from llmdistill.tasks.benchmark import Benchmark, find_benchmark
from llmdistill.training.plan import make_plans

_CHUNKS = "conll2000/train.txt"
"""The file of CoNLL-2000, in tasks.data_dir."""


@dataclass(frozen=True)
class SecondStage(FineTuning):
    """A row's fine-tuning by the second stage of its own run, whose first stage is finished."""

    work: ClassVar[str | None] = None
    row: Path = field(kw_only=True)
    """The row's folder in that of the second stage."""
    file: Path = field(kw_only=True)
    """The file with the settings of the run."""

    @property
    def folder(self) -> Path:
        return self.row

    @property
    def recipe(self) -> Path:
        return self.file

    @property
    def has_launchers(self) -> bool:
        return False

    def values(self) -> dict[str, Any]:
        return to_dict(self.config)


@dataclass(frozen=True, kw_only=True)
class TableStudy(Study):
    table: PublishedTable
    configs: Mapping[str, RunConfig]
    """The whole configuration of each row that is run, by the row's key, with the user's settings. A row that is only
    fine-tuned has that of another row, for its settings of fine-tuning and its teacher."""
    models: Mapping[str, str]
    """Folder or hub name of the model of each row that is only fine-tuned."""
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
        # Without the recipe's own second stage: the fine-tuning is a trial of its own.
        return make_trial(self.folder, self.configs[key], name, {"tasks.names": []}, title=row.label)

    def model(self, key: str) -> str:
        return self.models[key] if key in self.models else str(self.trial(key).folder / "student")

    def tuned_folder(self, key: str) -> Path:
        """Return the folder of a row's fine-tuning."""
        if self.is_second_stage(key):
            return self.trial(key).folder / "tasks" / self.configs[key].tasks.rows[-1]
        return self.folder / "tasks" / key

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
        return [benchmark.title(key) for benchmark, key in self._benchmarks()]

    def _benchmarks(self) -> list[tuple[type[Benchmark], str]]:
        return [find_benchmark(name) for name in self.names]

    def entries(self, trial: Trial, metrics: Mapping[str, Any]) -> dict[str, ModelEntry]:
        return tuned_entries(metrics) if isinstance(trial, FineTuning) else run_entries(metrics)

    def describe(self, metrics: Mapping[str, Any]) -> str:
        if "averages" in metrics:
            return f"average {metrics['averages']['model']['plain']:.1f}"
        loss = metrics["student"].get("valid_loss")
        return "trained" if loss is None else f"validation loss {loss:.4f}"

    def conduct(self) -> dict[str, Measured]:
        """Do what is not finished, and return the scores of each row; one that fails does not stop the others."""
        rows = [PlannedRow(key=key, trials=[self.trial(key)]) for key in self.recipes()]
        with Progress(len({row.trials[0].folder for row in rows}), self.describe) as shown:
            trained = {key: outcome.first for key, outcome in self.run(rows, self.launcher, shown).items()}
        failed = {key: result for key, result in trained.items() if result.error is not None}
        measured = {
            key: Measured(folder=str(result.trial.folder), error=result.error) for key, result in failed.items()
        }
        left = [key for key in self.configs if key not in failed]
        seconds = {key: result.seconds or 0.0 for key, result in trained.items()}
        if self.table.suite is not None:
            # The models are scored as they are, by the only suite of a published table.
            assert self.table.suite == phrases.SUITE.name
            if not left:
                return measured
            run, folder = self.configs[left[0]], str(self.folder / phrases.SUITE.name)
            named, file = [f"{key}={self.model(key)}" for key in left], str(_chunk_file(self.tasks.data_dir))
            seeds: Any = {} if run.tasks.seeds is None else {"seeds": run.tasks.seeds}
            config = ChunksConfig(model=named, data=file, output_dir=folder, dtype=run.train.dtype, **seeds)
            scored = phrases.SUITE.score_models(config, command=self.command).results
            for key in left:
                entry = scored["models"][key]
                layers = enumerate(entry["nmi"], start=1)
                measured[key] = Measured(
                    folder=folder,
                    model=entry["path"],
                    scores={(f"NMI-{layer}", "nmi"): [100 * value for value in nmi["seeds"]] for layer, nmi in layers},
                    params=entry["params"],
                    warnings=scored["warnings"] if key == left[0] else (),  # they are of all rows: named once
                    seconds=seconds.get(key, 0.0),
                )
            return measured
        rows = [PlannedRow(key=key, trials=[self.fine_tuning(key)]) for key in left]
        with Progress(len(rows), self.describe) as shown:
            outcomes = self.run(rows, self.launcher.undivided, shown)  # each one divides the machine among its own
        for key, result in ((key, outcome.first) for key, outcome in outcomes.items()):
            results, folder = result.metrics, str(result.trial.folder)
            if results is None:
                measured[key] = Measured(folder=folder, error=result.error)
                continue
            columns = dev_columns(results["tasks"].values())
            measured[key] = Measured(
                folder=folder,
                model=results["model"],
                scores={(name, metric): value["seeds"] for name, of in columns.items() for metric, value in of.items()},
                params=results["params"]["model"]["total"],
                settings={
                    name: {"learning_rate": task["learning_rate"], "epochs": task["epochs"], "seeds": task["seeds"]}
                    for name, task in results["tasks"].items()
                },
                warnings=tuple(results["warnings"]),
                seconds=seconds.get(key, 0.0),
                tuning_seconds=sum(task["seconds"] for task in results["tasks"].values()),
            )
        return measured

    def fine_tuning(self, key: str) -> Trial:
        """Return the fine-tuning of a row's model on every task."""
        config, file = self.configs[key], self.folder / "tasks" / f"{key}.yaml"
        title = f"{self.row(key).label} on {', '.join(self.titles())}"
        if self.is_second_stage(key):
            run = build(changed_values(config, {"output_dir": str(self.trial(key).folder)}), RunConfig, METHODS)
            return SecondStage(title, {}, run.seed, run, row=self.tuned_folder(key), file=file)
        values = fine_tuning_values(config, self.names)
        values |= {"model": self.model(key), "output_dir": str(file.with_suffix(""))}
        values |= {"trials_at_once": self.launcher.trials_at_once}
        settings = build_checked(FineTuningConfig, values, METHODS, prefix="tasks.")
        return FineTuning(title, {}, config.seed, settings, launcher_flags=self.launcher.flags)

    def missing(self) -> list[str]:
        """Return what the user must provide before anything can run: models, texts and data sets, one sentence each."""
        folder, setting = self.tasks.data_dir, "tasks.data_dir"
        checks: list[Callable[[], object]] = [
            *(partial(load_config, locate(model)) for model in self.models.values()),
            *(partial(text_files, self.configs[key].data.train) for key in self.recipes()),
            *(partial(make_plans, self.trial(key).config) for key in self.recipes()),
            *(partial(benchmark.check_folder, folder, key, setting=setting) for benchmark, key in self._benchmarks()),
            *(partial(benchmark.check_further, self.tasks.out_of_domain, key) for benchmark, key in self._benchmarks()),
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
        """Raise a UserError with everything that the user must provide, or else for the first malformed file of a task.

        The tasks come after hours of training, so their data are read, or loaded from the hub, before it.
        """
        missing = self.missing()
        if len(missing) == 1:
            raise UserError(missing[0])
        if missing:
            listed = "; ".join(f"({number}) {sentence}" for number, sentence in enumerate(missing, start=1))
            raise UserError(f"{len(missing)} things are missing for the table: {listed}")
        tasks, section = self.tasks, "data.task."
        own = {key.removeprefix(section): value for key, value in tasks.run_settings.items() if key.startswith(section)}
        values = {"dir": tasks.data_dir, "limit": tasks.limit, "out_of_domain": tasks.out_of_domain, **own}
        settings = with_values(TaskConfig(), values, key="data.task")
        for benchmark, key in self._benchmarks():
            data = DataConfig(kind="task", task=replace(settings, name=key))
            benchmark(replace(next(iter(self.configs.values())), data=data), trains=False).read_files()


def _chunk_file(data_dir: str | None) -> Path:
    if data_dir is None:
        raise UserError(f"tasks.data_dir is missing: name the folder with {_CHUNKS}")
    phrases.check_file(Path(data_dir) / _CHUNKS)
    return Path(data_dir) / _CHUNKS


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
