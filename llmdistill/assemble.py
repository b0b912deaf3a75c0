"""Where settings become objects. Nobody below this module reads a RunConfig."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from llmdistill import parsing
from llmdistill.config import RunConfig
from llmdistill.data.instruct import Example, InstructData, encode, read_examples
from llmdistill.data.sampler import TrainLoader
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.factorize import build_reference, compress, count_parameters, summarise
from llmdistill.methods import METHODS, Method
from llmdistill.models.families import family_of
from llmdistill.models.forward import TappedModel
from llmdistill.models.load import check_same_vocabulary, load_config, load_model, load_tokenizer
from llmdistill.models.taps import Recorder
from llmdistill.runtime.distributed import World, barrier, broadcast_object
from llmdistill.runtime.ds_config import read_ds_config
from llmdistill.runtime.engine import TORCH_DTYPES, BatchSplit, build_engine, split_batch, student_ds_config
from llmdistill.scoring.book import ScoreBook
from llmdistill.scoring.instruct import check_sets
from llmdistill.teacher.live import LiveTeacher, load_teacher
from llmdistill.trainer import Trainer


@dataclass(frozen=True)
class Plan:
    """A run resolved from configurations alone: no weights and no data."""

    config: RunConfig
    ds_config: dict[str, Any]
    split: BatchSplit
    world_size: int
    method: Method
    sizes: dict[str, Any]
    """`teacher_params`, `student_params`, `ranks` and what else the factorisation says of itself."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        assert self.config.output_dir is not None
        return Path(self.config.output_dir)

    @property
    def teacher_path(self) -> Path:
        """Where the teacher is."""
        return locate(self.config.teacher.model)

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the student."""
        return TORCH_DTYPES["bf16" if self.ds_config["bf16"]["enabled"] else "fp32"]

    @property
    def teacher_params(self) -> int:
        """Parameters of the teacher."""
        return int(self.sizes["teacher_params"])

    def record(self) -> dict[str, Any]:
        """What the run's folder keeps to know its run again."""
        return {"config": parsing.to_dict(self.config), "ds_config": self.ds_config, "world_size": self.world_size}

    def headline(self, data: RunData) -> str:
        """The run in a few lines, for the terminal."""
        sizes, train, split = self.sizes, self.config.train, self.split
        dtype = str(self.dtype).removeprefix("torch.")
        stage = self.ds_config.get("zero_optimization", {}).get("stage", 0)
        return (
            f"Run folder  {self.folder}\n"
            f"Teacher     {self.config.teacher.model}, {sizes['teacher_params']:,} parameters\n"
            f"Student     {sizes['method']}, {sizes['student_params']:,} parameters ({sizes['ratio']:.0%})\n"
            f"Method      {self.config.method}: {', '.join(self.method.weights)}\n"
            f"Data        {self.config.data.train}, {data.train.report()}\n"
            f"Batch       {train.global_batch_size} = {split.micro_batch_size} x {self.world_size} rank(s) x "
            f"{split.accumulation_steps} accumulation step(s); {train.steps} steps in {dtype}, ZeRO-{stage}"
        )

    def describe(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        config = {**parsing.to_dict(self.config), "output_dir": str(self.folder)}
        batch = {
            "global_batch_size": self.config.train.global_batch_size,
            "ranks": self.world_size,
            "micro_batch_size": self.split.micro_batch_size,
            "accumulation_steps": self.split.accumulation_steps,
        }
        terms = dict(self.method.weights)
        return {**self.sizes, "batch": batch, "terms": terms, "config": config, "ds_config": self.ds_config}


@dataclass(frozen=True)
class RunData:
    """The texts of a run."""

    tokenizer: PreTrainedTokenizerBase
    train: InstructData
    tests: dict[str, list[Example]]


def make_plan(config: RunConfig) -> Plan:
    """Resolve and check a run before anything expensive.

    Raises:
        UserError: settings that cannot work.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    ds_config = read_ds_config(config.ds_config)
    split = split_batch(config.train.global_batch_size, config.train.micro_batch_size, world_size)
    resolved = student_ds_config(ds_config, config.ds_config, config.train, split, output_dir=str(config.output_dir))
    teacher_config = load_config(locate(config.teacher.model))
    if not family_of(teacher_config).causal:
        raise UserError(
            f"teacher.model {config.teacher.model} is an encoder ({teacher_config.model_type}), and instruction data "
            "train decoders only: take a decoder; `llmdistill compress` and `export` do work on encoders"
        )
    if config.student.model is None:
        student_config = teacher_config  # a factorised student has its teacher's shape
        sizes = summarise(teacher_config, config.student.factorize)
    else:
        check_same_vocabulary(locate(config.teacher.model), config.student.model)
        student_config = load_config(config.student.model)
        params = [count_parameters(build_reference(each)) for each in (teacher_config, student_config)]
        sizes = {
            "method": "given",
            "teacher_params": params[0],
            "student_params": params[1],
            "ratio": params[1] / params[0],
        }
    method = METHODS[config.method](config.makd, teacher_config, student_config)
    return Plan(config, resolved, split, world_size, method, sizes)


def read_data(plan: Plan) -> RunData:
    """Read and check every file of a run, and the teacher's tokenizer.

    Raises:
        UserError: a missing, malformed or empty file, or prompts over the limit.
    """
    data = plan.config.data
    tokenizer = load_tokenizer(plan.teacher_path)
    limits: dict[str, Any] = {
        "max_prompt_length": data.max_prompt_length,
        "max_length": data.max_length,
        "long_prompts": data.long_prompts,
    }
    train = encode(read_examples(locate(data.train)), tokenizer, **limits)
    tests = {name: read_examples(locate(path)) for name, path in data.tests.items()}
    check_sets(tests, tokenizer, plan.config.scoring, **limits)
    return RunData(tokenizer, train, tests)


def prepare_student(plan: Plan, world: World) -> Path:
    """The folder of the untrained student: the one given, or the teacher factorised once, by one rank, for all.

    A resumed run finds it there.
    """
    if plan.config.student.model is not None:
        return Path(plan.config.student.model)
    folder = plan.folder / "untrained"
    error = None
    if world.is_main and not (folder / "config.json").is_file():
        try:
            compress(plan.teacher_path, folder, plan.config.student.factorize, device=world.device)
        except UserError as mistake:
            error = str(mistake)
    error = broadcast_object(error)
    if error is not None:
        raise UserError(error)
    barrier()
    return folder


def make_teacher(plan: Plan, world: World) -> LiveTeacher:
    """The teacher, in evaluation mode."""
    wanted = plan.config.teacher.dtype
    dtype = plan.dtype if wanted == "auto" else TORCH_DTYPES[wanted]
    return load_teacher(str(plan.teacher_path), dtype=dtype, sharding=plan.config.teacher.sharding, world=world)


def make_trainer(
    plan: Plan, student_folder: Path, teacher: Callable[[], LiveTeacher], data: RunData, world: World
) -> Trainer:
    """Student engine, taps, loader and method, put together; `teacher` is called only where the method needs one."""
    config, method = plan.config, plan.method
    student = load_model(str(student_folder), dtype=plan.dtype)
    engine = build_engine(student, plan.ds_config, config.train)
    loader = TrainLoader(
        data.train.items,
        pad_token_id=data.tokenizer.pad_token_id,
        seed=config.seed,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=plan.split.micro_batch_size,
        rank=world.rank,
        world_size=world.size,
    )
    # The recorders come last: DeepSpeed's own hooks must sit inside them.
    tapped_teacher = None
    if method.needs_teacher:
        live = teacher()
        tapped_teacher = TappedModel(live.forward, Recorder(live.model, method.teacher_taps))
    return Trainer(
        engine=engine,
        student=TappedModel(engine, Recorder(engine.module, method.student_taps)),
        teacher=tapped_teacher,
        method=method,
        loader=loader,
        settings=config.train,
        seed=config.seed,
        folder=plan.folder,
        world=world,
    )


def make_score_book(plan: Plan, data: RunData, world: World) -> ScoreBook:
    """The scoring of the run's models."""
    config = plan.config
    return ScoreBook(plan.folder, data.tokenizer, data.tests, config.scoring, config.data, world)


def load_scored(folder: Path, plan: Plan, world: World) -> PreTrainedModel:
    """A model to score, in the number format it was trained in."""
    return load_model(str(folder), dtype=plan.dtype, device=world.device)
