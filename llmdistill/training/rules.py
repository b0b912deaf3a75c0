"""What goes with what: the choices of a run that cannot be combined, each pair with the sentence that says why."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Protocol

from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from llmdistill.config import RunConfig
from llmdistill.config.data import RolloutConfig
from llmdistill.config.teacher import key_of
from llmdistill.data.references import TEACHER, is_weighted, parts_of
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.models.configs import load_config
from llmdistill.models.families import has_own_masks
from llmdistill.models.load import has_checkpointing
from llmdistill.models.rounding import bits_of

if TYPE_CHECKING:  # the help shows the table without waiting for torch
    from transformers import PreTrainedConfig

    from llmdistill.methods import Method
    from llmdistill.tasks.base import Task
    from llmdistill.training.resolved import RunModels


class PlanFacts(Protocol):
    """What conditions read of a run's plan; see `training.plan.Plan`."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def models(self) -> RunModels: ...
    @property
    def method(self) -> Method: ...
    @property
    def task(self) -> Task: ...
    @property
    def zero_stage(self) -> int: ...
    @property
    def teacher_plan(self) -> PlanFacts | None: ...


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What can be true of a run: the value of a setting, or a property that its models, method or data have."""

    typed: str
    """What users type, or what their models or data are, for the table of docs/train.md."""
    of_config: Callable[[RunConfig], bool] | None = None
    """Whether it holds, if the settings of a run alone tell."""
    of_plan: Callable[[PlanFacts], bool] | None = None
    """The same where the plan is known, with its models and method. A condition may have both: `of_config` then counts
    in pairs whose other condition has it too, and this one in all other pairs."""
    detail: Callable[[PlanFacts], str] = lambda plan: ""
    """What a sentence about a plan says of it, such as the type of the model."""

    def holds(self, plan: PlanFacts) -> bool:
        """Whether it holds for the run of a plan."""
        if self.of_plan is not None:
            return self.of_plan(plan)
        assert self.of_config is not None
        return self.of_config(plan.config)


def _is_bare(plan: PlanFacts) -> bool:
    """Whether the teacher's config names an encoder without head, where the task brings none either."""
    models = plan.models
    bare = MODEL_MAPPING_NAMES.get(models.teacher.model_type, "")  # several of Funnel
    is_bare = (models.teacher.architectures or [""])[0] in ({bare} if isinstance(bare, str) else bare)
    return is_bare and not models.causal and plan.teacher_plan is None and plan.task.head is None


def _is_pivoted(student: PreTrainedConfig) -> bool:
    """Whether the config of a student, saved or planned, names pivoted factors."""
    saved = getattr(student, "quantization_config", None) or {}
    return (saved if isinstance(saved, dict) else saved.to_dict()).get("method") == "pivoted"


def _list_sharded(config: RunConfig) -> list[str]:
    """The settings that shard teachers, as typed."""
    everyone = config.teacher.everyone.items()
    return [f"{key_of(name)}.sharding {one.sharding}" for name, one in everyone if one.is_sharded]


def _list_sharded_few_bits(plan: PlanFacts) -> list[str]:
    """The settings that shard a teacher of few bits, with its bits and its name."""
    listed = []
    for name, settings in plan.config.teacher.everyone.items():
        teacher = plan.models.teachers.get(name)
        if teacher is not None and settings.is_sharded and plan.method.needs_teacher:
            bits = bits_of(load_config(teacher.path) if name else plan.models.teacher)
            if settings.quantize != "none":
                bits = settings.quantize
            sharding = f"{key_of(name)}.sharding {settings.sharding}"
            listed += [] if bits is None else [f"{sharding}: the {bits} weights of {settings.model}"]
    return listed


