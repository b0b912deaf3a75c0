"""A run resolved and checked from configurations alone: no weights and no data."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from llmdistill.batch import Positions
from llmdistill.config import RunConfig, command_line
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.factorize import build_reference, count_parameters, summarise
from llmdistill.factorize.budget import embedding_size
from llmdistill.factorize.counting import forward_flops
from llmdistill.factorize.install import install
from llmdistill.factorize.kinds import kind_of
from llmdistill.methods import METHODS, Method, build_method
from llmdistill.models.families import family_of, shape_of
from llmdistill.models.load import Head, brings_tokenizer, compare_vocabularies, load_config
from llmdistill.models.shapes import parse_shape, shaped_config, teacher_layers
from llmdistill.objective import Objective
from llmdistill.runtime.ds_config import read_ds_config
from llmdistill.runtime.engine import TORCH_DTYPES, BatchSplit, split_batch, student_ds_config
from llmdistill.tasks.scores import VALID

_LABEL_TERMS = ("label", "sequence_label")
"""Terms that compare the student with the data, not with its teacher."""


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
    teacher_config: PreTrainedConfig
    student_config: PreTrainedConfig
    objective: Objective
    """What the batches of the run have to be learnt."""
    tokenizer_path: Path
    """Where the student's tokenizer is: in its own folder, else in the teacher's."""
    before: Plan | None = None
    """The run whose student is this run's teacher, where the same command does both."""
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
    def trains(self) -> bool:
        """Whether anything is trained."""
        return METHODS[self.config.method].trains

    @property
    def searched(self) -> str | None:
        """The method whose teacher's layer is yet to be searched for, if any."""
        return _searched(self.config)

    @property
    def causal(self) -> bool:
        """Whether the run's models are decoders."""
        return family_of(self.student_config).causal

    @property
    def student_head(self) -> Head:
        """What the student needs on top: the heads whose outputs are terms of the loss, and a decoder's own always."""
        if not self.trains and not self.causal:
            return _saved_head(self.teacher_config if self.config.student.model is None else self.student_config)
        return self._head(set(self.method.positions.values()))

    @property
    def teacher_head(self) -> Head:
        """What the teacher needs on top: the heads whose outputs the student is compared with."""
        positions = self.method.positions.items()
        return self._head({place for name, place in positions if name.split(".")[-1] not in _LABEL_TERMS})

    def _head(self, places: set[Positions]) -> Head:
        if self.causal:
            return "lm_head"
        if "sequences" in places:
            return "pretraining"
        return "lm_head" if "labels" in places else "none"

    @property
    def scored(self) -> list[str]:
        """The models whose answers are scored; a run on text has none."""
        return list(self.config.scoring.models) if self.config.data.kind == "instructions" else []

    def record(self) -> dict[str, Any]:
        """What the run's folder keeps to know its run again."""
        return {"config": command_line.to_dict(self.config), "ds_config": self.ds_config, "world_size": self.world_size}

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
            f"Method      {' + '.join(self.config.methods())}: {', '.join(self.method.weights)}\n"
            f"Data        {self.config.data.train}, {data_report.rstrip('.')}{own}\n"
            f"Batch       {train.global_batch_size} = {split.micro_batch_size} x {self.world_size} rank(s) x "
            f"{split.accumulation_steps} accumulation step(s); {train.steps} steps in {dtype}, ZeRO-{stage}"
            + "".join(f"\nNote        {note}" for note in self.notes)
        )

    def estimate(self) -> dict[str, float] | None:
        """What the training costs at most: every sequence at its full length, and no time but that of the arithmetic.

        6 FLOP a parameter and token for the student's forward and backward pass (all of it, adapters or not; more where
        Kronecker products use theirs many times), 2 for the teacher's forward pass, at 30 % of an A100's 312 TFLOP/s in
        bf16.
        None while the steps of train.epochs are not counted.
        """
        train = self.config.train
        if train.epochs is not None:
            return None
        tokens = train.steps * train.global_batch_size * self.config.data.max_length
        of_teacher = 2 * self.sizes["teacher_params"] if self.method.needs_teacher else 0
        flops = tokens * (3 * self.sizes["forward_flops"] + of_teacher)
        return {"tokens": tokens, "flops": flops, "a100_hours": flops / (0.3 * 312e12) / 3600}

    def describe(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        config = {**command_line.to_dict(self.config), "output_dir": str(self.folder)}
        batch = {
            "global_batch_size": self.config.train.global_batch_size,
            "ranks": self.world_size,
            "micro_batch_size": self.split.micro_batch_size,
            "accumulation_steps": self.split.accumulation_steps,
        }
        terms = dict(self.method.weights)
        notes, epochs = list(self.notes), self.config.train.epochs
        if epochs is not None:
            config["train"]["steps"] = None
            notes.append(f"the steps of train.epochs {epochs}, and so the cost, are known once the text is tokenised")
        return {
            **self.sizes,
            "batch": batch,
            "terms": terms,
            "estimate": self.estimate(),
            "notes": notes,
            "config": config,
            "ds_config": self.ds_config,
        }


def make_plan(config: RunConfig, before: Plan | None = None) -> Plan:
    """Resolve and check a run before anything expensive.

    Args:
        config: the run.
        before: the plan of the run whose student is this run's teacher, which need not exist yet.

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
    if before is None:
        teacher_config = _model_config(config, "teacher.model", config.teacher.model)
    else:
        teacher_config = before.student_config
    student_config, sizes = _student(config, teacher_config)
    objective = _objective(config, teacher_config)
    searched = _searched(config)
    # Any layer stands for the one that the search will find.
    settled = config if searched is None else config.with_settings(searched, teacher_layer="last")
    method = build_method(config.methods(), settled.method_settings, teacher_config, student_config, objective)
    vocabulary, note = None, None
    if method.needs_teacher and config.student.model is not None:
        vocabulary, note = compare_vocabularies(locate(config.teacher.model), locate(config.student.model))
    planned = Plan(
        config=config,
        ds_config=resolved,
        split=split,
        world_size=world_size,
        method=method,
        sizes=sizes,
        teacher_config=teacher_config,
        student_config=student_config,
        objective=objective,
        tokenizer_path=tokenizer_path(config) if before is None else before.tokenizer_path,
        before=before,
        vocabulary=vocabulary,
        notes=[] if note is None else [note],
    )
    _check_teacher_head(planned)
    return planned


def make_plans(config: RunConfig) -> list[Plan]:
    """The runs that a configuration stands for, in order: one for each assistant (MiniLM §3.3), then its own.

    Raises:
        UserError: settings that cannot work in one of them.
    """
    plans: list[Plan] = []
    for number, shape in enumerate(config.student.assistants, start=1):
        student = replace(config.student, shape=shape, assistants=[])
        folder = f"{config.output_dir}/assistant-{number}"
        plans.append(_after(plans, replace(config, student=student, output_dir=folder, resume="auto")))
    plans.append(_after(plans, config))
    return plans


def _after(plans: list[Plan], config: RunConfig) -> Plan:
    if not plans:
        return make_plan(config)
    teacher = replace(config.teacher, model=str(plans[-1].folder / "student"))
    return make_plan(replace(config, teacher=teacher), plans[-1])


def _searched(config: RunConfig) -> str | None:
    names = [name for name in config.methods() if METHODS[name].searches_layer]
    return next((name for name in names if config.method_settings[name].teacher_layer == "auto"), None)


def _model_config(config: RunConfig, key: str, reference: str) -> PreTrainedConfig:
    loaded = load_config(locate(reference))
    if config.data.kind == "instructions" and not family_of(loaded).causal:
        raise UserError(
            f"{key} {reference} is an encoder ({loaded.model_type}), and instruction data "
            "train decoders only: take a decoder, or learn from text (data.kind=text)"
        )
    return loaded


def _student(config: RunConfig, teacher: PreTrainedConfig) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The student's config, and what is said of the sizes."""
    settings = config.student
    if settings.model is None and settings.shape is None:
        # A factorised student has its teacher's shape.
        return teacher, summarise(teacher, settings.factorize, settings.method)
    if settings.model is not None:
        student, how = _model_config(config, "student.model", settings.model), "given"
    else:
        assert settings.shape is not None
        shape = parse_shape(settings.shape)
        student, how = shaped_config(teacher, shape), f"{settings.shape} ({settings.init})"
        if settings.init != "random":
            teacher_layers(settings.layers, shape.depth, shape_of(teacher).num_layers, key="student.layers")
    reference = build_reference(student)
    embedding = embedding_size(settings.factorize, settings.method)
    if settings.model is None and embedding is not None:
        install(reference, {}, embedding, settings.method)
        how += f", {kind_of(settings.method).embedding_key} {embedding}"
    params = [count_parameters(build_reference(teacher)), count_parameters(reference)]
    sizes = {"method": how, "teacher_params": params[0], "student_params": params[1], "ratio": params[1] / params[0]}
    return student, {**sizes, "forward_flops": forward_flops(reference)}


def _objective(config: RunConfig, teacher: PreTrainedConfig) -> Objective:
    """Words, and pairs of segments where they are asked for, or where a BERT's next-sentence head is there to learn.

    Raises:
        UserError: pairs for an architecture that has no next-sentence head.
    """
    if config.data.kind != "text":
        return Objective()
    wanted = config.data.text.next_sentence
    uses_output = any(METHODS[name].uses_output for name in config.methods())
    if wanted is None:
        wanted = uses_output and (teacher.architectures or [""])[0] == "BertForPreTraining"
    if wanted and teacher.model_type != "bert":
        raise UserError(
            f"data.text.next_sentence is true, but {teacher.model_type} has no next-sentence head: only bert has one"
        )
    return Objective(tokens=True, sequences="classes" if wanted else None)


def _check_teacher_head(plan: Plan) -> None:
    """Before any weights are read, as far as a config tells: one of a bare encoder does.

    Raises:
        UserError: terms on the output of a teacher that has no head.
    """
    name = (plan.teacher_config.architectures or [""])[0]
    needs_none = plan.causal or plan.before is not None or not plan.method.needs_teacher
    if needs_none or plan.teacher_head == "none" or not name.endswith("Model"):
        return
    positions = plan.method.positions.items()
    terms = [term for term, place in positions if place != "tokens" and term.split(".")[-1] not in _LABEL_TERMS]
    raise UserError(
        f"teacher.model {plan.config.teacher.model} is a {name} without language-model head, but {', '.join(terms)} "
        "compare its output: give them the weight 0, or take a teacher with its head"
    )


def _saved_head(config: PreTrainedConfig) -> Head:
    """The head that a folder's weights come with, by the class that its config names."""
    name = (config.architectures or [""])[0]
    if name.endswith("ForPreTraining"):
        return "pretraining"
    return "lm_head" if name.endswith("ForMaskedLM") else "none"


def tokenizer_path(config: RunConfig) -> Path:
    """Where the student's tokenizer is: with the student, else with the teacher."""
    if config.student.model is not None and brings_tokenizer(locate(config.student.model)):
        return locate(config.student.model)
    return locate(config.teacher.model)
