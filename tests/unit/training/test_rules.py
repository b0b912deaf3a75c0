"""The table of what goes with what: every pair of choices makes a dry run, or is refused by a sentence of the table."""

import itertools
import json
import random
import re
import runpy
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from byte_tokenizers import byte_level
from glue_tasks import TOKENS, write_task, write_text
from pages import ROOT
from question_files import question, write_file
from transformers import AutoConfig, BertConfig
from word_models import save_tokenizer

from llmdistill.config import RunConfig
from llmdistill.config.command_line import build, run_parser
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.teachers.choice import TEACHERS, TeacherSource
from llmdistill.training import rules
from llmdistill.training.plan import make_plans
from llmdistill.training.rules import CLASHES, Condition, clash

from support import write_rows

DATA: dict[str, dict[str, Any]] = {
    "instructions": {},
    "text of a decoder": {"data.kind": "text", "data.train": "{text}"},
    "text of an encoder": {"data.kind": "text", "data.train": "{text}", "teacher.model": "{encoder}"},
    "sentences": {
        "data.kind": "sentences", "data.train": "{text}", "teacher.model": "{sentences}", "method": "embedding",
    },
    "classes": {
        "data.kind": "task", "data.task.name": "rte", "data.task.dir": "{glue}", "teacher.model": "{classes}",
    },
    "spans": {
        "data.kind": "task", "data.task.name": "squad1", "data.task.dir": "{questions}", "teacher.model": "{spans}",
    },
    "written texts": {
        "data.kind": "task", "data.task.name": "summarization", "data.task.dir": "{writing}",
        "teacher.model": "{encoder}", "data.task.writing.max_length": 3,
    },
}  # fmt: skip
"""Data, each with a teacher that it takes. Settings of a choice replace the teacher and the method."""

CHOSEN: dict[str, dict[str, Any]] = {
    "no teacher": {"teacher.model": None},
    "cache": {"teacher.cache": "{cache}"},
    "server": {"teacher.url": "http://localhost:9", "teacher.top_k": 5, "data.max_length": 400},
    "source of a package": {"teacher.source": "wise"},
    "several": {"teacher.others.b.model": "{teacher}"},
    "rows": {"teacher.others.b.model": "{teacher}", "teacher.average": "rows"},
    "another tokenizer": {"teacher.model": "{decoder}", "student.model": "{other}"},
    "sharded": {"teacher.sharding": "zero3"},
    "one of several sharded": {"teacher.others.b.model": "{teacher}", "teacher.others.b.sharding": "zero3"},
    "cut teacher": {"teacher.sharding": "tensor"},
    "few-bit teacher": {"teacher.model": "{bits}"},
    "rounded teacher": {"teacher.quantize": "int8"},
    "own masks": {"teacher.model": "{masks}"},
    "no checkpointing": {"teacher.model": "{plain}"},
    "bare encoder": {"teacher.model": "{bare}"},
    "kd": {"method": "kd"},
    "sft": {"method": "sft"},
    "seqkd": {"method": "seqkd"},
    "untrained": {"method": "none"},
    "second stage": {"tasks.names": ["rte"]},
    "makd": {"method": "makd"},
    "minilm": {"method": "minilm"},
    "embedding": {"method": "embedding"},
    "log_ratio": {"method": "kd", "kd.divergence": "log_ratio", "data.on_policy": 1, "kd.ratio": 1},
    "log_ratio of given answers": {"method": "kd", "kd.divergence": "log_ratio"},
    "labels of a task": {**DATA["classes"], "teacher.model": None, "method": "sft"},
    "searched layer": {"method": "minilmv2", "minilmv2.teacher_layer": "auto"},
    "also": {"also": ["minilm"]},
    "ZeRO-3": {"ds_config": "zero3"},
    "given student": {"student.model": "{teacher}"},
    "student with own masks": {"student.model": "{masks}"},
    "few-bit given student": {"student.model": "{bits}"},
    "shape": {"student.shape": "1x16x4"},
    "Kronecker": {"student.method": "kronecker", "student.factorize.shapes": {"*": "2x2"}},
    "adapters": {"student.lora.rank": 2},
    "int4": {"student.quantize.weights": "int4"},
    "pivoted": {"student.method": "svd", "student.factorize.rank": 2, "student.factorize.form": "pivoted"},
    "pivoted given student": {"student.model": "{pivoted}"},
    "few bits": {"student.quantize.weights": "int8"},
    "weighted": {"student.factorize.weighting": "gradients"},
    "calibration data": {"student.factorize.calibration.data": "{text}", "student.factorize.weighting": "none"},
    "assistants": {"student.assistants": ["1x16x4"], "student.shape": "1x16x4"},
    "assistants alone": {"student.assistants": ["1x16x4"]},
    "packing": {"data.packing": True},
    "streaming": {"data.streaming": True},
    "held out": {"data.held_out": 0.1},
    "weighted files": {"data.train": "{rows}=2,{valid}=1"},
    "written by the teacher": {"data.train": "teacher"},
    "on-policy": {"data.on_policy": 0.5},
    "rollout": {"data.rollout.url": "http://localhost:9", "data.on_policy": 0.5},
    "rollout alone": {"data.rollout.url": "http://localhost:9"},
    "prompt": {"data.prompt": "minillm"},
    "buckets": {"data.bucket_steps": 4},
    "tests": {"data.tests.a": "{text}"},
    "pairs": {"data.text.pairs": True},
    "compile": {"train.compile": True},
    "liger": {"train.liger": True},
    "checkpointing": {"train.activation_checkpointing": True},
    "epochs": {"train.epochs": 2},
    "best loss": {"train.keep_best": "loss"},
    "best score": {"train.keep_best": "score", "data.valid": "{valid}"},
    "validation": {"data.valid": "{valid}"},
}
"""Choices by the settings that make them."""