# The teacher
NO_TEACHER = Condition(typed="`teacher.model null`", of_config=lambda run: run.teacher.model is None)
CACHED_TEACHER = Condition(
    typed="`teacher.cache`",
    of_config=lambda run: run.teacher.cache is not None,
    of_plan=lambda plan: plan.method.needs_teacher and any(one.settings.cache for one in plan.models.teachers.values()),
)
TEACHER_ON_A_SERVER = Condition(
    typed="`teacher.url`",
    of_config=lambda run: run.teacher.url is not None,
    of_plan=lambda plan: plan.config.teacher.url is not None and plan.method.needs_teacher,
)
TEACHER_OF_A_PACKAGE = Condition(
    typed="`teacher.source`",
    of_config=lambda run: run.teacher.source is not None,
)
CACHE_BY_VLLM = Condition(typed="`--cache.engine vllm`", of_config=lambda run: False)  # a command asks, see `clash`
SEVERAL_TEACHERS = Condition(
    typed="`teacher.others`",
    of_config=lambda run: bool(run.teacher.others),
    of_plan=lambda plan: len(plan.models.teachers) > 1,
)
TEACHERS_OF_ROWS = Condition(
    typed="`teacher.average rows`",
    of_plan=lambda plan: len(plan.models.teachers) > 1 and plan.config.teacher.average == "rows",
)
ANOTHER_TOKENIZER = Condition(
    typed="a teacher with another tokenizer",
    of_plan=lambda plan: plan.models.translates,
)
SHARDED_TEACHER = Condition(
    typed="`teacher.sharding zero3`, `node` or `tensor`",
    of_plan=lambda plan: bool(_list_sharded(plan.config)),
    detail=lambda plan: _list_sharded(plan.config)[0],
)
TENSOR_PARALLEL_TEACHER = Condition(
    typed="`teacher.sharding tensor`",
    of_plan=lambda plan: "tensor" in [one.sharding for one in plan.config.teacher.everyone.values()],
)
FEW_BIT_TEACHER = Condition(
    typed="a teacher with int8 or int4 weights, or `teacher.quantize`",
    of_plan=lambda plan: bool(_list_sharded_few_bits(plan)),  # of several, one may be sharded and another of few bits
    detail=lambda plan: _list_sharded_few_bits(plan)[0],
)
ROUNDED_TEACHER = Condition(
    typed="`teacher.quantize`",
    of_config=lambda run: any(one.quantize != "none" for one in run.teacher.everyone.values()),
)
BARE_TEACHER = Condition(
    typed="an encoder without language-model head as teacher",
    of_plan=_is_bare,
    detail=lambda plan: str((plan.models.teacher.architectures or [""])[0]),
)
TEACHER_WITH_OWN_MASKS = Condition(
    typed="a teacher that makes its own attention mask",
    of_plan=lambda plan: plan.method.needs_teacher and has_own_masks(plan.models.teacher),
    detail=lambda plan: plan.models.teacher.model_type,
)

# The method
LABELS_ALONE = Condition(
    typed="`method sft`, `seqkd` or `none`",
    of_config=lambda run: not METHODS[run.method].needs_teacher,
)
NO_TERM_OF_A_TEACHER = Condition(
    typed="methods whose terms need no teacher",
    of_plan=lambda plan: not plan.method.needs_teacher,
)
LEARNS_FROM_A_TEACHER = Condition(
    typed="every method but `sft`, `seqkd` and `none`",
    of_config=lambda run: any(METHODS[name].needs_teacher for name in run.methods()),
)
NOTHING_TRAINED = Condition(typed="`method none`", of_config=lambda run: not METHODS[run.method].trains)
FURTHER_METHODS = Condition(typed="`also`", of_config=lambda run: bool(run.also))
SEQKD = Condition(typed="`method seqkd`", of_config=lambda run: run.method == "seqkd")
EMBEDDING = Condition(typed="`method embedding`", of_config=lambda run: "embedding" in run.methods())
LOG_RATIO = Condition(
    typed="`kd.divergence log_ratio`",
    of_config=lambda run: run.has("kd", divergence="log_ratio"),
)
SEARCHED_LAYER = Condition(
    typed="`minilmv2.teacher_layer auto`",
    of_config=lambda run: run.has("minilmv2", teacher_layer="auto"),
)
LAYERS_COMPARED = Condition(
    typed="methods that compare inner tensors, such as `makd` and `minilm`",
    of_plan=lambda plan: bool(plan.method.teacher_taps),
)
SEQUENCES_COMPARED = Condition(
    typed="methods that compare classes, spans or embeddings",
    of_plan=lambda plan: any(term.needs_teacher for term in plan.method.sequence_terms),
)
NO_TOKENS_COMPARED = Condition(
    typed="methods that do not compare tokens",
    of_plan=lambda plan: not plan.method.teacher_positions,
)
OUTPUT_COMPARED = Condition(
    typed="methods that compare tokens or classes",
    of_plan=lambda plan: bool(plan.method.compared_outputs),
    detail=lambda plan: ", ".join(plan.method.compared_outputs),
)

