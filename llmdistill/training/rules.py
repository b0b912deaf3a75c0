"""What goes with what: the choices of a run that cannot be combined, each pair with the sentence that says why."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from llmdistill.config import RunConfig
from llmdistill.config.data import RolloutConfig
from llmdistill.data.references import is_weighted
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.models.configs import load_config
from llmdistill.models.families import family_of, has_family
from llmdistill.models.load import has_checkpointing
from llmdistill.models.quantized import bits_of

if TYPE_CHECKING:
    from llmdistill.training.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One choice of a run: the value of a setting, or a property that its models, method or data have."""

    typed: str
    """How users make the choice, for the table of docs/train.md."""
    of_config: Callable[[RunConfig], bool] | None = None
    """Whether a run makes the choice, if its settings alone tell."""
    of_plan: Callable[[Plan], bool] | None = None
    """The same, if models and method must be known too. With both, this one decides once there is a plan."""
    detail: Callable[[Plan], str] = lambda plan: ""
    """What a sentence about a plan says of the choice, such as the type of the model."""

    def made_by(self, plan: Plan) -> bool:
        """Whether the run of a plan makes the choice."""
        if self.of_plan is not None:
            return self.of_plan(plan)
        assert self.of_config is not None
        return self.of_config(plan.config)


def _has_setting(run: RunConfig, method: str, key: str, value: str) -> bool:
    """Whether a run uses a method with this value of a setting of it."""
    return method in run.methods() and getattr(run.method_settings.get(method), key, None) == value


def _own_masks(model: PreTrainedConfig) -> bool:
    """Whether the masks of a model are left to transformers."""
    return not has_family(model) or family_of(model).makes_mask


def _is_bare(plan: Plan) -> bool:
    """Whether the teacher's config names an encoder without head, where the task brings none either."""
    models = plan.models
    bare = MODEL_MAPPING_NAMES.get(models.teacher.model_type, "")  # several of Funnel
    is_bare = (models.teacher.architectures or [""])[0] in ({bare} if isinstance(bare, str) else bare)
    return is_bare and not models.causal and plan.before is None and plan.task.head is None


def _compared_outputs(plan: Plan) -> list[str]:
    """The names of the terms that compare outputs of the teacher."""
    terms = [term.name for term in plan.method.token_terms if term.divergence is not None]
    return terms + [term.name for term in plan.method.sequence_terms if term.needs_teacher]


def _sharded(config: RunConfig) -> list[str]:
    """The settings that shard teachers, as typed."""
    teachers = {"teacher": config.teacher, **{f"teacher.others.{n}": one for n, one in config.teacher.others.items()}}
    return [f"{key}.sharding {one.sharding}" for key, one in teachers.items() if one.is_sharded]


def _sharded_few_bits(plan: Plan) -> list[str]:
    """The settings that shard a teacher of few bits, with its bits and its name."""
    found = []
    for name, teacher in plan.models.teachers.items():
        if teacher.settings.is_sharded and plan.method.needs_teacher:
            bits = bits_of(load_config(teacher.path) if name else plan.models.teacher)
            sharding = f"{teacher.key}.sharding {teacher.settings.sharding}"
            found += [] if bits is None else [f"{sharding}: the {bits} weights of {teacher.settings.model}"]
    return found


def _is_factorized(config: RunConfig) -> bool:
    return config.student.model is None and config.student.shape is None