EXAMPLES: dict[tuple[Condition, Condition], tuple[str, ...]] = {
    (rules.BUCKETS, rules.TEXT): ("text of a decoder", "buckets"),
    (rules.BUCKETS, rules.TASK): ("classes", "buckets"),
    (rules.TESTS, rules.TASK): ("classes", "tests"),
    (rules.OWN_ANSWERS, rules.NOT_INSTRUCTIONS): ("text of a decoder", "on-policy"),
    (rules.ROLLOUT, rules.NOT_INSTRUCTIONS): ("text of a decoder", "rollout alone"),
    (rules.STREAMING, rules.NOT_INSTRUCTIONS): ("sentences", "streaming"),
    (rules.PACKING, rules.NOT_INSTRUCTIONS): ("text of a decoder", "packing"),
    (rules.HELD_OUT, rules.NOT_INSTRUCTIONS): ("text of a decoder", "held out"),
    (rules.HELD_OUT, rules.STREAMING): ("streaming", "held out"),
    (rules.PROMPT, rules.NOT_INSTRUCTIONS): ("classes", "prompt"),
    (rules.ROLLOUT_SERVER, rules.GIVEN_ANSWERS): ("rollout alone",),
    (rules.PACKING, rules.OWN_ANSWERS): ("packing", "on-policy"),
    (rules.STREAMING, rules.WEIGHTED_FILES): ("streaming", "weighted files"),
    (rules.EPOCHS, rules.INSTRUCTIONS): ("instructions", "epochs"),
    (rules.TEACHER_ON_A_SERVER, rules.NO_TEACHER): ("no teacher", "server"),
    (rules.TEACHER_ON_A_SERVER, rules.CACHED_TEACHER): ("cache", "server"),
    (rules.TEACHER_ON_A_SERVER, rules.SEVERAL_TEACHERS): ("server", "several"),
    (rules.TEACHER_OF_A_PACKAGE, rules.CACHED_TEACHER): ("cache", "source of a package"),
    (rules.TEACHER_OF_A_PACKAGE, rules.TEACHER_ON_A_SERVER): ("server", "source of a package"),
    (rules.TEACHER_OF_A_PACKAGE, rules.SEVERAL_TEACHERS): ("several", "source of a package"),
    (rules.ADAPTERS, rules.KRONECKER_STUDENT): ("Kronecker", "adapters"),
    (rules.FEW_BIT_STUDENT, rules.KRONECKER_STUDENT): ("Kronecker", "few bits"),
    (rules.TEACHER_WRITES, rules.NO_TEACHER): ("no teacher", "sft", "written by the teacher"),
    (rules.TEACHER_WRITES, rules.SENTENCES): ("sentences", "written by the teacher"),
    (rules.TEACHER_WRITES, rules.TEACHER_ON_A_SERVER): ("server", "written by the teacher"),
    (rules.TEACHER_WRITES, rules.ENCODER): ("text of an encoder", "written by the teacher"),
    (rules.TEACHER_WRITES, rules.SHARDED_TEACHER): ("sharded", "written by the teacher"),
    (rules.FEW_BIT_STUDENT, rules.ADAPTERS): ("adapters", "few bits"),
    (rules.GIVEN_STUDENT, rules.SHAPE): ("given student", "shape"),
    (rules.GIVEN_STUDENT, rules.ASSISTANTS): ("given student", "assistants alone"),
    (rules.ASSISTANTS, rules.FACTORIZED_STUDENT): ("assistants alone",),
    (rules.ASSISTANTS, rules.SENTENCES): ("sentences", "assistants"),
    (rules.WEIGHTED_START, rules.GIVEN_STUDENT): ("given student", "weighted"),
    (rules.WEIGHTED_START, rules.SHAPE): ("shape", "weighted"),
    (rules.CALIBRATION_DATA, rules.NOTHING_MEASURED): ("calibration data",),
    (rules.OWN_ANSWERS, rules.LABELS_ALONE): ("sft", "on-policy"),
    (rules.ROLLOUT_SERVER, rules.FEW_BIT_STUDENT): ("few bits", "rollout"),
    (rules.NO_TEACHER, rules.NOT_TASK): ("no teacher", "sft"),
    (rules.NO_TEACHER, rules.LEARNS_FROM_A_TEACHER): ("classes", "no teacher"),
    (rules.NO_TEACHER, rules.NO_GIVEN_STUDENT): ("labels of a task",),
    (rules.FURTHER_METHODS, rules.LABELS_ALONE): ("sft", "also"),
    (rules.ASSISTANTS, rules.LABELS_ALONE): ("sft", "assistants"),
    (rules.SECOND_STAGE, rules.NOTHING_TRAINED): ("untrained", "second stage"),
    (rules.EMBEDDING, rules.NOT_SENTENCES): ("instructions", "embedding"),
    (rules.SEQKD, rules.TEXT): ("text of a decoder", "seqkd"),
    (rules.SEARCHED_LAYER, rules.NOT_TEXT): ("instructions", "searched layer"),
    (rules.SEARCHED_LAYER, rules.NO_VALIDATION_SET): ("text of an encoder", "searched layer"),
    (rules.LOG_RATIO, rules.GIVEN_ANSWERS): ("log_ratio of given answers",),
    (rules.LOG_RATIO, rules.TEACHER_ON_A_SERVER): ("server", "log_ratio"),
    (rules.SEVERAL_TEACHERS, rules.ASSISTANTS): ("several", "assistants"),
    (rules.BEST_KEPT, rules.TASK): ("classes", "best loss"),
    (rules.BEST_KEPT, rules.NO_VALIDATION_SET): ("best loss",),
    (rules.PAIRS_OF_SEGMENTS, rules.DECODER): ("text of a decoder", "pairs"),
    (rules.BARE_TEACHER, rules.OUTPUT_COMPARED): ("bare encoder", "kd"),
    (rules.BEST_SCORE_KEPT, rules.NO_SCORE): ("text of a decoder", "best score"),
    (rules.PACKING, rules.TEACHER_WITH_OWN_MASKS): ("own masks", "packing"),
    (rules.COMPILE, rules.TEACHER_WITH_OWN_MASKS): ("own masks", "compile"),
    (rules.PACKING, rules.STUDENT_WITH_OWN_MASKS): ("student with own masks", "packing"),
    (rules.COMPILE, rules.STUDENT_WITH_OWN_MASKS): ("student with own masks", "compile"),
    (rules.COMPILE, rules.ZERO_3): ("ZeRO-3", "compile"),
    (rules.COMPILE, rules.SHARDED_TEACHER): ("one of several sharded", "compile"),
    (rules.COMPILE, rules.LIGER): ("compile", "liger"),
    (rules.CACHED_TEACHER, rules.ROUNDED_TEACHER): ("cache", "rounded teacher"),
    (rules.TEACHER_ON_A_SERVER, rules.ROUNDED_TEACHER): ("server", "rounded teacher"),
    (rules.CHECKPOINTING, rules.STUDENT_WITHOUT_CHECKPOINTING): ("no checkpointing", "checkpointing"),
    (rules.SEVERAL_TEACHERS, rules.LAYERS_COMPARED): ("several", "makd"),
    (rules.SEVERAL_TEACHERS, rules.SEQUENCES_COMPARED): ("classes", "several"),
    (rules.SEVERAL_TEACHERS, rules.NO_TOKENS_COMPARED): ("several", "minilm"),
    (rules.SEVERAL_TEACHERS, rules.ANOTHER_TOKENIZER): ("several", "another tokenizer"),
    (rules.TEACHERS_OF_ROWS, rules.NOT_INSTRUCTIONS): ("text of a decoder", "rows"),
    (rules.GIVEN_FEW_BIT_STUDENT, rules.TRAINING): ("few-bit given student",),
    (rules.INT4_STUDENT, rules.PIVOTED_STUDENT): ("int4", "pivoted given student"),
    (rules.TENSOR_PARALLEL_TEACHER, rules.LAYERS_COMPARED): ("cut teacher", "makd"),
    (rules.TENSOR_PARALLEL_TEACHER, rules.SEQUENCES_COMPARED): ("classes", "cut teacher"),
    (rules.TENSOR_PARALLEL_TEACHER, rules.SEVERAL_TEACHERS): ("several", "cut teacher"),
    (rules.TENSOR_PARALLEL_TEACHER, rules.ANOTHER_TOKENIZER): ("another tokenizer", "cut teacher"),
    (rules.FEW_BIT_TEACHER, rules.SHARDED_TEACHER): ("sharded", "few-bit teacher"),
    (rules.FEW_BIT_STUDENT, rules.ZERO_3): ("ZeRO-3", "few bits"),
    (rules.ANOTHER_TOKENIZER, rules.LOG_RATIO): ("another tokenizer", "log_ratio"),
    (rules.ANOTHER_TOKENIZER, rules.STREAMING): ("another tokenizer", "streaming"),
    (rules.CACHED_TEACHER, rules.CHANGING_EXAMPLES): ("cache", "streaming"),
    (rules.CACHED_TEACHER, rules.PER_TOKEN_HEAD): ("spans", "cache"),
    (rules.TEACHER_ON_A_SERVER, rules.ANOTHER_TOKENIZER): ("server", "another tokenizer"),
    (rules.TEACHER_ON_A_SERVER, rules.ENCODER): ("text of an encoder", "server"),
    (rules.TEACHER_ON_A_SERVER, rules.LAYERS_COMPARED): ("server", "makd"),
    (rules.TEACHER_ON_A_SERVER, rules.SEQUENCES_COMPARED): ("server", "minilm"),
    (rules.TEACHER_ON_A_SERVER, rules.NO_TOKENS_COMPARED): ("server", "minilm"),
}
"""Each row of the table, and a run that meets it."""