# The data
INSTRUCTIONS = Condition(typed="`data.kind instructions`", of_config=lambda run: run.data.kind == "instructions")
TEXT = Condition(typed="`data.kind text`", of_config=lambda run: run.data.kind == "text")
SENTENCES = Condition(typed="`data.kind sentences`", of_config=lambda run: run.data.kind == "sentences")
TASK = Condition(typed="`data.kind task`", of_config=lambda run: run.data.kind == "task")
NOT_INSTRUCTIONS = Condition(
    typed="`data.kind text`, `sentences` or `task`",
    of_config=lambda run: run.data.kind != "instructions",
)
NOT_SENTENCES = Condition(
    typed="`data.kind instructions`, `text` or `task`",
    of_config=lambda run: run.data.kind != "sentences",
)
NOT_TEXT = Condition(
    typed="`data.kind instructions`, `sentences` or `task`",
    of_config=lambda run: run.data.kind != "text",
)
NOT_TASK = Condition(
    typed="`data.kind instructions`, `text` or `sentences`",
    of_config=lambda run: run.data.kind != "task",
)
PER_TOKEN_HEAD = Condition(
    typed="tasks whose head has an output for each token, such as `squad1` and `mlqa`",
    of_plan=lambda plan: plan.models.objective.targets is not None and plan.models.objective.targets.is_per_token,
)
CHANGING_EXAMPLES = Condition(
    typed="`data.streaming`, `data.on_policy`, texts of encoders, written texts",
    of_plan=lambda plan: plan.task.changing_examples(causal=plan.models.causal) is not None,
    detail=lambda plan: str(plan.task.changing_examples(causal=plan.models.causal)),
)
NO_SCORE = Condition(
    typed="data of which only a validation loss is measured",
    of_plan=lambda plan: plan.task.validation_metric is None,
)
ENCODER = Condition(typed="encoders", of_plan=lambda plan: not plan.models.causal)
DECODER = Condition(typed="decoders", of_plan=lambda plan: plan.models.causal)
PAIRS_OF_SEGMENTS = Condition(
    typed="`data.text.pairs true`",
    of_config=lambda run: run.data.kind == "text" and bool(run.data.text.pairs),
)
WEIGHTED_FILES = Condition(
    typed="weights in `data.train`",
    of_config=lambda run: run.data.kind == "instructions" and is_weighted(run.data.train),
)
TEACHER_WRITES = Condition(
    typed="`data.train teacher`",
    of_config=lambda run: run.data.kind != "task" and TEACHER in [part.reference for part in parts_of(run.data.train)],
)
STREAMING = Condition(typed="`data.streaming true`", of_config=lambda run: run.data.streaming)
PACKING = Condition(typed="`data.packing true`", of_config=lambda run: run.data.packing)
HELD_OUT = Condition(typed="`data.held_out` over 0", of_config=lambda run: (run.data.held_out or 0) > 0)
PROMPT = Condition(typed="`data.prompt`", of_config=lambda run: run.data.prompt is not None)
TESTS = Condition(typed="`data.tests`", of_config=lambda run: bool(run.data.tests))
BUCKETS = Condition(typed="`data.bucket_steps` over 1", of_config=lambda run: run.data.bucket_steps != 1)
OWN_ANSWERS = Condition(typed="`data.on_policy` over 0", of_config=lambda run: run.data.on_policy > 0)
GIVEN_ANSWERS = Condition(typed="`data.on_policy 0`", of_config=lambda run: run.data.on_policy == 0)
ROLLOUT = Condition(typed="`data.rollout`", of_config=lambda run: run.data.rollout != RolloutConfig())
ROLLOUT_SERVER = Condition(typed="`data.rollout.url`", of_config=lambda run: run.data.rollout.url is not None)
NO_VALIDATION_SET = Condition(typed="no `data.valid`", of_config=lambda run: run.data.valid is None)

