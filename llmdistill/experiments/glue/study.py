"""The study of one task: scores the teacher, runs a grid of fine-tuning runs, and chooses the best settings on dev."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedConfig

from llmdistill.artifacts import RESULT_FILE, read_result, write_finished
from llmdistill.config import (
    DataConfig,
    GenerationConfig,
    RunConfig,
    StudentConfig,
    TaskConfig,
    TeacherConfig,
    TrainConfig,
)
from llmdistill.config.command_line import build, set_value, to_dict
from llmdistill.config.glue import GlueConfig
from llmdistill.data.pairs import collate_pairs, encode_pairs
from llmdistill.errors import UserError
from llmdistill.experiments.glue.grid import Choice, Grid, Point, choose, complete, grid_of, may_be_best
from llmdistill.experiments.glue.results import summarise
from llmdistill.experiments.glue.teachers import BEST
from llmdistill.experiments.launcher import InProcess
from llmdistill.experiments.trials import Trial
from llmdistill.files import new_folder
from llmdistill.methods import METHODS
from llmdistill.models.forward import TappedModel
from llmdistill.models.load import load_model
from llmdistill.models.taps import Recorder
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.run.artifacts import finished_metrics
from llmdistill.run.job import run_config
from llmdistill.run.plan import Plan, make_plan
from llmdistill.runtime.distributed import World, on_main
from llmdistill.runtime.terminal import print_main, warn_main
from llmdistill.tasks.glue_files import TaskFiles, column_of, read_task
from llmdistill.tasks.predict import predict, write_predictions

SUBMISSION = "predictions"
"""The folder of the files for the GLUE server."""


@dataclass(frozen=True, kw_only=True)
class TaskStudy:
    """The runs on one task."""

    config: GlueConfig
    task: str
    """The name of the task in GLUE."""
    root: Path
    teacher: str | None
    """Folder or hub name of the teacher; None without a teacher."""
    drawn: Mapping[str, str]
    """The models that t-SNE draws: folder or hub name by title; empty without t-SNE."""
    world: World

    @property
    def folder(self) -> Path:
        """The folder of all files of the task."""
        return self.root / self.task

    @cached_property
    def grid(self) -> Grid:
        """The settings that are tried."""
        return grid_of(self.config, self.task)

    @cached_property
    def files(self) -> TaskFiles:
        """The task's examples."""
        return read_task(self.task, self.config.data_dir, self.config.limit)

    def run_of(self, trial: Point) -> RunConfig:
        """Return the run of a trial.

        Raises:
            UserError: two settings contradict each other.
        """
        config, grid = self.config, self.grid
        run = self._run(self.folder / trial.name, trial.seed, ["student"])
        values = to_dict(run)
        train = {
            "learning_rate": trial.learning_rate,
            "epochs": trial.epochs,
            "global_batch_size": grid.batch_size,
            "micro_batch_size": config.micro_batch_size,
            "warmup_ratio": grid.warmup_ratio,
            "weight_decay": grid.weight_decay,
        }
        values["train"] |= train
        methods = config.methods()
        values |= {"method": methods[0], "also": methods[1:]}
        values |= {name: asdict(part) for name, part in config.method_settings.items() if name in methods}
        for key, value in config.run_settings.items():
            set_value(values, key, value)
        return build(values, RunConfig, METHODS)

    def teacher_run(self) -> RunConfig:
        """Return the run that only scores the teacher."""
        return self._run(self.folder / "teacher", self.grid.seeds[0], ["teacher"], method="none")

    def _run(self, folder: Path, seed: int, scored: list[Any], **more: Any) -> RunConfig:
        config = self.config
        task = TaskConfig(
            name=self.task, dir=config.data_dir, limit=config.limit, copy_classifier=config.copy_classifier
        )
        return RunConfig(
            ds_config=config.ds_config,
            output_dir=str(folder),
            seed=seed,
            teacher=TeacherConfig(model=self.teacher),
            student=StudentConfig(model=config.model),
            data=DataConfig(kind="task", max_length=self.grid.max_length, task=task),
            # A run saves no checkpoints, because an interruption loses only this short run.
            train=TrainConfig(schedule="linear", dtype=config.dtype, log_every=None, save_every=None),
            scoring=GenerationConfig(models=scored),
            **{"method": "sft", **more},
        )

    def plan(self, pending: Mapping[str, PreTrainedConfig] | None = None) -> Plan:
        """Return the plan of the first trial, checked from configurations alone; other trials differ only in numbers.

        Args:
            pending: the configurations of models that may not exist yet, by path.

        Raises:
            UserError: the settings are invalid.
        """
        return make_plan(self.run_of(self.grid.trials()[0]), pending=pending)

    def conduct(self) -> dict[str, Any]:
        """Score the teacher, run the unfinished trials, keep the best model and write its answers.

        Every rank must call this method.

        Raises:
            UserError: the folder belongs to a run with other settings, scoring the teacher fails, or no settings have
                a score for every seed.
        """
        teacher, warnings = None, []
        if self.teacher is not None:
            metrics = self._finish(self.teacher_run())
            teacher, warnings = {"path": self.teacher, **metrics["teacher"]}, metrics["warnings"]
        results, failures = self._run_all()
        warnings = [*warnings, *failures]
        choice = choose({trial: result["score"] for trial, result in results.items()}, self.grid)
        self._keep(choice)
        return {
            **summarise(self.files, self.grid, results, choice),
            "terms": dict(self.plan().method.weights),
            "teacher": teacher,
            "predictions": self._submit(),
            "tsne": self._draw() if self.drawn else None,
            "warnings": warnings,
        }

    def _finish(self, config: RunConfig) -> dict[str, Any]:
        """Return the metrics of a run, and execute the run first if it is not finished."""
        metrics = on_main(lambda: finished_metrics(config), self.world)
        return run_config(config, self.world) if metrics is None else metrics

    def _run_all(self) -> tuple[dict[Point, dict[str, Any]], list[str]]:
        """Return the results of the trials and the reasons of failures; a failed trial does not stop the others.

        Raises:
            UserError: a folder belongs to a run with other settings, or no settings have a score for every seed.
        """
        trials, failures = self.grid.trials(), []
        runner = InProcess(self.world, lambda config: run_config(config, self.world))
        # All trials are checked first, so that a mistake in the settings is reported before hours of training.
        kept = on_main(lambda: [finished_metrics(self.run_of(trial)) for trial in trials], self.world)
        found = {trial: metrics for trial, metrics in zip(trials, kept, strict=True) if metrics is not None}
        metric = self.files.task.metrics[0]
        if found:
            print_main(f"{self.task}: {len(found)} of {len(trials)} runs are there already", self.world)
        for number, trial in enumerate(trials, start=1):
            if trial in found:
                continue
            what = f"learning rate {trial.learning_rate:g}, {trial.epochs} epochs, seed {trial.seed}"
            print_main(f"{self.task}: run {number} of {len(trials)}: {what}", self.world)
            settings = {"train.learning_rate": trial.learning_rate, "train.epochs": trial.epochs}
            (result,) = runner.run([Trial(trial.name, settings, trial.seed, self.run_of(trial))])
            if result.metrics is None:
                failures.append(f"{self.task}: {trial.name} failed: {result.error}")
                warn_main(failures[-1], self.world)
                continue
            found[trial] = result.metrics
            print_main(f"{self.task}: {metric} {result.metrics['student']['score']:.2f} on dev", self.world)
            self._drop(found)
        if not complete(found, self.grid):
            raise UserError(f"{failures[0]}; no settings have all their seeds, so there is nothing to choose")
        return {trial: _result(metrics) for trial, metrics in found.items()}, failures

    def _drop(self, found: Mapping[Point, Mapping[str, Any]]) -> None:
        """Remove the models of trials that can no longer be the best."""
        if self.config.keep_models:
            return
        scores = {trial: metrics["student"]["score"] for trial, metrics in found.items()}

        def drop() -> None:
            for trial in scores.keys() - may_be_best(scores, self.grid):
                shutil.rmtree(self._student(trial), ignore_errors=True)

        on_main(drop, self.world)

    def _student(self, trial: Point) -> Path:
        return self.folder / trial.name / "student"

    def _keep(self, choice: Choice) -> None:
        """Store the best trial's model as the task's model; if the model was removed, it is trained again."""
        best, trial = self.folder / BEST, choice.best
        asked = {"run": trial.name, "settings": to_dict(self.run_of(trial))}
        kept = on_main(
            lambda: (best / "config.json").is_file() and read_result(best / RESULT_FILE, asked) is not None, self.world
        )
        if kept:
            return
        if not on_main((self._student(trial) / "config.json").is_file, self.world):
            print_main(f"{self.task}: {trial.name} is the best now, but its model is gone: once more", self.world)
            on_main(lambda: shutil.rmtree(self.folder / trial.name), self.world)
            run_config(self.run_of(trial), self.world)

        def keep() -> None:
            for split in self.files.test:  # the files of the previous best model
                (self.root / SUBMISSION / f"{column_of(self.task, split)}.tsv").unlink(missing_ok=True)
            shutil.rmtree(best, ignore_errors=True)
            with new_folder(best) as partial_folder:
                shutil.copytree(self._student(trial), partial_folder, dirs_exist_ok=True)
                write_finished(partial_folder, asked, {})
            if not self.config.keep_models:
                shutil.rmtree(self._student(trial))

        on_main(keep, self.world)

    def _submit(self) -> list[str]:
        """Write the best model's files for the GLUE server if the test split exists; returns their paths."""
        paths = {split: self.root / SUBMISSION / f"{column_of(self.task, split)}.tsv" for split in self.files.test}
        for split, path in paths.items():
            if not on_main(path.is_file, self.world):
                answers = self._answers(self.files.test[split])
                indices = [example.index for example in self.files.test[split]]
                on_main(partial(write_predictions, path.parent, self.task, split, answers, indices), self.world)
        return [str(path.relative_to(self.root)) for path in paths.values()]

    def _answers(self, examples: Any) -> np.ndarray:
        """Return the best model's answers; every rank must call this method."""
        tokenizer: Any = load_tokenizer(self.config.model)
        model = load_model(self.folder / BEST, dtype=self.plan().dtype, device=self.world.device, head="sequence")
        return predict(
            TappedModel(model, Recorder(model, {})),
            encode_pairs(examples, tokenizer, self.grid.max_length),
            partial(collate_pairs, pad_token_id=tokenizer.pad_token_id),
            self.files.task,
            batch_size=self.config.micro_batch_size or self.grid.batch_size,
            world=self.world,
        )

    def _draw(self) -> dict[str, Any]:
        """Draw the t-SNE figure of the task."""
        from llmdistill.experiments.glue.tsne import draw  # scikit-learn's manifolds take a second to import

        figure = partial(
            draw,
            self.drawn,
            self.files,
            folder=self.folder,
            name="tsne",
            layer=self.config.tsne_layer,
            max_length=self.grid.max_length,
            dtype=self.plan().dtype,
            device=self.world.device,
        )
        return {"file": f"{self.task}/tsne.png", **on_main(figure, self.world)}


def _result(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a finished trial's metrics that the table uses."""
    return {**{key: metrics["student"][key] for key in ("score", "dev")}, "seconds": metrics["run"]["seconds"]}
