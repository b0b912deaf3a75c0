"""The plan of a run: its settings, resolved and checked from configurations without reading weights or data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from llmdistill.config import RunConfig
from llmdistill.config.command_line import changed
from llmdistill.data.prompts import CHAT, resolve_prompt
from llmdistill.embedded import locate
from llmdistill.factorize.counting import build_reference, count_parameters, forward_flops
from llmdistill.factorize.install import install
from llmdistill.factorize.kinds import kind_of
from llmdistill.factorize.sizes import plan_embedding, summarize
from llmdistill.methods import METHODS, Method, build_method
from llmdistill.models.configs import load_config
from llmdistill.models.families import is_causal, shape_of
from llmdistill.models.gguf import origin
from llmdistill.models.heads import copies_classifier
from llmdistill.models.load import Head
from llmdistill.models.shapes import check_sizes, parse_shape, shaped_config, teacher_layers
from llmdistill.models.tokenizer import brings_tokenizer, check_tokens, compare_vocabularies, load_tokenizer
from llmdistill.objective import Objective
from llmdistill.run.checks import (
    check_can_cache,
    check_keep_best,
    check_teacher_head,
    check_weighting,
    check_without_entry,
)
from llmdistill.run.trackers import check_libraries
from llmdistill.runtime.devices import TORCH_DTYPES
from llmdistill.runtime.ds_check import check_ds_config, check_zero
from llmdistill.runtime.ds_config import is_shipped, read_ds_config
from llmdistill.runtime.engine import BatchSplit, split_batch, student_ds_config
from llmdistill.runtime.launch import launched_ranks
from llmdistill.tasks import make_task
from llmdistill.tasks.base import Models, Task


@dataclass(frozen=True)
class Plan:
    """The resolved settings of a run."""

    config: RunConfig
    """The configuration; it has the numbers of steps once the training set is read."""
    asked: RunConfig
    """The configuration as given by the user, with data.prompt resolved; the run folder identifies the run by it."""
    task: Task
    ds_config: dict[str, Any]
    split: BatchSplit
    world_size: int
    method: Method
    sizes: dict[str, Any]
    """`teacher_params`, `student_params`, `ranks` and other values of the factorization."""
    teacher_config: PreTrainedConfig
    student_config: PreTrainedConfig
    objective: Objective
    """The learning objective of the run."""
    tokenizer_path: Path
    """The folder of the student's tokenizer: the student's own folder, else the teacher's."""
    before: Plan | None = None
    """The plan of the run whose student is this run's teacher, if the same command executes both."""
    copies_classifier: bool = False
    """Whether the student's classifier is initialized from the teacher's."""
    vocabulary: int | None = None
    """The number of logits that teacher and student share; None if the logits are not compared."""
    teacher_origin: str | None = None
    """How the weights of the teacher were made, if they are those of a GGUF file."""
    notes: list[str] = field(default_factory=list)
    """Notes on the plan for the user."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        assert self.config.output_dir is not None
        return Path(self.config.output_dir)

    @property
    def teacher_path(self) -> Path:
        """The folder of the teacher; without a teacher, the folder of the student, which is used for the tokenizer."""
        return locate(str(self.config.teacher.model or self.config.student.model))

    @property
    def models(self) -> Models:
        """The information on the models that the task needs."""
        return Models(
            teacher=self.teacher_config,
            student=self.student_config,
            teacher_path=self.teacher_path,
            tokenizer_path=self.tokenizer_path,
            causal=self.causal,
            objective=self.objective,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the student."""
        return TORCH_DTYPES["bf16" if self.ds_config["bf16"]["enabled"] else "fp32"]

    @property
    def teacher_dtype(self) -> torch.dtype:
        """The dtype of the teacher."""
        wanted = self.config.teacher.dtype
        return self.dtype if wanted == "auto" else TORCH_DTYPES[wanted]

    @property
    def compared_tokens(self) -> int:
        """The number of tokens whose probabilities teacher and student compare."""
        return int(self.teacher_config.vocab_size) if self.vocabulary is None else self.vocabulary

    @property
    def trains(self) -> bool:
        """Whether the run trains the student."""
        return METHODS[self.config.method].trains

    @property
    def is_cached(self) -> bool:
        """Whether the training reads the teacher's outputs from a cache; the teacher is then not loaded for it."""
        return self.config.teacher.cache is not None and self.method.needs_teacher

    @property
    def searched(self) -> str | None:
        """The name of the method whose teacher layer must still be searched; None if there is none."""
        return _searched(self.config)

    @property
    def causal(self) -> bool:
        """Whether the run's models are decoders."""
        return is_causal(self.student_config)

    @property
    def student_head(self) -> Head:
        """The heads that the student needs: those whose outputs the loss uses; for a decoder always the lm_head."""
        if self.task.head is not None:
            return self.task.head
        if not self.trains and not self.causal:
            return _saved_head(self.teacher_config if self.config.student.model is None else self.student_config)
        return self._head(tokens=bool(self.method.token_terms), sequences=bool(self.method.sequence_terms))

    @property
    def teacher_head(self) -> Head:
        """The heads that the teacher needs: those whose outputs the student is compared with."""
        if self.task.head is not None:
            return self.task.head
        sequences = any(term.needs_teacher for term in self.method.sequence_terms)
        return self._head(tokens=bool(self.method.teacher_positions), sequences=sequences)

    def _head(self, *, tokens: bool, sequences: bool) -> Head:
        if self.causal:
            return "lm_head"
        if sequences:
            return "pretraining"
        return "lm_head" if tokens else "none"

    @property
    def scored(self) -> list[str]:
        """The models that are scored."""
        there = {"teacher": self.config.teacher.model is not None and not self.is_cached}
        return [name for name in self.config.scoring.models if name in self.task.scored and there.get(name, True)]