# The student
GIVEN_STUDENT = Condition(typed="`student.model`", of_config=lambda run: run.student.model is not None)
NO_GIVEN_STUDENT = Condition(typed="no `student.model`", of_config=lambda run: run.student.model is None)
SHAPE = Condition(typed="`student.shape`", of_config=lambda run: run.student.shape is not None)
FACTORIZED_STUDENT = Condition(
    typed="neither `student.model` nor `student.shape`", of_config=lambda run: run.student.is_factorized
)
KRONECKER_STUDENT = Condition(
    typed="`student.method kronecker`",
    of_config=lambda run: run.student.is_factorized and run.student.method == "kronecker",
)
WEIGHTED_START = Condition(
    typed="`student.factorize.weighting`",
    of_config=lambda run: run.student.factorize.is_weighted,
)
CALIBRATION_DATA = Condition(
    typed="`student.factorize.calibration.data`",
    of_config=lambda run: run.student.factorize.calibration.data is not None,
)
NOTHING_MEASURED = Condition(
    typed="neither `student.factorize.weighting` nor `student.init important`",
    of_config=lambda run: (
        not (run.student.factorize.is_weighted or run.student.weighs_by_default)
        and run.student.model is None
        and not run.student.measures_importance
    ),
)
ASSISTANTS = Condition(typed="`student.assistants`", of_config=lambda run: bool(run.student.assistants))
ADAPTERS = Condition(typed="`student.lora.rank`", of_config=lambda run: run.student.lora.rank is not None)
FEW_BIT_STUDENT = Condition(
    typed="`student.quantize.weights`",
    of_config=lambda run: run.student.quantize.weights != "none",
)
GIVEN_FEW_BIT_STUDENT = Condition(
    typed="a `student.model` with int8 or int4 weights",
    of_plan=lambda plan: plan.config.student.model is not None and bits_of(plan.models.student) is not None,
    detail=lambda plan: str(bits_of(plan.models.student)),
)
INT4_STUDENT = Condition(
    typed="`student.quantize.weights int4`",
    of_config=lambda run: run.student.quantize.weights == "int4",
)
PIVOTED_STUDENT = Condition(
    typed="a student with pivoted factors", of_plan=lambda plan: _is_pivoted(plan.models.student)
)
STUDENT_WITH_OWN_MASKS = Condition(
    typed="a student that makes its own attention mask",
    of_plan=lambda plan: has_own_masks(plan.models.student),
    detail=lambda plan: plan.models.student.model_type,
)
STUDENT_WITHOUT_CHECKPOINTING = Condition(
    typed="a student that transformers cannot recompute",
    of_plan=lambda plan: not has_checkpointing(plan.models.student, plan.models.student_head),
    detail=lambda plan: plan.models.student.model_type,
)

# The training
TRAINING = Condition(typed="every method but `none`", of_config=lambda run: METHODS[run.method].trains)
ZERO_3 = Condition(typed="ZeRO stage 3", of_plan=lambda plan: plan.zero_stage == 3)
COMPILE = Condition(typed="`train.compile true`", of_config=lambda run: run.train.compile is True)
LIGER = Condition(typed="`train.liger true`", of_config=lambda run: run.train.liger is True)
CHECKPOINTING = Condition(
    typed="`train.activation_checkpointing true`",
    of_config=lambda run: run.train.activation_checkpointing,
)
SECOND_STAGE = Condition(typed="`tasks.names`", of_config=lambda run: bool(run.tasks.names))
EPOCHS = Condition(typed="`train.epochs`", of_config=lambda run: run.train.epochs is not None)
BEST_KEPT = Condition(
    typed="`train.keep_best`",
    of_config=lambda run: run.train.keep_best is not None and METHODS[run.method].trains,
)
BEST_SCORE_KEPT = Condition(
    typed="`train.keep_best score`",
    of_config=lambda run: run.train.keep_best == "score" and METHODS[run.method].trains,
)


_OF_INSTRUCTIONS = "data.{} is for instructions, but data.kind is {{data.kind}}: leave it out"
_TEACHER_MISSING = (
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
    ENCODER: "vLLM gives log-probabilities of decoders alone",
    **dict.fromkeys(
        (LAYERS_COMPARED, SEQUENCES_COMPARED, NO_TOKENS_COMPARED),
        "method {methods} needs more of its teacher than log-probabilities of tokens",
    ),
}

