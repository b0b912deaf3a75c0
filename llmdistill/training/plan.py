"""The plan of a run: its settings, resolved and checked from configurations without reading weights or data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from llmdistill.config import RunConfig
from llmdistill.config.command_line import with_values
from llmdistill.data.prompts import CHAT, resolve_prompt, tokenizer_gaps
from llmdistill.embedded import locate
from llmdistill.methods import METHODS, Method, build_method
from llmdistill.models.families import is_causal
from llmdistill.models.gguf import origin
from llmdistill.models.heads import HEADS
from llmdistill.models.tokenizer import brings_tokenizer, check_tokens, compare_vocabularies, load_tokenizer
from llmdistill.objective import Objective
from llmdistill.runtime.devices import TORCH_DTYPES
from llmdistill.runtime.distributed import World
from llmdistill.runtime.ds_check import check_ds_config, check_zero
from llmdistill.runtime.ds_config import is_shipped, read_ds_config
from llmdistill.runtime.engine import BatchSplit, split_batch, student_ds_config
from llmdistill.runtime.launch import launched_ranks
from llmdistill.step.tap_models import LayerKernels
from llmdistill.students.sizes import build_planned
from llmdistill.tasks import make_task
from llmdistill.tasks.base import Task
from llmdistill.teachers.choice import source_of
from llmdistill.teachers.remote import vllm_number_obstacle
from llmdistill.teachers.source import ResolvedTeacher, TeacherSource
from llmdistill.training.checks import check_plan, compiles, runs_liger
from llmdistill.training.defaults import settle
from llmdistill.training.resolved import (
    LARGEST_STUDENT,
    Pending,
    RunModels,
    has_copied_classifier,
    heads_of,
    model_config,
    saved_sizes,
    student_of,
    teacher_path,
    teachers_of,
    tokenizer_path,
)
from llmdistill.training.rules import CACHE_BY_VLLM, CACHED_TEACHER, check_settings, clash
from llmdistill.training.run_folder import data_contents, with_earlier_defaults
from llmdistill.training.trackers import check_libraries


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The resolved settings of a run."""

    config: RunConfig
    """The configuration; it has the numbers of steps once the training set is read."""
    recorded: RunConfig
    """The configuration with its defaults settled, before epochs became steps; the run folder knows the run by it."""
    task: Task
    ds_config: dict[str, Any]
    split: BatchSplit
    world_size: int
    method: Method
    models: RunModels
    teacher_plan: Plan | None = None
    """The plan of the run whose student is this run's teacher, if the same command executes both."""
    notes: list[str] = field(default_factory=list)
    """Notes on the plan for the user."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        assert self.config.output_dir is not None
        return Path(self.config.output_dir)

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO in which the student is trained."""
        stage: int = self.ds_config.get("zero_optimization", {}).get("stage", 0)
        return stage

    @property
    def trains(self) -> bool:
        """Whether the run trains the student."""
        return METHODS[self.config.method].trains

    @property
    def is_cached(self) -> bool:
        """Whether the outputs of `teacher.model` are read from a cache, so that it is not loaded; others may be too."""
        return self.config.teacher.cache is not None and self.method.needs_teacher

    @property
    def source(self) -> TeacherSource | None:
        """What gives the teacher's outputs in the training; None if the method needs none."""
        if not self.method.needs_teacher:
            return None
        return source_of(self.config.teacher, translates=self.models.translates)

    @property
    def layer_kernels(self) -> LayerKernels:
        """What the layers of its models run on this machine."""
        device = World.current().device
        return "compiled" if compiles(self, device) else "liger" if runs_liger(self, device) else "transformers"

    @property
    def cache_obstacle(self) -> str | None:
        """Why no cache can take the place of its teacher; None if one can."""
        return clash(self, CACHED_TEACHER)

    @property
    def vllm_obstacle(self) -> str | None:
        """Why vLLM cannot fill its cache, with a remedy; None if it can."""
        return clash(self, CACHE_BY_VLLM) or vllm_number_obstacle(self, remedy="take --cache.engine hf")

    def data_contents(self) -> dict[str, str]:
        """Return the fingerprints of what gives its examples; see `run_folder.data_contents`."""
        return data_contents(self.config)

    @property
    def runs_teacher(self) -> bool:
        """Whether the teacher itself runs in the training."""
        return self.source is not None and self.source.runs_here


class _Models(NamedTuple):
    """Teacher and student of a plan, from their configurations."""

    teachers: dict[str, ResolvedTeacher]
    teacher: PreTrainedConfig
    """Of `teacher.model`, or of the student in a run without a teacher."""
    student: PreTrainedConfig
    sizes: dict[str, Any]


class _Learning(NamedTuple):
    """What the run of a plan learns from its batches, and by which terms."""

    method: Method
    objective: Objective


