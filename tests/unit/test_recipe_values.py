"""Every number of every shipped recipe and of every protocol against a table of what the papers say (papers.yaml).

And the sizes of their students, with teachers that are nothing but a config.json.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import BertConfig, PreTrainedConfig, RobertaConfig, XLMRobertaConfig

from llmdistill.config import RunConfig
from llmdistill.config.command_line import parse_run, run_parser, to_dict
from llmdistill.config.recipes import read_layers, recipe_names, recipe_path
from llmdistill.config.strict import flatten
from llmdistill.config.tasks import FineTuningConfig
from llmdistill.methods import METHODS
from llmdistill.models.families import layers_of
from llmdistill.papers.fine_tuning.task_study import TaskStudy
from llmdistill.students.counting import build_reference, count_parameters
from llmdistill.training.plan import make_plans

ROWS: list[dict[str, Any]]
FINE_TUNING: list[dict[str, Any]]
ROWS, FINE_TUNING = yaml.safe_load_all(Path(__file__).with_name("papers.yaml").read_text(encoding="utf-8"))
OF_NO_PAPER = {"quickstart", "pruned", "finetune", "sentences", "smollm2", "instruct"}
"""Recipes of the embedded world, one for a model and task of the user's own, for sentences, and for instruct models."""
OF_THE_MACHINE = (
    *("extends", "output_dir", "data.train", "data.valid", "data.tests", "scoring.batch_size"),
    *(f"train.{name}" for name in ("dtype", "micro_batch_size", "log_every", "save_every")),
)
"""Settings that change where and how fast a recipe runs, but nothing of what it does."""
RECIPES = [name for name in recipe_names() if name not in OF_NO_PAPER]


def entries(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values by dotted key; the shapes by pattern, and what is trained otherwise, are values themselves."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and not name.endswith((".shapes", ".assistant_training")):
            yield from entries(value, f"{name}.")
        else:
            yield name, value


def table(recipe: str) -> dict[str, tuple[Any, str]]:
    """Key -> value and source."""
    found: dict[str, tuple[Any, str]] = {}
    for row in ROWS:
        if any(fnmatchcase(recipe, pattern) for pattern in row["recipes"]):
            found |= {key: (value, row["source"]) for key, value in entries(row["values"])}
    return found


@cache
def parse(recipe: str) -> RunConfig:
    return parse_run(["--ds_config", "zero2", "--recipe", recipe], METHODS)[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_what_its_paper_says(recipe: str) -> None:
    """A number cannot be added to a recipe, nor a recipe to the package, without its source."""
    found, stated = dict(entries(to_dict(parse(recipe)))), table(recipe)
    wrong = [
        f"{key} is {found.get(key)}, but {value} in {source}"
        for key, (value, source) in stated.items()
        if key not in found or found[key] != value
    ]
    assert not wrong
    known = (*stated, *OF_THE_MACHINE)
    for values in read_layers(run_parser(METHODS), recipe_path(recipe)).values():
        unknown = [key for key in flatten(values) if not any(f"{key}.".startswith(f"{each}.") for each in known)]
        assert not unknown
    names = ("global_batch_size", "learning_rate", "warmup_steps", "schedule", "weight_decay", "betas")
    keys = {"method", "teacher.model", "data.kind", "data.max_length", *(f"train.{name}" for name in names)}
    assert keys <= stated.keys()
    assert {"train.steps", "train.epochs"} & stated.keys()


@pytest.mark.parametrize("row", FINE_TUNING, ids=lambda row: f"{row['protocols'][0]}-{row['tasks'][0]}-{row['source']}")
def test_a_protocol_tries_what_its_paper_says(row: dict[str, Any]) -> None:
    for protocol, task in product(row["protocols"], row["tasks"]):
        config = FineTuningConfig(model="m", protocol=protocol)
        trials = TaskStudy(config=config, task=task, folder=Path("runs") / task, teacher=None).trials()
        tried: dict[str, Any] = defaultdict(list)
        for trial in trials:
            for key, value in entries(to_dict(trial.config)):
                tried[key] += [value] if value not in tried[key] else []
        tried["seeds"] = len(tried["seed"])
        expected = dict(entries(row["values"]))
        assert {key: tried[key] for key in expected} == expected, f"{protocol}, {task}: {row['source']}"


def test_every_row_has_a_source_and_a_recipe() -> None:
    assert all(row["source"] for row in [*ROWS, *FINE_TUNING])
    for row in ROWS:
        for pattern in row["recipes"]:
            assert any(fnmatchcase(name, pattern) for name in RECIPES), pattern


# The sizes of the encoders' tables.

LARGE: Any = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
BERT: dict[str, Any] = {"architectures": ["BertForMaskedLM"]}
ROBERTA: dict[str, Any] = {"vocab_size": 50_265, "max_position_embeddings": 514, "type_vocab_size": 1}
XLMR: dict[str, Any] = {**ROBERTA, "vocab_size": 250_002}
TEACHERS: dict[str, PreTrainedConfig] = {
    "google-bert/bert-base-uncased": BertConfig(**BERT),
    "google-bert/bert-large-uncased": BertConfig(**BERT, **LARGE),
    "google-bert/bert-large-uncased-whole-word-masking": BertConfig(**BERT, **LARGE),
    "FacebookAI/roberta-base": RobertaConfig(**ROBERTA),
    "FacebookAI/roberta-large": RobertaConfig(**ROBERTA, **LARGE),
    "FacebookAI/xlm-roberta-base": XLMRobertaConfig(**XLMR),
    "FacebookAI/xlm-roberta-large": XLMRobertaConfig(**XLMR, **LARGE),
}
SIZES = re.compile(r"([0-9,]+) in word embedding and layers, ([0-9,]+) in all")


@pytest.mark.parametrize("name", [name for name in RECIPES if "/" in name and "/finetune-" not in name])
def test_sizes_are_the_tables(name: str, tmp_path: Path) -> None:
    """Counting itself is held against formulas in students/test_sizes.py."""
    config = parse(name)
    TEACHERS[config.teacher.model].save_pretrained(tmp_path)
    plan = make_plans(replace(config, teacher=replace(config.teacher, model=str(tmp_path))))[-1]
    [stated] = SIZES.findall(recipe_path(name).read_text(encoding="utf-8"))
    layers, whole = (int(number.replace(",", "")) for number in stated)
    assert plan.models.sizes["student_params"] == whole
    dense = build_reference(plan.models.student)
    inner = count_parameters(dense.get_input_embeddings()) + count_parameters(layers_of(dense))
    assert whole - (count_parameters(dense) - inner) == layers