CHOICES: dict[str, Choice] = {
    # The teacher
    "no teacher": Choice(typed="`teacher.model null`", of_config=lambda run: run.teacher.model is None),
    "cached teacher": Choice(
        typed="`teacher.cache`",
        of_config=lambda run: run.teacher.cache is not None,
        of_plan=lambda plan: (
            plan.method.needs_teacher and any(one.settings.cache for one in plan.models.teachers.values())
        ),
    ),
    "teacher on a server": Choice(
        typed="`teacher.url`",
        of_config=lambda run: run.teacher.url is not None,
        of_plan=lambda plan: plan.config.teacher.url is not None and plan.method.needs_teacher,
    ),
    "cache by vLLM": Choice(typed="`--cache.engine vllm`", of_config=lambda run: False),  # a command asks, see `clash`
    "several teachers": Choice(
        typed="`teacher.others`",
        of_config=lambda run: bool(run.teacher.others),
        of_plan=lambda plan: len(plan.models.teachers) > 1,
    ),
    "teachers of rows": Choice(
        typed="`teacher.average rows`",
        of_plan=lambda plan: len(plan.models.teachers) > 1 and plan.config.teacher.average == "rows",
    ),
    "another tokenizer": Choice(
        typed="a teacher with another tokenizer",
        of_plan=lambda plan: plan.models.translates,
    ),
    "sharded teacher": Choice(
        typed="`teacher.sharding zero3` or `node`",
        of_plan=lambda plan: bool(_sharded(plan.config)),
        detail=lambda plan: _sharded(plan.config)[0],
    ),
    "few-bit teacher": Choice(
        typed="a teacher with int8 or int4 weights",
        of_plan=lambda plan: bool(_sharded_few_bits(plan)),  # of several, one may be sharded and another of few bits
        detail=lambda plan: _sharded_few_bits(plan)[0],
    ),
    "bare teacher": Choice(
        typed="an encoder without language-model head as teacher",
        of_plan=_is_bare,
        detail=lambda plan: str((plan.models.teacher.architectures or [""])[0]),
    ),
    "teacher with own masks": Choice(
        typed="a teacher whose masks transformers makes",
        of_plan=lambda plan: plan.method.needs_teacher and _own_masks(plan.models.teacher),
        detail=lambda plan: plan.models.teacher.model_type,
    ),
    # The method
    "labels alone": Choice(
        typed="`method sft`, `seqkd` or `none`",
        of_config=lambda run: not METHODS[run.method].needs_teacher,
    ),
    "no term of a teacher": Choice(
        typed="methods whose terms need no teacher",
        of_plan=lambda plan: not plan.method.needs_teacher,
    ),
    "learns from a teacher": Choice(
        typed="every method but `sft`, `seqkd` and `none`",
        of_config=lambda run: any(METHODS[name].needs_teacher for name in run.methods()),
    ),
    "further methods": Choice(typed="`also`", of_config=lambda run: bool(run.also)),
    "seqkd": Choice(typed="`method seqkd`", of_config=lambda run: run.method == "seqkd"),
    "embedding": Choice(typed="`method embedding`", of_config=lambda run: "embedding" in run.methods()),
    "log_ratio": Choice(
        typed="`kd.divergence log_ratio`",
        of_config=lambda run: _has_setting(run, "kd", "divergence", "log_ratio"),
    ),
    "searched layer": Choice(
        typed="`minilmv2.teacher_layer auto`",
        of_config=lambda run: _has_setting(run, "minilmv2", "teacher_layer", "auto"),
    ),
    "learns given answers": Choice(
        typed="every method but `kd` and `makd`",
        of_config=lambda run: not METHODS[run.method].on_policy,
    ),
    "layers compared": Choice(
        typed="methods that compare inner tensors, such as `makd` and `minilm`",
        of_plan=lambda plan: bool(plan.method.teacher_taps),
    ),
    "sequences compared": Choice(
        typed="methods that compare classes, spans or embeddings",
        of_plan=lambda plan: any(term.needs_teacher for term in plan.method.sequence_terms),
    ),
    "no tokens compared": Choice(
        typed="methods that do not compare tokens",
        of_plan=lambda plan: not plan.method.teacher_positions,
    ),
    "output compared": Choice(
        typed="methods that compare tokens or classes",
        of_plan=lambda plan: bool(_compared_outputs(plan)),
        detail=lambda plan: ", ".join(_compared_outputs(plan)),
    ),
    # The data
    "instructions": Choice(typed="`data.kind instructions`", of_config=lambda run: run.data.kind == "instructions"),
    "text": Choice(typed="`data.kind text`", of_config=lambda run: run.data.kind == "text"),
    "sentences": Choice(typed="`data.kind sentences`", of_config=lambda run: run.data.kind == "sentences"),
    "task": Choice(typed="`data.kind task`", of_config=lambda run: run.data.kind == "task"),
    "no instructions": Choice(
        typed="`data.kind text`, `sentences` or `task`",
        of_config=lambda run: run.data.kind != "instructions",
    ),
    "no sentences": Choice(
        typed="`data.kind instructions`, `text` or `task`",
        of_config=lambda run: run.data.kind != "sentences",
    ),
    "no text": Choice(
        typed="`data.kind instructions`, `sentences` or `task`",
        of_config=lambda run: run.data.kind != "text",
    ),
    "no task": Choice(
        typed="`data.kind instructions`, `text` or `sentences`",
        of_config=lambda run: run.data.kind != "task",
    ),
    "spans": Choice(
        typed="question answering (`squad1`, `squad2`, `mlqa`)",
        of_plan=lambda plan: plan.models.objective.targets is not None and plan.models.objective.targets.is_per_token,
    ),
    "changing examples": Choice(
        typed="`data.streaming`, `data.on_policy`, texts of encoders, written texts",
        of_plan=lambda plan: plan.task.changing_examples(causal=plan.models.causal) is not None,
        detail=lambda plan: str(plan.task.changing_examples(causal=plan.models.causal)),
    ),
    "no score": Choice(
        typed="data of which only a validation loss is measured",
        of_plan=lambda plan: plan.task.validation_metric is None,
    ),
    "encoder": Choice(typed="encoders", of_plan=lambda plan: not plan.models.causal),
    "decoder": Choice(typed="decoders", of_plan=lambda plan: plan.models.causal),
    "pairs of segments": Choice(
        typed="`data.text.pairs true`",
        of_config=lambda run: run.data.kind == "text" and bool(run.data.text.pairs),
    ),
    "weighted files": Choice(
        typed="weights in `data.train`",
        of_config=lambda run: run.data.kind == "instructions" and is_weighted(run.data.train),
    ),
    "streaming": Choice(typed="`data.streaming true`", of_config=lambda run: run.data.streaming),
    "packing": Choice(typed="`data.packing true`", of_config=lambda run: run.data.packing),
    "prompt": Choice(typed="`data.prompt`", of_config=lambda run: run.data.prompt is not None),
    "tests": Choice(typed="`data.tests`", of_config=lambda run: bool(run.data.tests)),
    "buckets": Choice(typed="`data.bucket_steps` over 1", of_config=lambda run: run.data.bucket_steps != 1),
    "own answers": Choice(typed="`data.on_policy` over 0", of_config=lambda run: run.data.on_policy > 0),
    "given answers": Choice(typed="`data.on_policy 0`", of_config=lambda run: run.data.on_policy == 0),
    "rollout": Choice(typed="`data.rollout`", of_config=lambda run: run.data.rollout != RolloutConfig()),
    "rollout server": Choice(typed="`data.rollout.url`", of_config=lambda run: run.data.rollout.url is not None),
    "no validation set": Choice(typed="no `data.valid`", of_config=lambda run: run.data.valid is None),
    # The student
    "given student": Choice(typed="`student.model`", of_config=lambda run: run.student.model is not None),
    "no given student": Choice(typed="no `student.model`", of_config=lambda run: run.student.model is None),
    "shape": Choice(typed="`student.shape`", of_config=lambda run: run.student.shape is not None),
    "factorized student": Choice(typed="neither `student.model` nor `student.shape`", of_config=_is_factorized),
    "Kronecker student": Choice(
        typed="`student.method kronecker`",
        of_config=lambda run: _is_factorized(run) and run.student.method == "kronecker",
    ),
    "weighted start": Choice(
        typed="`student.factorize.weighting`",
        of_config=lambda run: run.student.factorize.weighting != "none",
    ),
    "calibration data": Choice(
        typed="`student.factorize.calibration.data`",
        of_config=lambda run: run.student.factorize.calibration.data is not None,
    ),
    "nothing measured": Choice(
        typed="neither `student.factorize.weighting` nor `student.init important`",
        of_config=lambda run: (
            run.student.factorize.weighting == "none"
            and run.student.model is None
            and not run.student.measures_importance
        ),
    ),
    "assistants": Choice(typed="`student.assistants`", of_config=lambda run: bool(run.student.assistants)),
    "adapters": Choice(typed="`student.lora.rank`", of_config=lambda run: run.student.lora.rank is not None),
    "few-bit student": Choice(
        typed="`student.quantize.weights`",
        of_config=lambda run: run.student.quantize.weights != "none",
    ),
    "given few-bit student": Choice(
        typed="a `student.model` with int8 or int4 weights",
        of_plan=lambda plan: plan.config.student.model is not None and bits_of(plan.models.student) is not None,
        detail=lambda plan: str(bits_of(plan.models.student)),
    ),
    "student with own masks": Choice(
        typed="a student whose masks transformers makes",
        of_plan=lambda plan: _own_masks(plan.models.student),
        detail=lambda plan: plan.models.student.model_type,
    ),
    "student without checkpointing": Choice(
        typed="a student that transformers cannot recompute",
        of_plan=lambda plan: not has_checkpointing(plan.models.student, plan.models.student_head),
        detail=lambda plan: plan.models.student.model_type,
    ),
    # The training
    "training": Choice(typed="every method but `none`", of_config=lambda run: METHODS[run.method].trains),
    "ZeRO-3": Choice(typed="ZeRO stage 3", of_plan=lambda plan: plan.zero_stage == 3),
    "compile": Choice(typed="`train.compile true`", of_config=lambda run: run.train.compile),
    "checkpointing": Choice(
        typed="`train.activation_checkpointing true`",
        of_config=lambda run: run.train.activation_checkpointing,
    ),
    "epochs": Choice(typed="`train.epochs`", of_config=lambda run: run.train.epochs is not None),
    "best kept": Choice(
        typed="`train.keep_best`",
        of_config=lambda run: run.train.keep_best is not None and METHODS[run.method].trains,
    ),
    "best score kept": Choice(
        typed="`train.keep_best score`",
        of_config=lambda run: run.train.keep_best == "score" and METHODS[run.method].trains,
    ),
}
"""The choices by the names that the rows of CLASHES have."""