OWN = "|".join((
    r"^the term \w+ compares probabilities or labels, and sentences",  # which a method says of its terms
    r"^also is \['minilm'\], with method minilm: name each method once",
    "a task brings its own splits: leave it out",
    r"^data\.tests\.a .* is no text",
    "has no model: give it as teacher.others.b.model",
    # Of architectures and sizes
    "openai-gpt has no entry in FAMILIES", "the entry of gpt_neox in FAMILIES does not say which axes",
    "^makd compares layer with layer", "^makd compares like with like", "^kd compares models of one kind",
    "have different tokenizers, first at id",
    # Which models a task takes
    "^teacher.source wise: method .* needs .*, which it does not give",
    "^teacher.source wise gives the most likely tokens alone, but teacher and student have different tokenizers",
    "is an encoder .* and instruction data train decoders only", "without (language-model head|head for spans); give",
))  # fmt: skip
"""What is no pair of choices, and told where the models, the method or the data are."""


@pytest.fixture(autouse=True)
def package(monkeypatch) -> None:
    monkeypatch.setitem(TEACHERS, "wise", TeacherSource())


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """Tiny models, of which a plan reads configurations and tokenizers alone, and data, by the names in braces."""
    folder = tmp_path_factory.mktemp("files")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes["max_position_embeddings"] = 512
    for name, architecture in {
        "encoder": "BertForMaskedLM",
        "bare": "BertModel",
        "classes": "BertForSequenceClassification",
        "spans": "BertForQuestionAnswering",
        "sentences": "BertModel",
    }.items():
        BertConfig(vocab_size=len(TOKENS), **sizes, architectures=[architecture]).save_pretrained(folder / name)
        save_tokenizer(folder / name, TOKENS)
    words = load_tokenizer(locate("embedded:teacher"))
    pivoted = {"quant_method": "llmdistill", "method": "pivoted", "modules": {"layers.0.mlp.up_proj": 2}}
    few = {"quant_method": "llmdistill", "quantize": {"weights": "int8"}}
    for name, kind, changes in (
        ("decoder", "llama", {}),
        ("bits", "llama", {"quantization_config": few}),
        ("pivoted", "llama", {"quantization_config": pivoted}),
        ("masks", "gpt_neox", {}),
        ("plain", "openai-gpt", {}),
    ):
        config = AutoConfig.for_model(kind, vocab_size=len(words), **sizes, **changes)
        config.save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    AutoConfig.for_model("llama", vocab_size=300, **sizes).save_pretrained(folder / "other")
    byte_level(300).save_pretrained(folder / "other")
    write_text(folder / "text")
    rows = [{"instruction": f"Count {n}.", "output": "a b c", "source": "yes no", "target": "yes"} for n in range(4)]
    for name in ("rows", "valid", "writing/train", "writing/dev", "writing/test"):
        (folder / name).parent.mkdir(exist_ok=True)
        write_rows(folder / f"{name}.jsonl", rows)
    write_task(folder / "glue", "RTE", {"train": 4, "dev": 4})
    asked = [question(torch.Generator().manual_seed(0), number, has_answer=True) for number in range(4)]
    for split in ("train", "dev"):
        write_file(folder / f"questions/{split}-v1.1.json", asked)
    suffixes = dict.fromkeys(("rows", "valid"), ".jsonl")
    named = [*(path.stem for path in folder.iterdir()), "cache"]
    return {name: f"{folder / name}{suffixes.get(name, '')}" for name in named}


