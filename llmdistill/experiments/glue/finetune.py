"""One run: a model with a fresh classifier, trained by the main job's engine and scored on dev."""

from __future__ import annotations

import gc
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill.batch import Batch, Outputs
from llmdistill.config import TrainConfig
from llmdistill.data.pairs import EncodedPair, collate_pairs, steps_per_epoch
from llmdistill.data.prefetch import Prefetched
from llmdistill.data.sampler import TrainLoader
from llmdistill.errors import UserError
from llmdistill.experiments.glue.grid import Grid, Trial
from llmdistill.factorize.checkpoint import copy_companions
from llmdistill.files import new_folder
from llmdistill.methods import Method
from llmdistill.models.classifier import set_classifier
from llmdistill.models.forward import TappedModel
from llmdistill.models.load import load_model
from llmdistill.models.taps import Recorder
from llmdistill.run.log import RunLog
from llmdistill.run.trainer import Trainer
from llmdistill.runtime.distributed import World, barrier, on_main
from llmdistill.runtime.engine import (
    TORCH_DTYPES,
    BatchSplit,
    add_projectors,
    build_engine,
    full_state_dict,
    split_batch,
    student_ds_config,
)
from llmdistill.tasks.glue_data import TaskData
from llmdistill.tasks.glue_files import GlueTask, Split
from llmdistill.tasks.predict import main_score, predict, score, write_answers

_LOG_LINES = 4
"""How often a run says where it stands."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all runs of a task share."""

    model: str
    """Folder or hub name."""
    data: TaskData
    tokenizer: PreTrainedTokenizerBase
    train: list[EncodedPair]
    dev: dict[Split, list[EncodedPair]]
    grid: Grid
    method: Method
    teacher: Callable[[], TappedModel]
    """Loads the teacher when it is first called; it is not where the method needs none."""
    classifier: Callable[[], Mapping[str, Tensor]] | None
    """Reads the classifier that the student's starts as; None where it starts from random numbers."""
    ds_config: dict[str, Any]
    ds_path: str
    dtype: Literal["fp32", "bf16"]
    micro_batch_size: int | None
    world: World

    @property
    def scoring_batch_size(self) -> int:
        """Sequences per rank and forward pass on dev and test."""
        return self.grid.batch_size if self.micro_batch_size is None else self.micro_batch_size


def train_settings(
    grid: Grid, trial: Trial, num_examples: int, *, dtype: Literal["fp32", "bf16"], micro_batch_size: int | None
) -> TrainConfig:
    """The optimisation of a run. Within it nothing is saved: a kill loses this run alone."""
    steps = trial.epochs * steps_per_epoch(num_examples, grid.batch_size)
    return TrainConfig(
        steps=steps,
        global_batch_size=grid.batch_size,
        micro_batch_size=micro_batch_size,
        learning_rate=trial.learning_rate,
        schedule="linear",
        warmup_steps=math.ceil(grid.warmup_ratio * steps),
        weight_decay=grid.weight_decay,
        dtype=dtype,
        log_every=math.ceil(steps / _LOG_LINES),
        save_every=None,
    )


def resolve_engine(
    ds_config: dict[str, Any], ds_path: str, settings: TrainConfig, world_size: int, folder: Path
) -> tuple[BatchSplit, dict[str, Any]]:
    """How a run's batch is split, and its whole DeepSpeed configuration.

    Raises:
        UserError: the batch does not divide by the ranks, or the file and the run disagree.
    """
    try:
        split = split_batch(settings.global_batch_size, settings.micro_batch_size, world_size)
    except UserError as error:  # there, these settings are the part `train` of a run
        named = str(error).replace("train.global_batch_size", "--batch_size")
        raise UserError(named.replace("train.micro_batch_size", "--micro_batch_size")) from error
    return split, student_ds_config(ds_config, ds_path, settings, split, output_dir=str(folder))


def load_classifier(job: Job, dtype: torch.dtype) -> PreTrainedModel:
    """The model with a classifier for the task; one that its folder lacks is drawn from torch's generator."""
    task = job.data.task
    model = load_model(job.model, dtype=dtype, head="sequence", new_head=True, num_classes=num_classes(task))
    if task.classes:
        model.config.id2label = dict(enumerate(task.classes))
        model.config.label2id = {label: index for index, label in enumerate(task.classes)}
    model.config.problem_type = "single_label_classification" if task.classes else "regression"
    return model


