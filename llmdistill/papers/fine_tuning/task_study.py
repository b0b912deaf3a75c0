"""The study of one task: scores the teacher, runs a grid of fine-tuning runs, and chooses the best settings on dev."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from llmdistill.artifacts import RESULT_FILE, new_proven_folder, read_result, write_result
from llmdistill.batch import Aspect
from llmdistill.config import (
    DataConfig,
    GenerationConfig,
    RunConfig,
    StudentConfig,
    TaskConfig,
    TeacherConfig,
    TrainConfig,
    WritingConfig,
)
from llmdistill.config.command_line import build, to_dict
from llmdistill.config.tasks import FineTuningConfig
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.methods.kroneckerbert import ffn_aspect
from llmdistill.models.load import load_model
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.papers.fine_tuning.protocols import (
    BEST,
    SHARED,
    FineTuningProtocol,
    metric_of,
    protocol_of,
    recipe_of,
)
from llmdistill.papers.fine_tuning.results import summarize
from llmdistill.runtime.distributed import World, on_main
from llmdistill.runtime.terminal import print_main
from llmdistill.studies.launcher import Runner
from llmdistill.studies.study import PlannedRow, Study
from llmdistill.studies.trials import (
    Choice,
    Progress,
    Result,
    Trial,
    changed_values,
    grid_points,
    may_be_best,
    trial_title,
)
from llmdistill.tasks.base import ScoredModel
from llmdistill.tasks.benchmark import Benchmark, BenchmarkData
from llmdistill.tasks.glue import Glue
from llmdistill.training.plan import Plan, make_plan
from llmdistill.training.run_folder import finished_metrics

SUBMISSION = "predictions"


@dataclass(frozen=True, kw_only=True)
class TaskStudy(Study):
    config: FineTuningConfig
    task: str
    """The title of the task, such as RTE or SQuAD2."""
    teacher: str | None
    drawn: Mapping[str, str] = field(default_factory=dict)
    """The models that t-SNE draws: folder or hub name by title; empty without t-SNE."""
    pending: Mapping[str, PreTrainedConfig] = field(default_factory=dict)
    """The configurations of models that may not exist yet, by path."""

    def merit(self, result: Result) -> float:
        assert result.metrics is not None
        return float(result.metrics["student"]["score"])

    def describe(self, metrics: Mapping[str, Any]) -> str:
        return f"{self.benchmark.metrics[0]} {metrics['student']['score']:.2f} on dev"

    @property
    def root(self) -> Path:
        """The folder of all tasks."""
        return self.folder.parent

    @cached_property
    def protocol(self) -> FineTuningProtocol:
        return protocol_of(self.config, self.task)

    @property
    def benchmark(self) -> Benchmark:
        assert isinstance(self.plan.task, Benchmark)
        return self.plan.task

    @cached_property
    def plan(self) -> Plan:
        """The plan of the first trial, checked from configurations alone; the other trials differ only in numbers."""
        return make_plan(self.trials()[0].config, pending=self.pending)

    def trials(self) -> list[Trial]:
        """Return all trials; the trials that differ only in the seed are adjacent."""
        config, methods, ratio = self.config, self.config.methods(), self.protocol.warmup_ratio
        changes = {
            "train.global_batch_size": self.protocol.batch_size,
            "train.micro_batch_size": config.micro_batch_size,
            # Without a ratio the steps of the task's recipe are the warm-up.
            **({} if ratio is None else {"train.warmup_ratio": ratio, "train.warmup_steps": 0}),
            "train.weight_decay": self.protocol.weight_decay,
            "method": methods[0],
            "also": methods[1:],
        }
        sections = {name: part for name, part in config.method_settings.items() if name in methods}
        trials = []
        for settings, seed in product(grid_points(self.protocol.grid), self.protocol.seeds):
            rate, epochs = settings.values()
            run = self._run(f"lr-{rate:g}-epochs-{epochs}-seed-{seed}", seed, "student", sections)
            run = build(changed_values(run, {**settings, **changes, **config.run_settings}), RunConfig, METHODS)
            trials.append(Trial(trial_title(self.task, settings, seed), settings, seed, run))
        return trials

    def _run(self, name: str, seed: int, scored: Any, sections: Mapping[str, Any]) -> RunConfig:
        config, recipe = self.config, recipe_of(self.task)
        # A run saves no checkpoints, because an interruption loses only this short run; that of a recipe is long.
        train = TrainConfig(schedule="linear", log_every=None, save_every=None) if recipe is None else recipe.train
        task = TaskConfig(
            name=self.task,
            writing=WritingConfig() if recipe is None else recipe.data.task.writing,
            dir=config.data_dir,
            metric=metric_of(config.protocol, self.task),
            limit=config.limit,
            copy_classifier=config.copy_classifier,
            out_of_domain=config.out_of_domain,
        )
        return RunConfig(
            ds_config=config.ds_config,
            output_dir=str(self.folder / name),
            seed=seed,
            method="none",  # scores alone; `trials` sets the method
            teacher=TeacherConfig(model=self.teacher),
            student=StudentConfig(model=config.model),
            data=DataConfig(kind="task", max_length=self.protocol.max_length, task=task),
            train=replace(train, dtype=config.dtype),
            scoring=GenerationConfig(models=[scored]),
            method_settings=sections,
        )

    def conduct(self, data: BenchmarkData, runner: Runner) -> dict[str, Any]:
        """Score the teacher, run the unfinished trials, keep the best model and write its answers.

        `data` is the benchmark with its examples. Every rank must call this method. Raises UserError if the folder
        belongs to a run with other settings, scoring the teacher fails, or no settings have a score for every seed.
        """
        trials = self.trials()
        # All folders are checked first, so that a mistake in the settings is reported before hours of training.
        on_main(lambda: [finished_metrics(trial.config) for trial in trials])
        teacher, warnings = None, []
        if self.teacher is not None:
            # What a score depends on must be the same for the teacher: windows and languages, but not the training.
            of_data = {key: value for key, value in self.config.run_settings.items() if key.startswith("data.")}
            seed = self.protocol.seeds[0]
            run = build(changed_values(self._run("teacher", seed, "teacher", {}), of_data), RunConfig, METHODS)
            trial = Trial(f"{self.task} teacher", {}, seed, run)
            scored = self.run([PlannedRow(key="teacher", trials=[trial])], runner)["teacher"].first
            if scored.metrics is None:
                raise UserError(str(scored.error))
            teacher, warnings = {"path": self.teacher, **scored.metrics["teacher"]}, scored.metrics["warnings"]
        ended: list[Result] = []

        def remove_lost_models(result: Result) -> None:
            """Remove the models that can no longer be the best, so that a grid needs room for few of them."""
            ended.append(result)
            leaders = {leader.trial.folder for leader in may_be_best(ended, self.merit, len(self.protocol.seeds))}
            for folder in {result.trial.folder for result in ended} - leaders:
                if not self.config.keep_models:
                    shutil.rmtree(folder / "student", ignore_errors=True)

        with Progress(len(trials), self.describe, remove_lost_models) as shown:
            outcome = self.run([PlannedRow(key="student", trials=trials)], runner, shown)["student"]
        failures = [f"{self.task}: {result.trial.folder.name} failed: {result.error}" for result in outcome.failed]
        choice = outcome.choice
        if choice is None or len(choice.results) < len(self.protocol.seeds):
            raise UserError(f"{failures[0]}; no settings have all their seeds, so there is nothing to choose")
        self._store_best(choice, data, runner)
        tsne = None
        if self.drawn:
            aspect = ffn_aspect(self.config.method_settings)
            figure = self.figure(self.drawn, aspect, self.folder, "tsne")
            tsne = {"file": f"{self.task}/tsne.png", **figure}
        # The files of the best model for the benchmark's server, one a test split.
        paths = {split: self.root / SUBMISSION / name for split, name in data.submissions.items()}
        unwritten = on_main(lambda: [split for split, path in paths.items() if not path.is_file()])
        if unwritten:
            tokenizer: Any = load_tokenizer(self.config.model)
            device, dtype = World.current().device, self.plan.models.dtype
            model = load_model(self.folder / BEST, dtype=dtype, device=device, head=self.benchmark.head)
            best = ScoredModel(model=model, tokenizer=tokenizer, predictions=self.root / SUBMISSION, sharded=False)
            for split in unwritten:
                data.submit(split, best, paths[split])
        return {
            **summarize(data, choice, outcome.trials),
            **{key: getattr(self.protocol, key) for key in SHARED},
            "terms": dict(self.plan.method.weights),
            "teacher": teacher,
            "predictions": [str(path.relative_to(self.root)) for path in paths.values()],
            "tsne": tsne,
            "warnings": [*warnings, *failures],
        }

    def _store_best(self, choice: Choice, data: BenchmarkData, runner: Runner) -> None:
        """Store the best trial's model as the task's model; if the model was removed, it is trained again."""
        best, trial = self.folder / BEST, choice.best.trial
        student, depends_on = trial.folder / "student", {"run": trial.folder.name, "settings": to_dict(trial.config)}
        has_model = (best / "config.json").is_file
        if on_main(lambda: has_model() and read_result(best / RESULT_FILE, depends_on) is not None):
            return
        if not on_main((student / "config.json").is_file):
            print_main(f"{self.task}: {trial.folder.name} is the best now, but its model is gone: once more")
            on_main(lambda: shutil.rmtree(trial.folder))
            (again,) = runner.run([trial])
            if again.metrics is None:
                raise UserError(f"{trial.folder}: {again.error}")

        def keep() -> None:
            for name in data.submissions.values():  # the files of the previous best model
                (self.root / SUBMISSION / name).unlink(missing_ok=True)
            shutil.rmtree(best, ignore_errors=True)
            with new_proven_folder(best) as partial_folder:
                shutil.copytree(student, partial_folder, dirs_exist_ok=True)
                write_result(partial_folder / RESULT_FILE, depends_on, {})
            # Last, so that a kill in between leaves the model twice and not nowhere.
            if not self.config.keep_models:
                shutil.rmtree(student)

        on_main(keep)

    def figure(self, models: Mapping[str, str], aspect: Aspect, folder: Path, name: str) -> dict[str, Any]:
        """Plot the features of a layer of models on the task's dev set, as `tsne.draw` says."""
        from llmdistill.papers.fine_tuning import tsne  # scikit-learn's manifolds take a second to import

        assert isinstance(self.benchmark, Glue), "only classes and scores are drawn"
        drawn = tsne.DrawnFeatures(
            task=self.benchmark,
            aspect=aspect,
            layer=self.config.tsne_layer,
            max_length=self.protocol.max_length,
            dtype=self.plan.models.dtype,
        )
        device = World.current().device
        return on_main(lambda: tsne.draw(drawn, models, folder, name, device))
