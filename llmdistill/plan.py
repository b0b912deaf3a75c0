"""A run resolved and checked from configurations alone: no weights and no data."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from llmdistill import parsing
from llmdistill.config import RunConfig
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.factorize import build_reference, count_parameters, summarise
from llmdistill.methods import METHODS, Method
from llmdistill.models.families import family_of
from llmdistill.models.load import brings_tokenizer, compare_vocabularies, load_config
from llmdistill.runtime.ds_config import read_ds_config
from llmdistill.runtime.engine import TORCH_DTYPES, BatchSplit, split_batch, student_ds_config
from llmdistill.scoring.book import VALID


@dataclass(frozen=True)
class Plan:
    """What a run will do."""

    config: RunConfig
    ds_config: dict[str, Any]
    split: BatchSplit
    world_size: int
    method: Method
    sizes: dict[str, Any]
    """`teacher_params`, `student_params`, `ranks` and what else the factorisation says of itself."""
    vocabulary: int | None = None
    """Logits that teacher and student have in common; None where they are not compared."""
    notes: list[str] = field(default_factory=list)
    """What a user should know of the plan."""

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
    def tokenizer_path(self) -> Path:
        """Where the student's tokenizer is: in its own folder, else in the teacher's."""
        return tokenizer_path(self.config)

    def record(self) -> dict[str, Any]:
        """What the run's folder keeps to know its run again."""
        return {"config": parsing.to_dict(self.config), "ds_config": self.ds_config, "world_size": self.world_size}

    def headline(self, data_report: str) -> str:
        """The run in a few lines, for the terminal."""
        sizes, train, split = self.sizes, self.config.train, self.split
        dtype = str(self.dtype).removeprefix("torch.")
        lora = self.config.student.lora
        adapted = "" if lora.rank is None else f", adapters of rank {lora.rank} alone are trained"
        own = f"; the student writes {self.config.data.on_policy:.0%} of it" if self.config.data.on_policy > 0 else ""
        stage = self.ds_config.get("zero_optimization", {}).get("stage", 0)
        return (
            f"Run folder  {self.folder}\n"
            f"Teacher     {self.config.teacher.model}, {sizes['teacher_params']:,} parameters\n"
            f"Student     {sizes['method']}, {sizes['student_params']:,} parameters ({sizes['ratio']:.0%}){adapted}\n"
            f"Method      {self.config.method}: {', '.join(self.method.weights)}\n"
            f"Data        {self.config.data.train}, {data_report.rstrip('.')}{own}\n"
            f"Batch       {train.global_batch_size} = {split.micro_batch_size} x {self.world_size} rank(s) x "
            f"{split.accumulation_steps} accumulation step(s); {train.steps} steps in {dtype}, ZeRO-{stage}"
            + "".join(f"\nNote        {note}" for note in self.notes)
        )

    def estimate(self) -> dict[str, float]:
        """What the training costs at most: every sequence at its full length, and no time but that of the arithmetic.

        6 FLOP a parameter and token for the student's forward and backward pass (all of it, adapters or not), 2 for the
        teacher's forward pass, at 30 % of an A100's 312 TFLOP/s in bf16.
        """
        train = self.config.train
        tokens = train.steps * train.global_batch_size * self.config.data.max_length
        of_teacher = 2 * self.sizes["teacher_params"] if self.method.needs_teacher else 0
        flops = tokens * (6 * self.sizes["student_params"] + of_teacher)
        return {"tokens": tokens, "flops": flops, "a100_hours": flops / (0.3 * 312e12) / 3600}

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
        return {
            **self.sizes,
            "batch": batch,
            "terms": terms,
            "estimate": self.estimate(),
            "notes": self.notes,
            "config": config,
            "ds_config": self.ds_config,
        }


def make_plan(config: RunConfig) -> Plan:
    """Resolve and check a run before anything expensive.

    Raises:
        UserError: settings that cannot work.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    ds_config = read_ds_config(config.ds_config)
    split = split_batch(config.train.global_batch_size, config.train.micro_batch_size, world_size)
    resolved = student_ds_config(ds_config, config.ds_config, config.train, split, output_dir=str(config.output_dir))
    if VALID in config.data.tests:
        raise UserError(
            f"data.tests.{VALID}: that name is the validation set's (data.{VALID}); call the test set other"
        )
    teacher_config = _decoder_config("teacher.model", config.teacher.model)
    if config.student.model is None:
        student_config = teacher_config  # a factorised student has its teacher's shape
        sizes = summarise(teacher_config, config.student.factorize)
    else:
        student_config = _decoder_config("student.model", config.student.model)
        params = [count_parameters(build_reference(each)) for each in (teacher_config, student_config)]
        sizes = {
            "method": "given",
            "teacher_params": params[0],
            "student_params": params[1],
            "ratio": params[1] / params[0],
        }
    settings = {"makd": config.makd, "kd": config.kd}.get(config.method)
    method = METHODS[config.method](settings, teacher_config, student_config)
    vocabulary, note = None, None
    if method.needs_teacher and config.student.model is not None:
        vocabulary, note = compare_vocabularies(locate(config.teacher.model), locate(config.student.model))
    notes = [] if note is None else [note]
    return Plan(config, resolved, split, world_size, method, sizes, vocabulary, notes)


def _decoder_config(key: str, reference: str) -> Any:
    config = load_config(locate(reference))
    if not family_of(config).causal:
        raise UserError(
            f"{key} {reference} is an encoder ({config.model_type}), and instruction data "
            "train decoders only: take a decoder; `llmdistill compress` and `export` do work on encoders"
        )
    return config


def tokenizer_path(config: RunConfig) -> Path:
    """Where the student's tokenizer is: with the student, else with the teacher."""
    if config.student.model is not None and brings_tokenizer(locate(config.student.model)):
        return locate(config.student.model)
    return locate(config.teacher.model)