class _Tokens(NamedTuple):
    """The tokens that the models of a plan read."""

    tokenizer: Path
    """The folder of the student's tokenizer."""
    vocabulary: int | None
    """The number of logits that are compared; None if none are."""
    translates: bool
    """Whether the teacher reads the text in tokens of its own."""
    notes: list[str]


def make_plan(
    config: RunConfig, before: Plan | None = None, *, pending: Pending | None = None, ranks: int | None = None
) -> Plan:
    """Resolve and check the settings of a run before any expensive work.

    `before` is the plan of the run whose student is this run's teacher; this student may not exist yet. `pending` has
    the configurations of other models that may not exist yet, by path. `ranks` is by default that of the launcher.
    Raises UserError if the settings are invalid or contradict each other.
    """
    config = with_earlier_defaults(config).with_learning_rate()
    check_settings(config)
    # From cheap to dear: the settings above, the ds_config, the models' configurations, and the tokenizers last.
    pending = pending or {}
    world_size = launched_ranks() if ranks is None else ranks
    given = read_ds_config(config.ds_config)
    split = split_batch(config.train.global_batch_size, config.train.micro_batch_size, world_size)
    ds_config = student_ds_config(given, config.ds_config, config.train, split, output_dir=str(config.output_dir))
    if not is_shipped(config.ds_config):  # the check loads DeepSpeed
        check_ds_config(ds_config, config.ds_config)
    check_libraries(config, ds_config)
    dtype = "bf16" if ds_config["bf16"]["enabled"] else "fp32"
    entry = METHODS[config.method]
    task = make_task(config, trains=entry.trains, teacher_writes=entry.teacher_writes)
    if before is not None:
        teacher_config = before.models.student
    elif config.teacher.model is None:  # that of the student stands in its place
        teacher_config = model_config(task, "student.model", str(config.student.model), pending)
    else:
        teacher_config = model_config(task, "teacher.model", config.teacher.model, pending)
    settled = settle(config, teacher_config)
    config = settled.config
    task = make_task(config, trains=entry.trains, teacher_writes=entry.teacher_writes)  # which reads what is settled
    models = _plan_models(config, task, dtype, teacher_config, pending)
    learning = _plan_method(config, task, models)
    method = learning.method
    # Where no term needs a teacher, the student may still be made from `teacher.model`; further ones are for terms
    # alone.
    teachers = models.teachers if method.needs_teacher else {"": models.teachers[""]}
    tokens = _plan_tokens(config, task, models._replace(teachers=teachers), learning, before, pending)
    config = with_prompt(config) if before is None else _set_prompt(config, before.config.data.prompt)

    causal = is_causal(models.student)
    teacher_head, student_head = heads_of(config, task, method, models.teacher, models.student, causal=causal)
    teacher, student = config.teacher.model, config.student.model
    larger, ratio = list[str](), models.sizes["ratio"]
    if student is not None and teacher is not None and ratio > LARGEST_STUDENT:
        larger = [f"the student has {ratio:.0%} of the teacher's parameters"]
    plan = Plan(
        config=config,
        recorded=config,
        task=task,
        ds_config=ds_config,
        split=split,
        world_size=world_size,
        method=method,
        models=RunModels(
            teacher=models.teacher,
            student=models.student,
            teacher_path=teachers[""].path,
            tokenizer_path=tokens.tokenizer,
            causal=causal,
            objective=learning.objective,
            sizes=models.sizes,
            dtype=TORCH_DTYPES[dtype],
            student_head=student_head,
            teacher_head=teacher_head,
            copies_classifier=has_copied_classifier(config, task, models.teacher, models.student),
            vocabulary=tokens.vocabulary,
            translates=tokens.translates,
            teachers=teachers,
            teacher_origin=None if teacher is None or teacher in pending else origin(locate(teacher)),
        ),
        teacher_plan=before,
        notes=[*settled.notes, *tokens.notes, *larger],
    )
    check_plan(plan)
    folder = tokens.tokenizer
    is_there = before is None and folder.is_dir() and not {str(folder), student, teacher} & pending.keys()
    if is_there and any(folder.glob("*.safetensors")) and not brings_tokenizer(folder):
        load_tokenizer(folder)  # names the missing file; a folder with nothing but a config is for planning
    return plan


def _plan_models(config: RunConfig, task: Task, dtype: str, teacher: PreTrainedConfig, pending: Pending) -> _Models:
    """Read the configurations of the other models, or make that of a student that does not exist yet."""
    teachers = teachers_of(config, dtype)
    for own in teachers.values():
        if own.settings.is_sharded and own.settings.zero:
            check_zero({**own.settings.zero, "stage": 3}, f"{own.key}.zero")
    student, sizes = student_of(config.student, task, teacher, pending)
    as_planned = partial(build_planned, student, config.student)
    saved = saved_sizes(sizes["student_params"], config.student, TORCH_DTYPES[dtype], as_planned)
    return _Models(teachers, teacher, student, {**sizes, **saved})