def make_plan(
    config: RunConfig,
    before: Plan | None = None,
    *,
    pending: Mapping[str, PreTrainedConfig] | None = None,
    ranks: int | None = None,
) -> Plan:
    """Resolve and check the settings of a run before any expensive work.

    Args:
        config: the run.
        before: the plan of the run whose student is this run's teacher; this student may not exist yet.
        pending: the configurations of other models that may not exist yet, by path.
        ranks: the number of ranks; by default that of the launcher of this process.

    Raises UserError if the settings are invalid or contradict each other.
    """
    pending = pending or {}
    world_size = launched_ranks() if ranks is None else ranks
    ds_config = read_ds_config(config.ds_config)
    split = split_batch(config.train.global_batch_size, config.train.micro_batch_size, world_size)
    resolved = student_ds_config(ds_config, config.ds_config, config.train, split, output_dir=str(config.output_dir))
    if not is_shipped(config.ds_config):  # the check loads DeepSpeed
        check_ds_config(resolved, config.ds_config)
    check_libraries(config, resolved)
    if config.teacher.is_sharded and config.teacher.zero:
        check_zero({**config.teacher.zero, "stage": 3}, "teacher.zero")
    entry = METHODS[config.method]
    task = make_task(config, trains=entry.trains, teacher_writes=entry.teacher_writes)
    if before is not None:
        teacher_config = before.student_config
    elif config.teacher.model is None:
        teacher_config = _model_config(task, "student.model", str(config.student.model), pending)
    else:
        teacher_config = _model_config(task, "teacher.model", config.teacher.model, pending)
    student_config, sizes = _student(config, task, teacher_config, pending)
    names = config.methods()
    objective = task.objective(teacher_config, uses_output=any(METHODS[name].uses_output for name in names))
    searched = _searched(config)
    # The last layer is a placeholder for the layer that the search will find.
    unsearched = config if searched is None else config.with_settings(searched, teacher_layer="last")
    method = build_method(names, unsearched.method_settings, teacher_config, student_config, objective)
    if task.head not in (None, "none") and not {"labels", "sequences"} & set(method.positions.values()):
        # Without sft no term would train the head of the task.
        method = build_method([*names, "sft"], unsearched.method_settings, teacher_config, student_config, objective)
    vocabulary, note = None, None
    teacher, student = config.teacher.model if method.needs_teacher else None, config.student.model
    if teacher is not None and student is not None and not {teacher, student} & pending.keys():
        if objective.tokens:
            vocabulary, note = compare_vocabularies(locate(teacher), locate(student))
        else:
            check_tokens(locate(teacher), locate(student))
    tokenizer = Path(str(student)) if student in pending else None
    if tokenizer is None:
        tokenizer = tokenizer_path(config) if before is None else before.tokenizer_path
    config = with_prompt(config) if before is None else _asked_as(config, before.config.data.prompt)
    planned = Plan(
        config=config,
        asked=config,
        task=task,
        ds_config=resolved,
        split=split,
        world_size=world_size,
        method=method,
        sizes=sizes,
        teacher_config=teacher_config,
        student_config=student_config,
        objective=objective,
        tokenizer_path=tokenizer,
        before=before,
        copies_classifier=_copies_classifier(config, task, student_config, teacher_config),
        vocabulary=vocabulary,
        notes=[] if note is None else [note],
        teacher_origin=_origin(config, pending),
    )
    check_teacher_head(planned)
    check_keep_best(planned)
    check_without_entry(planned)
    if config.teacher.cache is not None and method.needs_teacher:
        check_can_cache(planned)
    return planned