_OF_INSTRUCTIONS = "data.{} is for instructions, but data.kind is {{data.kind}}: leave it out"
_NO_TEACHER = (
    "teacher.model is null, but method {methods} on {data.kind} needs a teacher: name one, or fine-tune on a task by "
    "method sft"
)
_GIVEN = "student.model is a student made before: leave student.shape and student.assistants out"
_MORE_THAN_TOKENS = "teacher.others ({others}): method {methods} compares more than tokens; take --method kd"
_MASKS = (
    "{} is true, but it needs masks of ours, and those of a {{second}} ({}.model) are left to transformers: set it to "
    "false"
)
_GATHERS = (
    "train.compile is true, but {} gathers parameters module by module, which a compiled layer hides: set "
    "train.compile to false, or shard less (ZeRO stage 2, a replicated teacher)"
)
_OF_VLLM = {
    "encoder": "vLLM gives log-probabilities of decoders alone",
    **dict.fromkeys(
        ("layers compared", "sequences compared", "no tokens compared"),
        "method {methods} needs more of its teacher than log-probabilities of tokens",
    ),
}

CLASHES: dict[tuple[str, str], str] = {
    # Of settings alone, in the order in which a run is told of them
    ("buckets", "text"): _OF_INSTRUCTIONS.format("bucket_steps"),
    ("buckets", "task"): _OF_INSTRUCTIONS.format("bucket_steps"),
    ("tests", "task"): _OF_INSTRUCTIONS.format("tests"),
    ("own answers", "no instructions"): _OF_INSTRUCTIONS.format("on_policy"),
    ("rollout", "no instructions"): _OF_INSTRUCTIONS.format("rollout"),
    ("streaming", "no instructions"): _OF_INSTRUCTIONS.format("streaming"),
    ("packing", "no instructions"): _OF_INSTRUCTIONS.format("packing"),
    ("prompt", "no instructions"): _OF_INSTRUCTIONS.format("prompt"),
    ("rollout server", "given answers"): (
        "data.rollout.url is {data.rollout.url}, but data.on_policy is 0: set it to the share of the steps in which "
        "the student writes the answers, such as 1, or leave the url out"
    ),
    ("packing", "own answers"): (
        "data.packing is true and data.on_policy {data.on_policy}: answers that the student writes itself are not "
        "packed, leave one of them out"
    ),
    ("streaming", "weighted files"): (
        "data.train {data.train} has weights, and data.streaming reads file after file: leave one of them out"
    ),
    ("epochs", "instructions"): (
        "train.epochs counts passes over a text, but data.kind is instructions: give train.steps"
    ),
    ("teacher on a server", "no teacher"): (
        "teacher.url is {teacher.url}, but teacher.model is null: name the server's model, and no cache"
    ),
    ("teacher on a server", "cached teacher"): (
        "teacher.url is {teacher.url}, but teacher.cache is {teacher.cache}: name the server's model, and no cache"
    ),
    ("teacher on a server", "several teachers"): (
        "teacher.url is {teacher.url}, but there is teacher.others too: leave one of them out"
    ),
    ("adapters", "Kronecker student"): (
        "student.lora.rank: adapters go on linears, and the Kronecker factors of student.method kronecker are none: "
        "leave it out to train all weights, or take student.method svd"
    ),
    ("few-bit student", "Kronecker student"): (
        "student.quantize.weights {student.quantize.weights}: torchao rounds linears, and Kronecker factors are none: "
        "take student.method svd"
    ),
    ("few-bit student", "adapters"): (
        "student.quantize.weights {student.quantize.weights} trains the weights as they round, and student.lora.rank "
        "{student.lora.rank} trains adapters instead of them: leave one of them out"
    ),
    ("given student", "shape"): _GIVEN,
    ("given student", "assistants"): _GIVEN,
    ("assistants", "factorized student"): ("student.assistants come before a student with a shape: give student.shape"),
    ("assistants", "sentences"): "student.assistants: assistants do not learn sentences (data.kind); leave them out",
    ("weighted start", "given student"): (
        "student.factorize.weighting is {student.factorize.weighting}, but student.model {student.model} is not "
        "factorized by this run: leave one of them out"
    ),
    ("weighted start", "shape"): (
        "student.factorize.weighting is {student.factorize.weighting}, but student.shape {student.shape} is not "
        "factorized by this run: leave one of them out"
    ),
    ("calibration data", "nothing measured"): (
        "student.factorize.calibration.data is {student.factorize.calibration.data}, but nothing is measured on it: "
        "give student.factorize.weighting, or set it to null"
    ),
    ("own answers", "learns given answers"): (
        "data.on_policy is {data.on_policy}, but method {config.method} learns from given answers: take one whose "
        "teacher judges the student's own ({judges}), or set data.on_policy to 0"
    ),
    ("rollout server", "few-bit student"): (
        "data.rollout.url is {data.rollout.url}, but student.quantize.weights is {student.quantize.weights}: vLLM "
        "cannot serve such a student, leave one of them out"
    ),
    ("no teacher", "no task"): _NO_TEACHER,
    ("no teacher", "learns from a teacher"): _NO_TEACHER,
    ("no teacher", "no given student"): ("teacher.model is null, so no student can be made of it: name student.model"),
    ("further methods", "labels alone"): (
        "also is {config.also}, but method {config.method} has no teacher: make one of them the method"
    ),
    ("assistants", "labels alone"): (
        "student.assistants teach, but method {config.method} has no teacher: leave them out"
    ),
    ("embedding", "no sentences"): (
        "method embedding compares embeddings of sentences, but data.kind is {data.kind}: set it to sentences"
    ),
    ("seqkd", "text"): "method seqkd learns answers, but data.kind is text: take kd, or instructions",
    ("searched layer", "no text"): (
        "minilmv2.teacher_layer auto searches on a text: set data.kind to text, or name a layer"
    ),
    ("searched layer", "no validation set"): (
        "minilmv2.teacher_layer auto scores its candidates on data.valid: name a text there"
    ),
    ("log_ratio", "given answers"): (
        "kd.divergence is log_ratio, but data.on_policy is 0: on given answers alone it is reverse_kl, take that one"
    ),
    ("log_ratio", "teacher on a server"): (
        "kd.divergence is log_ratio, but teacher.url gives the most likely tokens alone: run the teacher here"
    ),
    ("several teachers", "assistants"): (
        "teacher.others ({others}) cannot be joined with student.assistants: leave one of them out"
    ),
    ("best kept", "task"): (
        "train.keep_best is {train.keep_best}, but a task is scored only once, after the training: set null"
    ),
    ("best kept", "no validation set"): (
        "train.keep_best is {train.keep_best}, but there is no validation set: name one as data.valid, or set null"
    ),
    # Of what models and method are
    ("pairs of segments", "decoder"): (
        "data.text.pairs is true, but {plan.models.student.model_type} is a decoder: leave it out"
    ),
    ("bare teacher", "output compared"): (
        "teacher.model {teacher.model} is a {first} without language-model head, but {second} compare its output: give "
        "them the weight 0, or take a teacher with its head"
    ),
    ("best score kept", "no score"): (
        "train.keep_best is score, but data of the kind {data.kind} have only a validation loss: take loss"
    ),
    ("packing", "teacher with own masks"): _MASKS.format("data.packing", "teacher"),
    ("compile", "teacher with own masks"): _MASKS.format("train.compile", "teacher"),
    ("packing", "student with own masks"): _MASKS.format("data.packing", "student"),
    ("compile", "student with own masks"): _MASKS.format("train.compile", "student"),
    ("compile", "ZeRO-3"): _GATHERS.format("ds_config: zero_optimization.stage 3"),
    ("compile", "sharded teacher"): _GATHERS.format("{second}"),
    ("checkpointing", "student without checkpointing"): (
        "train.activation_checkpointing is true, but transformers has none for {second}: set it to false, and take a "
        "smaller train.micro_batch_size"
    ),
    ("several teachers", "layers compared"): _MORE_THAN_TOKENS,
    ("several teachers", "sequences compared"): _MORE_THAN_TOKENS,
    ("several teachers", "no tokens compared"): _MORE_THAN_TOKENS,
    ("several teachers", "another tokenizer"): (
        "teacher.others ({others}) cannot be joined with another tokenizer: leave one of them out"
    ),
    ("teachers of rows", "no instructions"): (
        "teacher.average is rows, but data.kind is {data.kind}: rows of instructions alone name teachers; take "
        "probabilities"
    ),
    ("given few-bit student", "training"): (
        "student.model {student.model} has {first} weights, which cannot be trained: give the student that it was made "
        "from, and student.quantize, or make its weights floats by `llmdistill export --to dense`"
    ),
    ("few-bit teacher", "sharded teacher"): "{first} cannot be sharded: take replicated",
    ("few-bit student", "ZeRO-3"): (
        "student.quantize.weights {student.quantize.weights}: the scales of a matrix need all of it, and ZeRO-3 keeps "
        "shares: take ZeRO-2, or none as weights"
    ),
    ("another tokenizer", "log_ratio"): (
        "kd.divergence is log_ratio, but {teacher.model} has another tokenizer than {student.model}: the probability "
        "of one token is compared, take another divergence"
    ),
    ("another tokenizer", "streaming"): (
        "data.streaming is true, but a teacher with another tokenizer needs all prompts before the training: set it to "
        "false, or take a student with the teacher's tokenizer"
    ),
    ("cached teacher", "no term of a teacher"): (
        "method {methods} has no teacher, so there is nothing to cache: take another method, such as kd"
    ),
    ("cached teacher", "changing examples"): (
        "a cache keeps one output of the teacher for each example, but {second}: train with the teacher itself "
        "(teacher.cache null)"
    ),
    ("cached teacher", "spans"): (
        "a cache keeps no outputs for spans ({data.task.name}): train with the teacher itself (teacher.cache null)"
    ),
    ("teacher on a server", "another tokenizer"): (
        "teacher.url {teacher.url}: a server is asked about the student's tokens, but teacher and student have "
        "different tokenizers: train with the teacher itself (teacher.url and teacher.top_k null)"
    ),
    **{
        ("teacher on a server", name): (
            f"teacher.url {{teacher.url}}: {why}; train with the teacher itself (teacher.url and teacher.top_k null)"
        )
        for name, why in _OF_VLLM.items()
    },
    **{("cache by vLLM", name): f"{why}; take --cache.engine hf" for name, why in _OF_VLLM.items()},
}
"""Two choices that a run cannot make together -> the sentence: why not, and what instead. The fields are of the run's
configuration and its plan; `first` and `second` are the details of the two choices."""