def settings_of(names: Sequence[str]) -> dict[str, Any]:
    """The settings of a run that makes these choices, and no others that need any."""
    chosen = {key: value for name in names for key, value in CHOSEN.get(name, {}).items()}
    needs = {"bare encoder": "text of an encoder", "pairs": "text of an encoder", "labels of a task": "classes"}
    data = next((name for name in names if name in DATA), next((needs[n] for n in names if n in needs), "instructions"))
    base = {"method": "kd", "teacher.model": "{decoder}", "data.kind": "instructions", "data.train": "{rows}"}
    given = base | DATA[data] | chosen
    if given["data.kind"] == "task" and "data.train" not in chosen:
        del given["data.train"]
    if not {"student.model", "student.shape", "student.method"} & given.keys():
        given["student.factorize.rank"] = 2
    return {key: given["teacher.model"] if value == "{teacher}" else value for key, value in given.items()}


def can_be_typed(names: Sequence[str]) -> bool:
    """Whether no two choices need one setting, and the models that they name are of the data's kind."""
    settings = [CHOSEN.get(name) or DATA[name] for name in names]
    of_data = [one for one in settings if one in DATA.values()]
    keys = [key for one in settings for key in one if one not in of_data or not key.startswith(("method", "teacher"))]
    models = [str(value) for one in settings for key, value in one.items() if key.endswith(".model")]
    decoders = {"{decoder}", "{other}", "{bits}", "{pivoted}", "{masks}", "{plain}"} & {*models}
    encoders = any(name in DATA and "decoder" not in name and name != "instructions" for name in names)
    return len(keys) == len({*keys}) and not (decoders and (encoders or {*models} - decoders - {"{teacher}"}))