def make_plans(config: RunConfig, ranks: int | None = None) -> list[Plan]:
    """Return the plans of a configuration in order: one for each assistant (MiniLM §3.3), then the run itself.

    `ranks` is as in `make_plan`.

    Raises UserError if the settings of one of these runs are invalid or contradict each other.
    """
    configs: list[RunConfig] = []
    settings = config.student
    train = changed(config.train, settings.assistant_training, key="student.assistant_training")
    for number, shape in enumerate(settings.assistants, start=1):
        student = settings.made_otherwise(shape=shape)
        folder = f"{config.output_dir}/assistant-{number}"
        configs.append(replace(config, student=student, train=train, output_dir=folder, resume="auto"))
    plans: list[Plan] = []
    for each in [*configs, config]:
        before = plans[-1] if plans else None
        if before is not None:
            each = replace(each, teacher=replace(each.teacher, model=str(before.folder / "student"), cache=None))
        plans.append(make_plan(each, before, ranks=ranks))
    return plans


def _searched(config: RunConfig) -> str | None:
    names = [name for name in config.methods() if METHODS[name].searches_layer]
    return next((name for name in names if config.method_settings[name].teacher_layer == "auto"), None)


def _model_config(task: Task, key: str, reference: str, pending: Mapping[str, PreTrainedConfig]) -> PreTrainedConfig:
    loaded = pending[reference] if reference in pending else load_config(locate(reference))
    task.check_model(key, reference, loaded)
    return loaded


def _origin(config: RunConfig, pending: Mapping[str, PreTrainedConfig]) -> str | None:
    name = config.teacher.model
    return None if name is None or name in pending else origin(locate(name))


def _copies_classifier(config: RunConfig, task: Task, student: PreTrainedConfig, teacher: PreTrainedConfig) -> bool:
    if task.head is None or task.num_outputs is None:
        return False
    return copies_classifier(
        config.data.task.copy_classifier,
        student,
        None if config.teacher.model is None else teacher,
        task.num_outputs,
        head=task.head,
        by_default=any(METHODS[name].copies_classifier for name in config.methods()),
    )


def _student(
    config: RunConfig, task: Task, teacher: PreTrainedConfig, pending: Mapping[str, PreTrainedConfig]
) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Return the student's config and the sizes of the models."""
    settings = config.student
    check_weighting(config)
    if settings.model is None and settings.shape is None:
        # A factorized student has the shape of its teacher.
        return teacher, summarize(teacher, settings.factorize, settings.method)
    if settings.model is not None:
        student, how = _model_config(task, "student.model", settings.model, pending), "given"
    else:
        assert settings.shape is not None
        shape = parse_shape(settings.shape)
        student, how = shaped_config(teacher, shape), f"{settings.shape} ({settings.init})"
        if settings.init != "random":
            unknown = torch.zeros(shape_of(teacher).num_layers)  # the influence of the layers is measured later
            teacher_layers(settings.teacher_layers, shape.depth, len(unknown), key="student.layers", influence=unknown)
            check_sizes(settings.init, shape_of(student), shape_of(teacher))
    reference = build_reference(student)
    if settings.model is None:
        planned = plan_embedding(reference, settings.factorize, settings.method)
        install(reference, planned)
        if planned.embedding is not None:
            how += f", {kind_of(settings.method).embedding_key} {planned.embedding}"
    params = [count_parameters(build_reference(teacher)), count_parameters(reference)]
    sizes = {"method": how, "teacher_params": params[0], "student_params": params[1], "ratio": params[1] / params[0]}
    return student, {**sizes, "forward_flops": forward_flops(reference)}


def _saved_head(config: PreTrainedConfig) -> Head:
    """Return the head that a model folder contains, according to the class name in its config."""
    name = (config.architectures or [""])[0]
    if name.endswith("ForPreTraining"):
        return "pretraining"
    return "lm_head" if name.endswith("ForMaskedLM") else "none"


def with_prompt(config: RunConfig) -> RunConfig:
    """Return the configuration of a run whose models exist, with `data.prompt` resolved if its data are instructions.

    Raises:
        UserError: the prompt needs a chat template, and a tokenizer has none.
    """
    if config.data.kind != "instructions":
        return config
    asked = config.data.prompt
    paths = dict.fromkeys((locate(str(config.teacher.model or config.student.model)), tokenizer_path(config)))
    needed = [path for path in paths if asked in (None, CHAT) and brings_tokenizer(path)]  # a plan may have none yet
    return _asked_as(config, resolve_prompt(asked, [load_tokenizer(path) for path in needed]))


def _asked_as(config: RunConfig, prompt: str | None) -> RunConfig:
    return replace(config, data=replace(config.data, prompt=prompt))


def tokenizer_path(config: RunConfig) -> Path:
    """Return the folder of the student's tokenizer: the student's own folder, else the teacher's."""
    if config.student.model is not None and brings_tokenizer(locate(config.student.model)):
        return locate(config.student.model)
    return locate(str(config.teacher.model or config.student.model))