CLASHES: dict[tuple[Condition, Condition], str] = {
    # Of settings alone, in the order in which a run is told of them
    (BUCKETS, TEXT): _OF_INSTRUCTIONS.format("bucket_steps"),
    (BUCKETS, TASK): _OF_INSTRUCTIONS.format("bucket_steps"),
    (TESTS, TASK): _OF_INSTRUCTIONS.format("tests"),
    (OWN_ANSWERS, NOT_INSTRUCTIONS): _OF_INSTRUCTIONS.format("on_policy"),
    (ROLLOUT, NOT_INSTRUCTIONS): _OF_INSTRUCTIONS.format("rollout"),
    (STREAMING, NOT_INSTRUCTIONS): _OF_INSTRUCTIONS.format("streaming"),
    (PACKING, NOT_INSTRUCTIONS): _OF_INSTRUCTIONS.format("packing"),
    (HELD_OUT, NOT_INSTRUCTIONS): _OF_INSTRUCTIONS.format("held_out"),
    (HELD_OUT, STREAMING): (
        "data.held_out is {data.held_out:g}, but the rows of a streamed set are not known in advance: set it to 0 and "
        "give a data.valid, or leave data.streaming out"
    ),
    (PROMPT, NOT_INSTRUCTIONS): _OF_INSTRUCTIONS.format("prompt"),
    (ROLLOUT_SERVER, GIVEN_ANSWERS): (
        "data.rollout.url is {data.rollout.url}, but data.on_policy is 0: set it to the share of the steps in which "
        "the student writes the answers, such as 1, or leave the url out"
    ),
    (PACKING, OWN_ANSWERS): (
        "data.packing is true and data.on_policy {data.on_policy}: answers that the student writes itself are not "
        "packed, leave one of them out"
    ),
    (STREAMING, WEIGHTED_FILES): (
        "data.train {data.train} has weights, and data.streaming reads file after file: leave one of them out"
    ),
    (TEACHER_WRITES, NO_TEACHER): (
        "data.train {data.train} is written by the teacher, but teacher.model is null: name one, or give data"
    ),
    (TEACHER_WRITES, SENTENCES): (
        "data.train {data.train}: a teacher writes chats and texts, but data.kind is sentences: give sentences"
    ),
    (TEACHER_WRITES, TEACHER_ON_A_SERVER): (
        "data.train {data.train}, but teacher.url is {teacher.url}, and the teacher writes where it runs: "
        "write them where the model is by `llmdistill write`, and name that file"
    ),
    (EPOCHS, INSTRUCTIONS): ("train.epochs counts passes over a text, but data.kind is instructions: give train.steps"),
    (TEACHER_ON_A_SERVER, NO_TEACHER): (
        "teacher.url is {teacher.url}, but teacher.model is null: name the server's model, and no cache"
    ),
    (TEACHER_ON_A_SERVER, CACHED_TEACHER): (
        "teacher.url is {teacher.url}, but teacher.cache is {teacher.cache}: name the server's model, and no cache"
    ),
    (TEACHER_ON_A_SERVER, SEVERAL_TEACHERS): (
        "teacher.url is {teacher.url}, but there is teacher.others too: leave one of them out"
    ),
    **{
        (TEACHER_OF_A_PACKAGE, condition): (
            f"teacher.source is {{teacher.source}}, but there is {key} too: leave one of them out"
        )
        for condition, key in {
            CACHED_TEACHER: "teacher.cache",
            TEACHER_ON_A_SERVER: "teacher.url",
            SEVERAL_TEACHERS: "teacher.others",
        }.items()
    },
    (ADAPTERS, KRONECKER_STUDENT): (
        "student.lora.rank: adapters go on linears, and the Kronecker factors of student.method kronecker are none: "
        "leave it out to train all weights, or take student.method svd"
    ),
    (FEW_BIT_STUDENT, KRONECKER_STUDENT): (
        "student.quantize.weights {student.quantize.weights}: torchao rounds linears, and Kronecker factors are none: "
        "take student.method svd"
    ),
    # The coefficients amplify what is lost of the pivots; see `FewBits.needs_plain_factors`.
    (INT4_STUDENT, PIVOTED_STUDENT): (
        "student.quantize.weights int4: pivoted factors do not survive four bits: take int8, or student.factorize.form "
        "plain; a student.model that has them can learn in int4 after `llmdistill export --to dense`"
    ),
    (FEW_BIT_STUDENT, ADAPTERS): (
        "student.quantize.weights {student.quantize.weights} trains the weights as they round, and student.lora.rank "
        "{student.lora.rank} trains adapters instead of them: leave one of them out"
    ),
    (GIVEN_STUDENT, SHAPE): _GIVEN,
    (GIVEN_STUDENT, ASSISTANTS): _GIVEN,
    (ASSISTANTS, FACTORIZED_STUDENT): ("student.assistants come before a student with a shape: give student.shape"),
    (ASSISTANTS, SENTENCES): "student.assistants: assistants do not learn sentences (data.kind); leave them out",
    (WEIGHTED_START, GIVEN_STUDENT): (
        "student.factorize.weighting is {student.factorize.weighting}, but student.model {student.model} is not "
        "factorized by this run: leave one of them out"
    ),
    (WEIGHTED_START, SHAPE): (
        "student.factorize.weighting is {student.factorize.weighting}, but student.shape {student.shape} is not "
        "factorized by this run: leave one of them out"
    ),
    (CALIBRATION_DATA, NOTHING_MEASURED): (
        "student.factorize.calibration.data is {student.factorize.calibration.data}, but nothing is measured on it: "
        "give student.factorize.weighting, or set it to null"
    ),
    (OWN_ANSWERS, LABELS_ALONE): (
        "data.on_policy is {data.on_policy}, but method {config.method} learns from given answers: take one whose "
        "teacher judges the student's own, such as kd, or set data.on_policy to 0"
    ),
    (ROLLOUT_SERVER, FEW_BIT_STUDENT): (
        "data.rollout.url is {data.rollout.url}, but student.quantize.weights is {student.quantize.weights}: vLLM "
        "cannot serve such a student, leave one of them out"
    ),
    (NO_TEACHER, NOT_TASK): _TEACHER_MISSING,
    (NO_TEACHER, LEARNS_FROM_A_TEACHER): _TEACHER_MISSING,
    (NO_TEACHER, NO_GIVEN_STUDENT): ("teacher.model is null, so no student can be made of it: name student.model"),
    (FURTHER_METHODS, LABELS_ALONE): (
        "also is {config.also}, but method {config.method} has no teacher: make one of them the method"
    ),
    (ASSISTANTS, LABELS_ALONE): ("student.assistants teach, but method {config.method} has no teacher: leave them out"),
    (SECOND_STAGE, NOTHING_TRAINED): (
        "tasks.names is {tasks.names}, but method {config.method} trains no student for a second stage: take another "
        "method, or fine-tune a model by eval/glue.py"
    ),
    (EMBEDDING, NOT_SENTENCES): (
        "method embedding compares embeddings of sentences, but data.kind is {data.kind}: set it to sentences"
    ),
    (SEQKD, TEXT): "method seqkd learns answers, but data.kind is text: take kd, or instructions",
    (SEARCHED_LAYER, NOT_TEXT): (
        "minilmv2.teacher_layer auto searches on a text: set data.kind to text, or name a layer"
    ),
    (SEARCHED_LAYER, NO_VALIDATION_SET): (
        "minilmv2.teacher_layer auto scores its candidates on data.valid: name a text there"
    ),
    (LOG_RATIO, GIVEN_ANSWERS): (
        "kd.divergence is log_ratio, but data.on_policy is 0: on given answers alone it is reverse_kl, take that one"
    ),
    (LOG_RATIO, TEACHER_ON_A_SERVER): (
        "kd.divergence is log_ratio, but teacher.url gives the most likely tokens alone: run the teacher here"
    ),
    (SEVERAL_TEACHERS, ASSISTANTS): (
        "teacher.others ({others}) cannot be joined with student.assistants: leave one of them out"
    ),
    (BEST_KEPT, TASK): (
        "train.keep_best is {train.keep_best}, but a task is scored only once, after the training: set null"
    ),
    (BEST_KEPT, NO_VALIDATION_SET): (
        "train.keep_best is {train.keep_best}, but there is no validation set: name one as data.valid, or set null"
    ),
    # Of what models and method are
    (PAIRS_OF_SEGMENTS, DECODER): (
        "data.text.pairs is true, but {plan.models.student.model_type} is a decoder: leave it out"
    ),
    (BARE_TEACHER, OUTPUT_COMPARED): (
        "teacher.model {teacher.model} is a {first} without language-model head, but {second} compare its output: give "
        "them the weight 0, or take a teacher with its head"
    ),
    (BEST_SCORE_KEPT, NO_SCORE): (
        "train.keep_best is score, but data of the kind {data.kind} have only a validation loss: take loss"
    ),
    (PACKING, TEACHER_WITH_OWN_MASKS): _MASKS.format("data.packing", "teacher"),
    (COMPILE, TEACHER_WITH_OWN_MASKS): _MASKS.format("train.compile", "teacher"),
    (PACKING, STUDENT_WITH_OWN_MASKS): _MASKS.format("data.packing", "student"),
    (COMPILE, STUDENT_WITH_OWN_MASKS): _MASKS.format("train.compile", "student"),
    (COMPILE, ZERO_3): _GATHERS.format("ds_config: zero_optimization.stage 3"),
    (COMPILE, SHARDED_TEACHER): _GATHERS.format("{second}"),
    (COMPILE, LIGER): (
        "train.compile and train.liger are both true, but compiled layers cannot run Liger's kernels: set one to false"
    ),
    (CHECKPOINTING, STUDENT_WITHOUT_CHECKPOINTING): (
        "train.activation_checkpointing is true, but transformers has none for {second}: set it to false, and take a "
        "smaller train.micro_batch_size"
    ),
    (SEVERAL_TEACHERS, LAYERS_COMPARED): _MORE_THAN_TOKENS,
    (SEVERAL_TEACHERS, SEQUENCES_COMPARED): _MORE_THAN_TOKENS,
    (SEVERAL_TEACHERS, NO_TOKENS_COMPARED): _MORE_THAN_TOKENS,
    (SEVERAL_TEACHERS, ANOTHER_TOKENIZER): (
        "teacher.others ({others}) cannot be joined with another tokenizer: leave one of them out"
    ),
    (TEACHERS_OF_ROWS, NOT_INSTRUCTIONS): (
        "teacher.average is rows, but data.kind is {data.kind}: rows of instructions alone name teachers; take "
        "probabilities"
    ),
    (GIVEN_FEW_BIT_STUDENT, TRAINING): (
        "student.model {student.model} has {first} weights, which cannot be trained: give the student that it was made "
        "from, and student.quantize, or make its weights floats by `llmdistill export --to dense`"
    ),
    **{
        (TENSOR_PARALLEL_TEACHER, name): (
            f"teacher.sharding tensor: {why}; take teacher.sharding node, which shares a teacher among the same ranks"
        )
        for name, why in {
            LAYERS_COMPARED: "a rank has only some of the heads and features that method {methods} compares",
            SEQUENCES_COMPARED: "method {methods} compares more than tokens",
            SEVERAL_TEACHERS: "it is for one teacher",
            ANOTHER_TOKENIZER: "it is for a teacher with the student's tokenizer",
        }.items()
    },
    (FEW_BIT_TEACHER, SHARDED_TEACHER): "{first} cannot be sharded: take replicated",
    (FEW_BIT_STUDENT, ZERO_3): (
        "student.quantize.weights {student.quantize.weights}: the scales of a matrix need all of it, and ZeRO-3 keeps "
        "shares: take ZeRO-2, or none as weights"
    ),
    (TEACHER_WRITES, ENCODER): (
        "data.train {data.train} is written by the teacher, but {teacher.model} is an encoder: give data"
    ),
    (TEACHER_WRITES, SHARDED_TEACHER): (
        "data.train {data.train}, but {second}, and a teacher writes unsharded: write the data by `llmdistill write`, "
        "which vLLM spreads over the GPUs, and name that file"
    ),
    (ANOTHER_TOKENIZER, LOG_RATIO): (
        "kd.divergence is log_ratio, but {teacher.model} has another tokenizer than {student.model}: the probability "
        "of one token is compared, take another divergence"
    ),
    (ANOTHER_TOKENIZER, STREAMING): (
        "data.streaming is true, but a teacher with another tokenizer needs all prompts before the training: set it to "
        "false, or take a student with the teacher's tokenizer"
    ),
    (CACHED_TEACHER, NO_TERM_OF_A_TEACHER): (
        "method {methods} has no teacher, so there is nothing to cache: take another method, such as kd"
    ),
    (CACHED_TEACHER, ROUNDED_TEACHER): (
        "teacher.quantize rounds a teacher that runs in the steps, and a cache keeps the outputs of the exact one: "
        "leave teacher.quantize out"
    ),
    (TEACHER_ON_A_SERVER, ROUNDED_TEACHER): (
        "teacher.quantize rounds a teacher that runs here, but the server of teacher.url {teacher.url} runs it: leave "
        "teacher.quantize out, and let the server round it"
    ),
    (CACHED_TEACHER, CHANGING_EXAMPLES): (
        "a cache keeps one output of the teacher for each example, but {second}: train with the teacher itself "
        "(teacher.cache null)"
    ),
    (CACHED_TEACHER, PER_TOKEN_HEAD): (
        "a cache keeps no outputs with a place for each token ({data.task.name}): train with the teacher itself "
        "(teacher.cache null)"
    ),
    (TEACHER_ON_A_SERVER, ANOTHER_TOKENIZER): (
        "teacher.url {teacher.url}: a server is asked about the student's tokens, but teacher and student have "
        "different tokenizers: train with the teacher itself (teacher.url and teacher.top_k null)"
    ),
    **{
        (TEACHER_ON_A_SERVER, name): (
            f"teacher.url {{teacher.url}}: {why}; train with the teacher itself (teacher.url and teacher.top_k null)"
        )
        for name, why in _OF_VLLM.items()
    },
    **{(CACHE_BY_VLLM, name): f"{why}; take --cache.engine hf" for name, why in _OF_VLLM.items()},
}
"""Two conditions that cannot both hold -> the sentence: why not, and what instead. The fields are of the run's
configuration and its plan; `first` and `second` are the details of the two."""


