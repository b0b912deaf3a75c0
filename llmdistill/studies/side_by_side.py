"""The suites of `llmdistill evaluate` that run models as they are, side by side: what all of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.text import Text
from transformers import PreTrainedModel

from llmdistill.artifacts import RESULT_FILE, read_record, read_result, write_result
from llmdistill.config.side_by_side import SideBySideConfig
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.files import file_name
from llmdistill.fingerprints import fingerprint
from llmdistill.messages import say
from llmdistill.models.configs import load_config
from llmdistill.models.families import is_causal
from llmdistill.models.heads import HeadName
from llmdistill.models.load import load_model
from llmdistill.report.plots import Drawing
from llmdistill.report.record import make_record
from llmdistill.report.study_report import StudyReport
from llmdistill.report.table import MODELS
from llmdistill.report.tables import TitledTable
from llmdistill.report.trials import ModelEntry, entry_of
from llmdistill.runtime.devices import TORCH_DTYPES, choose_dtype
from llmdistill.runtime.distributed import World
from llmdistill.students.counting import count_parameters
from llmdistill.studies.launcher import InProcess
from llmdistill.studies.study import PlannedRow, Study
from llmdistill.studies.trials import Trial
from llmdistill.training.run_folder import METRICS_FILE, RUN_FILE


@dataclass(frozen=True)
class ModelTrial(Trial):
    """The scoring of a model as it is; its config are the names of the model and, if there is one, of the task."""

    file: Path = field(kw_only=True)
    """The file that keeps the scores."""
    depends_on: Mapping[str, Any] = field(kw_only=True)
    """What the scores depend on; they are computed again if it has changed."""

    @property
    def folder(self) -> Path:
        return self.file.parent

    def values(self) -> dict[str, Any]:
        return dict(self.depends_on)

    def read_scores(self) -> dict[str, Any] | None:
        return read_result(self.file, self.depends_on)

    def save(self, scores: Mapping[str, Any]) -> None:
        write_result(self.file, self.depends_on, scores)


@dataclass(frozen=True)
class JointTrial(Trial):
    """A measurement of all models at once, which every command repeats; its config is the folder of the results."""

    measured: dict[str, dict[str, Any]] = field(default_factory=dict, kw_only=True)
    """The results of each model by name."""

    @property
    def folder(self) -> Path:
        return Path(self.config)

    @property
    def log(self) -> Path:
        return self.folder / "error.log"

    def values(self) -> dict[str, Any]:
        return {}

    def read_scores(self) -> None:
        return None

    def read_new_scores(self) -> dict[str, Any] | None:
        return self.measured or None

    def add_seconds(self, seconds: float) -> float:
        return seconds


Values = Callable[[Sequence[str], Mapping[str, Any]], dict[tuple[str, str], float]]
"""Returns the scores by (set, metric) in the results of a model, from the names of its trial and these results."""


@dataclass(frozen=True, kw_only=True)
class ComparedModels(Study):
    """The models of a command, how they run, and where their results go."""

    paths: Mapping[str, Path]
    dtype: str
    device: torch.device
    values: Values

    def entries(self, trial: Trial, metrics: Mapping[str, Any]) -> dict[str, ModelEntry]:
        names = [(name,) for name in metrics] if isinstance(trial, JointTrial) else [trial.config]
        entries = {}
        for of_trial in names:
            results = metrics[of_trial[0]] if isinstance(trial, JointTrial) else metrics
            params = results["params"]["total"] if isinstance(results["params"], dict) else results["params"]
            entries[of_trial[0]] = entry_of(self.values(of_trial, results), params=params)
        return entries

    def check_kind(self, *, causal: bool, reason: str) -> None:
        """Raises UserError, which ends with the reason, for a model that is no decoder (causal) or no encoder."""
        for name, path in self.paths.items():
            if is_causal(load_config(path)) != causal:
                kind = "an encoder" if causal else "a decoder"
                raise UserError(f"--model: the {name} ({path}) is {kind}, and {reason}")

    def load(self, name: str, head: HeadName) -> PreTrainedModel:
        return load_model(self.paths[name], dtype=TORCH_DTYPES[self.dtype], device=self.device, head=head)

    def trials(self, depends_on: Mapping[tuple[str, ...], Mapping[str, Any]]) -> dict[tuple[str, ...], ModelTrial]:
        """Return the scoring of each model, or of each model on each task, by their names.

        The scores depend on the model and `depends_on`, by the same names.
        """
        # A run that has gone on leaves another student in the same folder.
        contents = {name: fingerprint(str(path)) for name, path in self.paths.items()}
        return {
            names: ModelTrial(
                ": ".join(names),
                {},
                0,
                names,
                file=self.folder.joinpath(*map(file_name, names), RESULT_FILE),
                depends_on={**of_trial, "content of model": contents[names[0]]},
            )
            for names, of_trial in depends_on.items()
        }

    def score_all(
        self, trials: Mapping[tuple[str, ...], ModelTrial], score: Callable[..., Mapping[str, Any]]
    ) -> dict[tuple[str, ...], dict[str, Any]]:
        """Return the scores of each trial, which are kept in its folder as soon as they are there.

        `score` gets the names of the trial. Raises UserError, after the other trials, if one fails.
        """
        runner = InProcess(lambda names: trials[names].save(score(*names)))
        rows = [PlannedRow(key=names, name=names[0], trials=[trial]) for names, trial in trials.items()]
        outcomes = self.run(rows, runner)
        for result in (outcome.first for outcome in outcomes.values()):
            if result.metrics is None:
                raise UserError(f"{result.trial.title}: {result.error}")
        scores = {names: outcome.first.metrics or {} for names, outcome in outcomes.items()}
        return {
            # `write_result` keeps what was asked for beside the scores.
            names: {key: value for key, value in of_trial.items() if key != "asked"}
            for names, of_trial in scores.items()
        }

    def measure_together(self, measure: Callable[[], Mapping[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
        """Return the results of each model by name, which are measured anew by every command.

        For what compares the models themselves: batches that are timed in turn, or maps against those of the first.
        """
        trial = JointTrial("all models", {}, 0, str(self.folder))
        runner = InProcess(lambda _: trial.measured.update(measure()))
        result = self.run([PlannedRow(key="all", trials=[trial])], runner)["all"].first
        if result.error is not None:
            raise UserError(result.error)
        return trial.measured

    def score_models(
        self,
        score: Callable[[str, PreTrainedModel], Mapping[str, Any]],
        *,
        depends_on: Mapping[str, Any],
        on: str,
        head: HeadName,
        check: Callable[[], object] = lambda: None,
    ) -> dict[str, dict[str, Any]]:
        """Return path, parameters and scores of each model, as `score_all`; `on` says in words what they are scored on.

        `check` is called before the first model is loaded, unless all scores are kept.
        """
        trials = self.trials({(name,): depends_on for name in self.paths})
        if any(trial.read_scores() is None for trial in trials.values()):
            check()

        def of_model(name: str) -> dict[str, Any]:
            say(f"{name}: {self.paths[name]} on {on} ...")
            model = self.load(name, head)
            return {"path": str(self.paths[name]), "params": count_parameters(model), **score(name, model)}

        return {name: scores for (name,), scores in self.score_all(trials, of_model).items()}


@dataclass(frozen=True, kw_only=True)
class ModelScores:
    results: Mapping[str, Any]
    """`models` with path and parameters of each, and further parts of results.json, such as `warnings`."""
    drawings: Sequence[Drawing] = ()
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelSuite:
    """What is measured or drawn of models side by side."""

    name: str
    title: str
    settings: Sequence[str]
    """The settings of the command that results.json repeats."""
    values: Values
    score: Callable[[Any, ComparedModels], ModelScores]
    """Checks the settings before a model is loaded, and scores the models; raises UserError for a mistake."""
    table: Callable[[Mapping[str, Any]], TitledTable]
    transposed: bool = True
    """Whether rows become columns on a narrow terminal."""
    note: str = ""
    """What the report says after the title of the table."""
    template: str = "side_by_side"
    closing: str = "The scores of each model are in a folder of its name, and all of them in results.json."

    def score_models(self, config: SideBySideConfig, *, command: str) -> StudyReport:
        """Score the models, write drawings, results.json and report.md, and return the report."""
        world = World.alone()
        models = ComparedModels(
            paths=named_models(config.model),
            folder=Path(config.output_dir or default_folder(self.name, config.model[0])),
            dtype=choose_dtype(config.dtype, world.device),
            device=world.device,
            values=self.values,
        )
        scores = self.score(config, models)
        results = {
            **{key: getattr(config, key) for key in self.settings},
            "dtype": models.dtype,
            **scores.results,
            "run": make_record(command, world.size),
        }
        table, warnings = self.table(results), results.get("warnings", [])
        report = StudyReport(
            folder=models.folder,
            results=results,
            template=self.template,
            values={
                "title": self.title,
                "legend": f"{table.title.removesuffix('.')}.{self.note}",
                "table": table,
                "drawings": scores.drawings,
                "warnings": warnings,
                "record": results["run"],
                "models": results["models"],
                "dtype": models.dtype,
                "details": scores.details,
                "closing": self.closing,
            },
            drawings=scores.drawings,
            plots=None,
            table=table,
            transposed=self.transposed,
            notes=[Text(f"Warning: {warning}") for warning in warnings],
            closing=f"The report is {models.folder}/report.md.",
        )
        report.write()
        return report


def named_models(references: Sequence[str]) -> dict[str, Path]:
    """Return the folder or hub name of each model, by its name in reports.

    The folder of a finished run stands for its teacher, its untrained student and its student, and NAME=REFERENCE for a
    model, or the student of a run, under that name. UserError for a run that goes on, or two models of the same name.
    """
    models: dict[str, Path] = {}
    for reference in references:
        own, equals, named = reference.partition("=")
        if equals and own and named and not Path(reference).exists():  # the name of a folder may hold =
            of_run = _run_models(named)
            added = {own: locate(named) if of_run is None else of_run[MODELS["student"]]}
        else:
            of_run = _run_models(reference)
            added = {reference: locate(reference)} if of_run is None else of_run
        for name, path in added.items():
            if name in models:
                raise UserError(
                    f"--model: {models[name]} and {path} would both be called {name}; write NAME=FOLDER for one of them"
                )
            models[name] = path
    return models


def _run_models(reference: str) -> dict[str, Path] | None:
    """Return the models of a finished run by their names in reports; None if the reference is no run."""
    path = locate(reference)
    record = read_record(path / RUN_FILE, remedy="name a model's folder instead of the run's")
    if record is None:
        return None
    if not (path / METRICS_FILE).is_file():
        raise UserError(f"--model {reference}: the run in this folder is not finished; let it end, or name a model")
    config = record["config"]
    teacher = config["teacher"]["model"]
    untrained = path / "untrained" if (path / "untrained").is_dir() else config["student"]["model"]
    references = {"teacher": teacher, "untrained": untrained, "student": path / "student"}
    return {MODELS[role]: locate(str(model)) for role, model in references.items() if model is not None}


def default_folder(kind: str, reference: str) -> Path:
    """Return where results go if the user does not say: into the run, or beside the results of other models."""
    if (Path(reference) / RUN_FILE).is_file():
        return Path(reference) / kind
    return Path("runs") / kind / file_name(reference)