def num_classes(task: GlueTask) -> int:
    """Outputs of a task's classifier: its classes, or one score."""
    return len(task.classes) or 1


def finetune(job: Job, trial: Trial, folder: Path) -> dict[str, Any]:
    """Train and score a run; every rank must call it.

    Leaves metrics.jsonl, the answers on dev and model/ in the folder. Returns the dev scores, steps and seconds.

    Raises:
        UserError: the batch does not divide by the ranks, or the loss is no longer finite.
    """
    began = time.perf_counter()
    on_main(lambda: _empty(folder), job.world)
    settings = train_settings(job.grid, trial, len(job.train), dtype=job.dtype, micro_batch_size=job.micro_batch_size)
    trainer, student = _make_trainer(job, trial, settings, folder)
    log = RunLog(folder, start=0, steps=settings.steps, world=job.world, monitor=None)
    trainer.run(0, log)
    log.close()
    trainer.engine.eval()
    answers = {split: predict_items(job, student, items) for split, items in job.dev.items()}
    if job.world.is_main:
        for split, examples in job.data.dev.items():
            write_answers(folder / f"{split}.tsv", examples, answers[split])
    _save(job, trainer.engine, folder / "model")
    trainer.engine.destroy()
    del trainer, student
    gc.collect()  # the engine and its hooks refer to one another
    scores = score(job.data.name, job.data.dev, answers)
    seconds = round(time.perf_counter() - began, 2)
    return {"score": main_score(job.data.name, scores), "dev": scores, "steps": settings.steps, "seconds": seconds}


def _empty(folder: Path) -> None:
    """Nothing of a run that was interrupted is of use."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _make_trainer(job: Job, trial: Trial, settings: TrainConfig, folder: Path) -> tuple[Trainer, TappedModel]:
    world = job.world
    split, ds_config = resolve_engine(job.ds_config, job.ds_path, settings, world.size, folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(trial.seed)  # of the classifier, the same on every rank
        model = load_classifier(job, TORCH_DTYPES[job.dtype])
    if job.classifier is not None:
        set_classifier(model, job.classifier())
    projectors = add_projectors(model, job.method.projections, trial.seed)
    engine = build_engine(model, ds_config, settings)
    student = TappedModel(engine, Recorder(engine.module, job.method.student_taps, projectors))
    loader = TrainLoader(
        job.train,
        collate=collate_pairs,
        pad_token_id=cast(int, job.tokenizer.pad_token_id),
        seed=trial.seed,
        global_batch_size=settings.global_batch_size,
        micro_batch_size=split.micro_batch_size,
        rank=world.rank,
        world_size=world.size,
    )
    trainer = Trainer(
        engine=engine,
        student=student,
        teacher=job.teacher() if job.method.needs_teacher else None,
        method=job.method,
        loader=Prefetched(
            loader,
            steps=settings.steps,
            device=world.device,
            prepare=partial(Batch.with_label_rows, shift=job.method.shift),
        ),
        settings=settings,
        seed=trial.seed,
        folder=folder,
        world=world,
    )
    return trainer, student


def _save(job: Job, engine: Any, output: Path) -> None:
    """Write the classifier as a Hugging Face model, without projectors; every rank must call it."""
    state = full_state_dict(engine, job.world)
    if state is not None:
        with torch.random.fork_rng(devices=[]):
            model = load_classifier(job, next(iter(state.values())).dtype)
        model.load_state_dict(state)
        with new_folder(output) as part:
            model.save_pretrained(part)
            copy_companions(job.model, part)
    barrier()


def answers_of(job: Job, folder: Path, items: list[EncodedPair]) -> np.ndarray:
    """The answers of a classifier that is saved: (items,); every rank must call it."""
    model = load_model(folder, dtype=TORCH_DTYPES[job.dtype], device=job.world.device, head="sequence")
    return predict_items(job, TappedModel(model, Recorder(model, {})), items)


def predict_items(job: Job, forward: Callable[[Batch], Outputs], items: list[EncodedPair]) -> np.ndarray:
    """A model's answers to items of the task: (items,); every rank must call it."""
    return predict(
        forward,
        items,
        job.data.name,
        pad_token_id=cast(int, job.tokenizer.pad_token_id),
        batch_size=job.scoring_batch_size,
        world=job.world,
    )