NOT_FORECAST = {
    ASSISTANTS: "the assistants before the student (student.assistants)",
    SEVERAL_TEACHERS: "the teachers beside teacher.model (teacher.others)",
    OWN_ANSWERS: "the student's own answers (data.on_policy)",
    TEACHER_WRITES: "what the teacher writes before the training (data.train teacher)",
    ROUNDED_TEACHER: "the memory that teacher.quantize saves",
}
"""What a forecast of memory and time leaves out, where these conditions hold."""


def list_excluded() -> dict[str, list[str]]:
    """Return the choices that a run cannot combine with each choice, all as users type them, sorted."""
    excluded: dict[str, list[str]] = {}
    for first, second in CLASHES:
        excluded.setdefault(first.typed, []).append(second.typed)
    return {choice: list(dict.fromkeys(excluded[choice])) for choice in sorted(excluded)}


def as_text(width: int = 80) -> str:
    """Return `list_excluded` as plain text, for the terminal."""
    lines = ["What does not go together; a run, a dry run and llmdistill doctor say why, and what instead."]
    lines += ["Each pair stands once, under one of the two."]
    for choice, others in list_excluded().items():
        paragraph = f"not with {'; '.join(others)}".replace("`", "")
        lines += ["", choice.replace("`", ""), *wrap(paragraph, width, initial_indent="  ", subsequent_indent="    ")]
    return "\n".join(lines)


