"""All runs on all tasks, one after the other: what is finished stays, and the best settings are chosen on dev."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from llmdistill.artifacts import read_finished, write_finished
from llmdistill.config.glue import GlueConfig
from llmdistill.data.pairs import encode_pairs
from llmdistill.experiments.glue.cache import drop_models, is_kept, keep_best
from llmdistill.experiments.glue.finetune import Job, answers_of, finetune, predict_items
from llmdistill.experiments.glue.grid import Choice, Grid, Trial, choose, grid_of
from llmdistill.experiments.glue.results import summarise
from llmdistill.experiments.glue.teachers import BEST
from llmdistill.methods import Method
from llmdistill.models.classifier import read_classifier
from llmdistill.models.forward import TappedModel
from llmdistill.models.load import load_tokenizer
from llmdistill.models.taps import Recorder
from llmdistill.runtime.distributed import World, on_main
from llmdistill.runtime.engine import TORCH_DTYPES
from llmdistill.runtime.terminal import print_main, warn_main
from llmdistill.tasks.glue_data import TaskData
from llmdistill.tasks.glue_files import column_of
from llmdistill.tasks.glue_submission import write_predictions
from llmdistill.tasks.predict import chance_score, main_score, score
from llmdistill.teacher.live import load_teacher

SUBMISSION = "predictions"
"""Folder of the files for the GLUE server."""


@dataclass(frozen=True, kw_only=True)
class TaskStudy:
    """The runs on one task."""

    config: GlueConfig
    data: TaskData
    root: Path
    method: Method
    teacher: str | None
    """Folder or hub name."""
    copies_classifier: bool
    """Whether the student's classifier starts as the teacher's."""
    drawn: Mapping[str, str]
    """The models that t-SNE draws: folder or hub name by title; empty where none is wanted."""
    fingerprints: Mapping[str, str]
    """Of the model and the teacher, by their paths."""
    ds_config: dict[str, Any]
    ds_path: str
    dtype: Any
    world: World

    @property
    def folder(self) -> Path:
        """Of all that concerns the task."""
        return self.root / self.data.name

    @cached_property
    def grid(self) -> Grid:
        """What is tried."""
        return grid_of(self.config, self.data.name)

    def settings(self, trial: Trial) -> dict[str, Any]:
        """What makes two runs the same run. Ranks and micro batches do not change what is learnt."""
        methods = self.config.methods()
        learns_from = self.teacher if self.method.needs_teacher or self.copies_classifier else None
        return {
            "model": self.fingerprints[self.config.model],
            "teacher": None if learns_from is None else self.fingerprints[learns_from],
            **({"copy_classifier": True} if self.copies_classifier else {}),
            "examples": self.data.digest,
            "methods": methods,
            **{name: asdict(each) for name, each in self.config.method_settings.items() if name in methods},
            **asdict(trial),
            **self.grid.shared(),
            "dtype": self.dtype,
            "ds_config": {key: value for key, value in self.ds_config.items() if key != "tensorboard"},
        }

    @cached_property
    def job(self) -> Job:
        """Tokens, loaders of models and the rest, made when a run needs them."""
        tokenizer = load_tokenizer(self.config.model)
        encode = partial(encode_pairs, tokenizer=tokenizer, max_length=self.grid.max_length)
        return Job(
            model=self.config.model,
            data=self.data,
            tokenizer=tokenizer,
            train=encode(self.data.train),
            dev={split: encode(examples) for split, examples in self.data.dev.items()},
            grid=self.grid,
            method=self.method,
            teacher=cache(self._load_teacher),
            classifier=cache(self._read_classifier) if self.copies_classifier else None,
            # Each run has its metrics.jsonl; hundreds of TensorBoard folders would help nobody.
            ds_config={key: value for key, value in self.ds_config.items() if key != "tensorboard"},
            ds_path=self.ds_path,
            dtype=self.dtype,
            micro_batch_size=self.config.micro_batch_size,
            world=self.world,
        )

    def _read_classifier(self) -> dict[str, Tensor]:
        assert self.teacher is not None
        return read_classifier(self.teacher)

    def _load_teacher(self) -> TappedModel:
        assert self.teacher is not None
        dtype = TORCH_DTYPES[self.dtype]
        live = load_teacher(self.teacher, dtype=dtype, sharding="replicated", world=self.world, head="sequence")
        return TappedModel(live.forward, Recorder(live.model, self.method.teacher_taps))

    def conduct(self) -> dict[str, Any]:
        """Score the teacher, run what is not finished, keep the best model, write its answers; every rank must call it.

        Raises:
            UserError: a run of other settings is in the folder, or a run fails.
        """
        warnings = []
        teacher = None if self.teacher is None else self._score_teacher()
        if teacher is not None and teacher["score"] <= teacher["chance"]:
            warnings.append(self._chance_warning(teacher))
            warn_main(warnings[-1], self.world)
        results = self._run_all()
        choice = choose({trial: result["score"] for trial, result in results.items()}, self.grid)
        self._keep(choice)
        return {
            **summarise(self.data, self.grid, results, choice),
            "terms": dict(self.method.weights),
            "teacher": teacher,
            "predictions": self._submit(),
            "tsne": self._draw() if self.drawn else None,
            "warnings": warnings,
        }

    def _score_teacher(self) -> dict[str, Any]:
        """The teacher's dev scores; kept for the next time."""
        assert self.teacher is not None
        folder, data = self.folder / "teacher", self.data
        settings = {"teacher": self.fingerprints[self.teacher], "examples": data.digest, "dtype": self.dtype}
        settings["max_length"] = self.grid.max_length
        found = on_main(lambda: read_finished(folder, settings), self.world)
        if found is None:
            forward = self.job.teacher()
            answers = {split: predict_items(self.job, forward, items) for split, items in self.job.dev.items()}
            scores = score(data.name, data.dev, answers)
            chance = chance_score(data.name, data.dev["dev"])
            found = {"path": self.teacher, "score": main_score(data.name, scores), "dev": scores, "chance": chance}
            on_main(lambda: write_finished(folder, settings, found), self.world)
        return {key: value for key, value in found.items() if key != "asked"}

    def _chance_warning(self, teacher: Mapping[str, Any]) -> str:
        metric = self.data.task.metrics[0]
        return (
            f"the teacher {self.teacher} scores at chance on {self.data.name}: {metric} {teacher['score']:.1f} on dev, "
            f"where one answer to everything gets {teacher['chance']:.1f}. Nothing can be learnt from it: fine-tune it "
            "first, or check that its classes are in GLUE's order"
        )

    def _run_all(self) -> dict[Trial, dict[str, Any]]:
        trials = self.grid.trials()
        # All of them first: a mistake in the settings must show before hours of work.
        found = on_main(lambda: [self._read(trial) for trial in trials], self.world)
        results = {trial: result for trial, result in zip(trials, found, strict=True) if result is not None}
        metric = self.data.task.metrics[0]
        if results:
            print_main(f"{self.data.name}: {len(results)} of {len(trials)} runs are there already", self.world)
        for number, trial in enumerate(trials, start=1):
            if trial in results:
                continue
            what = f"learning rate {trial.learning_rate:g}, {trial.epochs} epochs, seed {trial.seed}"
            print_main(f"{self.data.name}: run {number} of {len(trials)}: {what}", self.world)
            results[trial] = self._run(trial)
            said = f"{metric} {results[trial]['score']:.2f} on dev in {results[trial]['seconds']:.0f} s"
            print_main(f"{self.data.name}: {said}", self.world)
            self._drop(results)
        return results

    def _read(self, trial: Trial) -> dict[str, Any] | None:
        return read_finished(self.folder / trial.name, self.settings(trial))

    def _run(self, trial: Trial) -> dict[str, Any]:
        folder = self.folder / trial.name
        result = finetune(self.job, trial, folder)
        on_main(lambda: write_finished(folder, self.settings(trial), result), self.world)
        return result

    def _drop(self, results: Mapping[Trial, Mapping[str, Any]]) -> None:
        if not self.config.keep_models:
            scores = {trial: result["score"] for trial, result in results.items()}
            on_main(lambda: drop_models(self.folder, scores, self.grid), self.world)

    def _keep(self, choice: Choice) -> None:
        """The best run's model as the task's; where it is gone, since other settings led then, it is trained again."""
        best, trial, settings = self.folder / BEST, choice.best, self.settings(choice.best)
        if on_main(lambda: is_kept(best, trial, settings), self.world):
            return
        if not on_main((self.folder / trial.name / "model" / "config.json").is_file, self.world):
            print_main(f"{self.data.name}: {trial.name} is the best now, but its model is gone: once more", self.world)
            self._run(trial)

        def keep() -> None:
            for split in self.data.test:  # of the model that was the best before
                (self.root / SUBMISSION / f"{column_of(self.data.name, split)}.tsv").unlink(missing_ok=True)
            keep_best(self.folder, best, trial, settings, keep_models=self.config.keep_models)

        on_main(keep, self.world)

    def _submit(self) -> list[str]:
        """Files for the GLUE server by the best model, where the test split is there."""
        paths = {split: self.root / SUBMISSION / f"{column_of(self.data.name, split)}.tsv" for split in self.data.test}
        for split, path in paths.items():
            if not on_main(path.is_file, self.world):
                examples = self.data.test[split]
                items = encode_pairs(examples, self.job.tokenizer, self.grid.max_length)
                answers = answers_of(self.job, self.folder / BEST, items)
                indices = [example.index for example in examples]
                on_main(partial(write_predictions, path.parent, self.data.name, split, answers, indices), self.world)
        return [str(path.relative_to(self.root)) for path in paths.values()]

    def _draw(self) -> dict[str, Any]:
        """The t-SNE figure of the task."""
        from llmdistill.experiments.glue.tsne import draw  # scikit-learn's manifolds take a second to import

        figure = partial(
            draw,
            self.drawn,
            self.data,
            folder=self.folder,
            name="tsne",
            layer=self.config.tsne_layer,
            max_length=self.grid.max_length,
            dtype=TORCH_DTYPES[self.dtype],
            device=self.world.device,
        )
        return {"file": f"{self.data.name}/tsne.png", **on_main(figure, self.world)}