def _plan_method(config: RunConfig, task: Task, models: _Models) -> _Learning:
    """Build the method for both models, and say what the run learns from its batches."""
    names = config.methods()
    objective = task.objective(models.teacher, uses_output=any(METHODS[name].uses_output for name in names))
    searched = find_searching_method(config)
    # The last layer is a placeholder for the layer that the search will find.
    unsearched = config if searched is None else config.with_settings(searched, teacher_layer="last")
    given = unsearched.method_settings, models.teacher, models.student, objective
    method = build_method(names, *given)
    learns_labels = task.head is not None and HEADS[task.head].learns_labels
    if learns_labels and not {"labels", "sequences"} & set(method.positions.values()):
        method = build_method([*names, "sft"], *given)  # else no term would train the head of the task
    return _Learning(method, objective)


def _plan_tokens(
    config: RunConfig,
    task: Task,
    models: _Models,
    learning: _Learning,
    before: Plan | None,
    pending: Pending,
) -> _Tokens:
    """Compare the tokenizers of the models, as far as they exist."""
    vocabulary, translates, notes, gaps = None, False, list[str](), list[str]()
    teacher, student = config.teacher.model, config.student.model
    if learning.method.needs_teacher and teacher and student and not {teacher, student} & pending.keys():
        has_own = task.translates and is_causal(models.student) and brings_tokenizer(locate(student))
        tokenizers = [load_tokenizer(locate(model)) for model in (teacher, student)] if has_own else []
        differ = has_own and tokenizers[0].get_vocab() != tokenizers[1].get_vocab()
        names = config.methods()
        if differ and all(METHODS[name].other_tokens for name in names if METHODS[name].needs_teacher):
            translates = True
            notes.append("teacher and student have different tokenizers: the text that both read is compared")
        elif learning.objective.tokens:
            vocabulary, note = compare_vocabularies(locate(teacher), locate(student))
            notes += [] if note is None else [note]
        else:
            check_tokens(locate(teacher), locate(student))
        if config.data.kind == "instructions" and has_own and not translates:
            gaps = tokenizer_gaps(*tokenizers)
    for other in [] if translates else [*models.teachers.values()][1:]:  # refused beside another tokenizer
        model_config(task, f"{other.key}.model", str(other.settings.model), pending)
        least, _ = compare_vocabularies(other.path, locate(str(student or teacher)))
        vocabulary = least if vocabulary is None else min(vocabulary, least)
    tokenizer = Path(str(student)) if student in pending else None
    if tokenizer is None:
        tokenizer = tokenizer_path(config) if before is None else before.models.tokenizer_path
    return _Tokens(tokenizer, vocabulary, translates, [*notes, *gaps])


def make_plans(config: RunConfig, ranks: int | None = None) -> list[Plan]:
    """Return the plans of a configuration in order: one for each assistant (MiniLM §3.3), then the run itself.

    `ranks` and the errors are those of `make_plan`.
    """
    check_settings(config)
    configs: list[RunConfig] = []
    settings = config.student
    train = with_values(config.train, settings.assistant_training, key="student.assistant_training")
    for number, shape in enumerate(settings.assistants, start=1):
        student = settings.without_factorization(shape=shape)
        folder = f"{config.output_dir}/assistant-{number}"
        configs.append(replace(config, student=student, train=train, output_dir=folder, resume="auto"))
    plans: list[Plan] = []
    for planned in [*configs, config]:
        before = plans[-1] if plans else None
        if before is not None:
            # The student of the run before teaches itself, and no cache or server has its outputs.
            elsewhere: dict[str, Any] = {"cache": None, "url": None, "top_k": None, "source": None, "settings": {}}
            teacher = replace(planned.teacher, model=str(before.folder / "student"), **elsewhere)
            planned = replace(planned, teacher=teacher)
        plans.append(make_plan(planned, before, ranks=ranks))
    return plans


def find_searching_method(config: RunConfig) -> str | None:
    """Return the name of the method whose teacher layer must still be searched; None if there is none."""
    names = [name for name in config.methods() if METHODS[name].searches_layer]
    return next((name for name in names if config.method_settings[name].teacher_layer == "auto"), None)


def with_prompt(config: RunConfig) -> RunConfig:
    """Return the configuration of a run whose models exist, with `data.prompt` resolved if its data are instructions.

    Raises UserError if the prompt needs a chat template, and a tokenizer has none.
    """
    if config.data.kind != "instructions":
        return config
    given = config.data.prompt
    paths = dict.fromkeys((teacher_path(config), tokenizer_path(config)))
    needed = [path for path in paths if given in (None, CHAT) and brings_tokenizer(path)]  # a plan may have none yet
    return _set_prompt(config, resolve_prompt(given, [load_tokenizer(path) for path in needed]))


def _set_prompt(config: RunConfig, prompt: str | None) -> RunConfig:
    return replace(config, data=replace(config.data, prompt=prompt))