def check_settings(config: RunConfig) -> None:
    """Raise a UserError for two settings that do not go together, before any model is read."""
    for (first, second), sentence in CLASHES.items():
        of_first, of_second = first.of_config, second.of_config
        if of_first is not None and of_second is not None and of_first(config) and of_second(config):
            raise UserError(_format_sentence(sentence, config))


def check_conditions(plan: PlanFacts) -> None:
    """Raise a UserError if the models, the method or the data of a run do not go together; settings are checked."""
    obstacle = find_obstacle(plan)
    if obstacle is not None:
        raise UserError(obstacle)


def find_obstacle(plan: PlanFacts) -> str | None:
    """Return why two choices of a run do not go together, and what instead; None if all do."""
    for (first, second), sentence in CLASHES.items():
        of_first, of_second = first.of_config, second.of_config
        if of_first is not None and of_second is not None:
            holds = of_first(plan.config) and of_second(plan.config)
        else:
            holds = first.holds(plan) and second.holds(plan)
        if holds:
            return _sentence_of_pair(sentence, plan, first, second)
    return None


def clash(plan: PlanFacts, condition: Condition, others: Collection[Condition] | None = None) -> str | None:
    """Return why a condition, whether it holds or not, cannot be joined with others of a run; None if it can.

    `others` are by default all that hold.
    """
    for (first, second), sentence in CLASHES.items():
        # Only pairs that begin with this condition are about it: a server may fill a cache, though no run reads both.
        if first is condition and (others is None or second in others) and second.holds(plan):
            return _sentence_of_pair(sentence, plan, first, second)
    return None


def _sentence_of_pair(sentence: str, plan: PlanFacts, first: Condition, second: Condition) -> str:
    details = {"first": first.detail(plan), "second": second.detail(plan)}
    return _format_sentence(sentence, plan.config, plan=plan, **details)


def _format_sentence(sentence: str, config: RunConfig, **more: Any) -> str:
    return sentence.format(
        **vars(config),
        config=config,
        methods=" + ".join(config.methods()),
        others=", ".join(config.teacher.others),
        **more,
    )