def excluded_choices() -> dict[str, list[str]]:
    """Return the choices that a run cannot combine with each choice, all as users type them, sorted."""
    excluded: dict[str, list[str]] = {}
    for first, second in CLASHES:
        excluded.setdefault(CHOICES[first].typed, []).append(CHOICES[second].typed)
    return {choice: list(dict.fromkeys(excluded[choice])) for choice in sorted(excluded)}


def as_text(width: int = 80) -> str:
    """Return `excluded_choices` as plain text, for the terminal."""
    lines = ["What does not go together; a run, a dry run and llmdistill doctor say why, and what instead."]
    for choice, others in excluded_choices().items():
        paragraph = f"not with {'; '.join(others)}".replace("`", "")
        lines += ["", choice.replace("`", ""), *wrap(paragraph, width, initial_indent="  ", subsequent_indent="    ")]
    return "\n".join(lines)


def check_settings(config: RunConfig) -> None:
    """Raise a UserError for two settings that do not go together, before any model is read."""
    for (first, second), sentence in CLASHES.items():
        of_first, of_second = CHOICES[first].of_config, CHOICES[second].of_config
        if of_first is not None and of_second is not None and of_first(config) and of_second(config):
            raise UserError(_format_sentence(sentence, config))


def check_choices(plan: Plan) -> None:
    """Raise a UserError if the models, the method or the data of a run do not go together; settings are checked."""
    for first, second in CLASHES:
        is_checked = None not in (CHOICES[first].of_config, CHOICES[second].of_config)
        obstacle = None if is_checked or not CHOICES[first].made_by(plan) else clash(plan, first, [second])
        if obstacle is not None:
            raise UserError(obstacle)


def clash(plan: Plan, choice: str, others: Collection[str] = CHOICES.keys()) -> str | None:
    """Return why a run cannot make a choice, whether it makes it or not, beside others; None if it can."""
    for (first, second), sentence in CLASHES.items():
        if first == choice and second in others and CHOICES[second].made_by(plan):
            details = {"first": CHOICES[first].detail(plan), "second": CHOICES[second].detail(plan)}
            return _format_sentence(sentence, plan.config, plan=plan, **details)
    return None


def _format_sentence(sentence: str, config: RunConfig, **more: Any) -> str:
    return sentence.format(
        **vars(config),
        config=config,
        methods=" + ".join(config.methods()),
        judges=" or ".join(name for name, method in METHODS.items() if method.on_policy),
        others=", ".join(config.teacher.others),
        **more,
    )