@cache
def parsed(*words: str) -> Any:
    """The values of all settings where a user types some; the parser reads each setting by itself."""
    return run_parser(METHODS).parse_args(["--ds_config", "zero2", "--output_dir", "run", *words])


def config_of(names: Sequence[str], files: Mapping[str, str]) -> RunConfig:
    """The configuration of a run that makes these choices, from the words that a user types."""
    typed: dict[str, list[str]] = {}
    for key, value in settings_of(names).items():
        text = value if isinstance(value, str) else json.dumps(value)
        mapping = re.match(r"teacher\.others|data\.tests", key)
        words = typed.setdefault(mapping[0] if mapping else key, [])
        words += [f"--{key}", re.sub("{([a-z]+)}", lambda name: files[name[1]], text)]
    values = parsed().clone()
    for setting, words in typed.items():
        values[setting] = parsed(*words)[setting]
    return build(values, RunConfig, METHODS)


def test_help_lists_what_the_table_has(capsys):
    from llmdistill.train import run

    run(["--help", "combinations"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    words = " ".join(text.split())
    for first, second in CLASHES:
        _, _, after = words.partition(f" {first.typed.replace('`', '')} not with ")
        assert second.typed.replace("`", "") in after


def test_the_page_has_the_table():
    page = runpy.run_path(str(ROOT / "scripts/make/rules.py"))
    text = page["PAGE"].read_text(encoding="utf-8")
    assert page["with_table"](text) == text, "python scripts/make/rules.py writes it"


def refusal(names: Sequence[str], files: Mapping[str, str]) -> str | None:
    """What a user is told of these choices; None if they make a plan, as a dry run does."""
    try:
        make_plans(config_of(names, files), 1)
    except UserError as error:
        return str(error)
    return None


def text_of(part: Condition | str) -> str:
    return part.typed if isinstance(part, Condition) else part


def is_of(row: tuple[Condition, Condition], said: str) -> bool:
    """Whether a sentence is that of a row of the table, with the values of a run."""
    fixed = re.split(r"{[^}]*}", CLASHES[row])
    return re.fullmatch(".+".join(map(re.escape, fixed)), said) is not None


@pytest.mark.parametrize(
    ("row", "names"), EXAMPLES.items(), ids=lambda each: " x ".join(getattr(part, "typed", part) for part in each)
)
def test_each_row_of_the_table_is_told_to_those_who_meet_it(files, row, names):
    said = refusal(names, files)
    assert said is not None
    assert is_of(row, said), said


def test_a_row_of_the_table_is_of_choices_and_has_an_example():
    assert {each for row in CLASHES for each in row} == {v for v in vars(rules).values() if isinstance(v, Condition)}
    asked = {row for row in CLASHES if row[0] in (rules.CACHE_BY_VLLM, rules.CACHED_TEACHER)}  # by a command, see below
    assert CLASHES.keys() - asked <= EXAMPLES.keys() <= CLASHES.keys()


@pytest.mark.parametrize(
    ("names", "by_cache", "by_vllm"),
    [
        (("instructions",), None, None),
        (("sft",), "method sft has no teacher, so there is nothing to cache", "method sft needs more of its teacher"),
        (("makd",), None, "method makd needs more of its teacher than .* of tokens; take --cache.engine hf"),
        (("classes",), None, "vLLM gives log-probabilities of decoders alone; take --cache.engine hf"),
        (
            ("spans",),
            r"a cache keeps no outputs with a place for each token \(squad1\)",
            "vLLM gives log-probabilities of decoders",
        ),
    ],
)
def test_a_command_is_told_why_it_makes_no_cache(files, names, by_cache, by_vllm):
    """The run itself has no cache: it is the command that is about to make one."""
    (plan,) = make_plans(config_of((*names, "server") if names == ("instructions",) else names, files), 1)
    for wanted, said in ((by_cache, clash(plan, rules.CACHED_TEACHER)), (by_vllm, clash(plan, rules.CACHE_BY_VLLM))):
        assert (said is None) == (wanted is None), said
        assert wanted is None or re.match(wanted, str(said))


EVERY = [names for names in itertools.combinations([*DATA, *CHOSEN], 2) if can_be_typed(names)]


def check_pair(names: tuple[str, str], files: Mapping[str, str]) -> None:
    said = refusal(names, files)
    told = [row for row in CLASHES if said is not None and is_of(row, said)]
    assert said is None or told or re.search(OWN, said), f"{names}: {said}"
    examples = [row for row, example in EXAMPLES.items() if {*example} == {*names}]
    assert not examples or {*examples} & {*told}, f"{names}: {said}"


def test_a_sample_of_pairs_makes_a_dry_run_or_is_told_a_row(files):
    for names in random.Random(0).sample(EVERY, 40):
        check_pair(names, files)


@pytest.mark.slow
@pytest.mark.parametrize("first", [*DATA, *CHOSEN])
def test_each_pair_makes_a_dry_run_or_is_told_a_row(files, first):
    for names in EVERY:
        if names[0] == first:
            check_pair(names, files)
