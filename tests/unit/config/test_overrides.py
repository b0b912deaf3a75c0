"""A later layer of settings takes back what it replaces in the layers below it, and nothing else."""

import pytest

from llmdistill.config import FactorizeConfig
from llmdistill.config.command_line import build, parse_run, to_dict
from llmdistill.config.strict import flatten
from llmdistill.methods import METHODS
from llmdistill.students.sizes import check_factorization

BASE = "student: {method: svd, factorize: {target_params: 34%, weighting: gradients, allocation: loss}}"
KEPT = {"rank": None, "target_params": "34%", "weighting": "gradients", "allocation": "loss"}
REPLACED_TARGET = {"target_params": None, "weighting": "gradients", "allocation": None}
UNWEIGHTED = {"weighting": None, "allocation": None}
MEASURED = "student: {factorize: {rank: 4, weighting: activations, calibration: {data: c.jsonl}}}"
IMPORTANT = "student: {shape: 2x8x2, init: important, factorize: {calibration: {data: c.jsonl}}}"
ADAPTED = "student: {lora: {rank: 2}, factorize: {rank: 4, embedding_rank: 3, form: pivoted, rank_multiple: 8}}"
SEVERAL = "method: kd\nalso: [minilmv2]\ndata: {on_policy: 0.5}\nteacher: {model: a, cache: c}"
KRONECKER = "student: {method: kronecker, factorize: {target_params: 20%, max_flops: 30%, sums: 2}}"
INSTRUCTIONS = "data: {tests: {a: a.jsonl}, valid: v.jsonl, train: t.jsonl, packing: true, bucket_steps: 4}"
CHAIN = "student: {shape: 2x8x2, assistants: [4x8x2], assistant_training: {steps: 3}}"
PIVOTED = "student: {factorize: {rank: 4, form: pivoted}}"
TEXT = "data: {kind: text, train: t.txt}"
NO_RANKS = {"embedding_rank": None, "rank_multiple": "auto"}
NO_SETS = {"data.tests": {}, "data.valid": None}
NO_CHAIN = {"student.shape": None, "student.assistants": [], "student.assistant_training": {}}
REPLACED = [
    (BASE, ".rank=30", {**REPLACED_TARGET, "rank": 30}),
    (BASE, ".rank=null", KEPT),
    ("extends: base.yaml\nstudent: {factorize: {ranks: {'*k*': 4}}}", "seed=1", {**REPLACED_TARGET, "ranks.*k*": 4}),
    (BASE, ".target_params=50%", {**KEPT, "target_params": "50%"}),
    (BASE, ".weighting=activations", {**KEPT, "weighting": "activations", "allocation": None}),
    (BASE, "student.method=svd", KEPT),  # what the recipe says already changes nothing
    (BASE, "student.shape=3x128x4", {**UNWEIGHTED, "target_params": "34%"}),
    (BASE, "student.model=some/where", {**UNWEIGHTED, "target_params": "34%"}),
    (BASE, "student.method=kronecker .shapes={'*':8x2}", {**UNWEIGHTED, "shapes.*": "8x2", "target_params": None}),
    ("extends: makd/bert-256", "data.text.pairs=false", {"data.text.next_sentence": None}),
    ("extends: makd/bert-256", "data.text.pairs=true", {"data.text.next_sentence": True}),
    ("train: {epochs: 3}", "train.steps=50", {"train.steps": 50, "train.epochs": None}),
    (f"{TEXT}\ntrain: {{steps: 7}}", "train.epochs=2", {"train.epochs": 2}),
    ("train: {warmup_ratio: 0.1}", "train.warmup_steps=5", {"train.warmup_ratio": None}),
    ("train: {warmup_steps: 5}", "train.warmup_ratio=0.1", {"train.warmup_steps": 0}),
    ("train: {keep_best: loss}\ndata: {valid: v.jsonl}", "data.valid=null", {"train.keep_best": None}),
    ("data: {packing: true}", "data.on_policy=0.5", {"data.packing": False}),
    ("data: {on_policy: 0.5}\nmethod: kd", "data.packing=true", {"data.on_policy": 0.0}),
    ("teacher: {sharding: zero3, zero: {sub_group_size: 9}}", "teacher.sharding=replicated", {"teacher.zero": {}}),
    (CHAIN, "student.model=some/where", NO_CHAIN),
    (CHAIN, "student.assistants=[]", {"student.assistant_training": {}}),
    ("student: {factorize: {rank: 4, sigma: balanced}}", ".form=pivoted", {"sigma": "left"}),
    (PIVOTED, ".sigma=balanced", {"form": None}),
    (PIVOTED, ".sigma=left", {"form": "pivoted"}),
    (MEASURED, ".weighting=none", {"calibration.data": None}),
    (IMPORTANT, "student.shape=3x8x2 .weighting=none", {"calibration.data": "c.jsonl"}),
    (KRONECKER, "student.method=svd .rank=4", {"max_flops": None, "sums": 1, "target_params": None}),
    (ADAPTED, "student.method=kronecker .shapes={'*':2x2}", {"student.lora.rank": None, **NO_RANKS}),
    (KRONECKER, ".shapes={'*':2x2}", {"max_flops": None, "sums": 2}),
    (INSTRUCTIONS, "data.kind=task data.task.name=rte", {**NO_SETS, "data.packing": False, "data.bucket_steps": 1}),
    (INSTRUCTIONS, "data.kind=text data.train=t.txt", {"data.tests": {}, "data.valid": "v.jsonl"}),
    (f"{TEXT}\ntrain: {{epochs: 3}}", "data.kind=instructions data.train=t.jsonl", {"train.epochs": None}),
    (SEVERAL, "method=sft", {"also": [], "data.on_policy": 0.0, "teacher.cache": None, "teacher.model": "a"}),
    ("teacher: {model: a, cache: c}", "teacher.model=b", {"teacher.cache": None}),
    (TEXT, "data.kind=sentences method=embedding", {"data.train": "t.txt"}),
    (INSTRUCTIONS, "data.kind=sentences method=embedding", {"data.tests.a": "a.jsonl", "data.bucket_steps": 4}),
    ("data: {text: {pairs: false}}", "data.text.next_sentence=true", {"data.text.pairs": None}),
    ("minilm: {teacher_layer: 3}", "minilm.teacher_layers=1,2", {"minilm.teacher_layer": "last"}),
    ("minilmv2: {teacher_layers: '1,2'}", "minilmv2.teacher_layer=3", {"minilmv2.teacher_layers": None}),
]
"""A recipe, what the command line adds, and settings of the run; those of student.factorize by their names alone.

On the command line these begin with a dot.
"""


@pytest.mark.parametrize(("recipe", "words", "expected"), REPLACED)
def test_settings_that_exclude_each_other_replace_each_other(tmp_path, recipe, words, expected):
    (tmp_path / "base.yaml").write_text(BASE, encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(recipe + "\n", encoding="utf-8")
    typed = ["--student.factorize" + word if word.startswith(".") else f"--{word}" for word in words.split()]
    config = to_dict(parse_run(["--recipe", str(tmp_path / "mine.yaml"), *typed], METHODS)[0])
    factorize = build(config["student"]["factorize"], FactorizeConfig)
    if config["student"]["shape"] is None and config["student"]["model"] is None and factorize != FactorizeConfig():
        check_factorization(factorize, config["student"]["method"])
    found = flatten(config["student"]["factorize"]) | flatten(config)
    assert {key: found[key] for key in expected} == expected


def test_settings_of_one_layer_do_not_replace_each_other():
    words = ["--student.factorize.rank", "30", "--student.factorize.target_params", "50%"]
    factorize = parse_run(words, METHODS)[0].student.factorize
    assert (factorize.rank, factorize.target_params) == (30, "50%")  # the plan refuses both together
