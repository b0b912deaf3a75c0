"""The recipes of the papers' encoder tables, resolved against teachers that are nothing but a config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, PreTrainedConfig, RobertaConfig, XLMRobertaConfig

from llmdistill.config import RunConfig
from llmdistill.factorize import build_reference, count_parameters
from llmdistill.models.families import layers_of
from llmdistill.parsing import parse_run, recipe_names, recipe_path
from llmdistill.plan import Plan, make_plans
from llmdistill.runtime.engine import split_batch

ROOT = Path(__file__).resolve().parents[2]
LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
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

SIZES: dict[str, tuple[str | None, str, tuple[int, ...]]] = {
    "makd/bert-256": ("67.0M", "whole", (30_522, 12, 768, 3072, 256)),
    "makd/bert-64": ("24.1M", "whole", (30_522, 12, 768, 3072, 64, 395)),
    "makd/roberta-256": (None, "whole", (50_265, 12, 768, 3072, 256)),
    "makd/xlmr-256": (None, "whole", (250_002, 12, 768, 3072, 256)),
    "minilm/6x768": ("66M", "layers", (30_522, 6, 768, 3072)),
    "minilm/12x384": ("33M", "layers", (30_522, 12, 384, 1536)),
    **{
        f"minilm/{depth}x384{suffix}": (published, "layers", (30_522, depth, 384, 1536))
        for depth, published in ((6, "22M"), (4, "19M"), (3, "17M"))
        for suffix in ("", "-ta")
    },
    **{
        f"minilm/6x384-{ablation}": ("22M", "layers", (30_522, 6, 384, 1536))
        for ablation in ("no-value-relation", "value-mse", "layer-to-layer")
    },
    "minilm/xlmr-12x384": (None, "layers", (250_002, 12, 384, 1536)),
    "minilm/xlmr-6x384-ta": ("107M", "layers", (250_002, 6, 384, 1536)),
    "minilmv2/6x384-bert-base": ("22M", "layers", (30_522, 6, 384, 1536)),
    "minilmv2/6x384-bert-large": ("22M", "layers", (30_522, 6, 384, 1536)),
    "minilmv2/6x384-roberta-large": ("30M", "layers", (50_265, 6, 384, 1536)),
    "minilmv2/6x768-bert-base": ("66M", "layers", (30_522, 6, 768, 3072)),
    "minilmv2/6x768-bert-large": ("66M", "layers", (30_522, 6, 768, 3072)),
    "minilmv2/6x768-roberta-large": ("81M", "layers", (50_265, 6, 768, 3072)),
    "minilmv2/12x768-bert-large": ("109M", "whole", (30_522, 12, 768, 3072)),
    "minilmv2/12x768-roberta-large": ("125M", "whole", (50_265, 12, 768, 3072)),
    "minilmv2/12x384-bert-large-wwm": ("25M", "layers", (30_522, 12, 384, 1536, 0, 128)),
    "minilmv2/6x384-xlmr-base": ("107M", "layers", (250_002, 6, 384, 1536)),
    "minilmv2/6x384-xlmr-large": ("107M", "layers", (250_002, 6, 384, 1536)),
    "distilbert/6x768": ("66M", "layers", (30_522, 6, 768, 3072)),
    "tinybert/6x768": ("66M", "layers", (30_522, 6, 768, 3072)),
    "tinybert/4x312": (None, "whole", (30_522, 4, 312, 1200)),  # the table cuts 14.35M to 14.3M
    "mlm-kd/6x384": ("22M", "layers", (30_522, 6, 384, 1536)),
    "small/6x768": ("66M", "layers", (30_522, 6, 768, 3072)),
    "truncated/bert-6x768": ("66M", "layers", (30_522, 6, 768, 3072)),
    "truncated/roberta-6x768": ("81M", "layers", (50_265, 6, 768, 3072)),
}
"""Recipe -> the published number, whether it counts the whole model or word embedding and layers alone (the tables do
the latter for all but base-size students), and vocabulary, depth, width, feed-forward width, rank, rank of the
embedding."""

TERMS: dict[str, set[str]] = {
    "makd": {"query", "key", "value", "ffn_up", "ffn_down", "attention", "hidden", "logits"},
    "minilm": {"attention", "value_relation"},
    "minilmv2": {"relation_qq", "relation_kk", "relation_vv"},
    "distilbert": {"soft", "label", "cosine"},
    "tinybert": {"attention", "hidden", "embedding"},
    "mlm-kd": {"forward_kl"},
    "small": {"label"},
    "truncated": {"label"},  # of which nothing is trained
}
"""What the recipes of a folder learn by."""

RECIPES = [name for name in recipe_names() if "/" in name]
EVERY = pytest.mark.parametrize("name", RECIPES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder of each teacher, with its config alone."""
    root = tmp_path_factory.mktemp("teachers")
    for name, config in TEACHERS.items():
        config.save_pretrained(root / name)
    return {name: str(root / name) for name in TEACHERS}


@cache
def parse(name: str) -> RunConfig:
    return parse_run(["--ds_config", str(ROOT / "ds_configs/zero2.json"), "--recipe", name])[0]


@pytest.fixture(scope="module")
def plans_of(folders: dict[str, str]) -> Callable[[str], list[Plan]]:
    """The plans of a recipe, its assistant's first."""

    @cache
    def plans(name: str) -> list[Plan]:
        config = parse(name)
        return make_plans(replace(config, teacher=replace(config.teacher, model=folders[config.teacher.model])))

    return plans


def counted(
    vocabulary: int, depth: int, width: int, ffn: int, rank: int = 0, embedding_rank: int = 0
) -> tuple[int, int]:
    """Parameters of the whole base model, and of word embedding and layers alone, matrix by matrix."""

    def matrix(inputs: int, outputs: int) -> int:
        return outputs + (rank * (inputs + outputs) if rank else inputs * outputs)

    words = embedding_rank * (vocabulary + width) if embedding_rank else vocabulary * width
    norm = 2 * width
    layer = 4 * matrix(width, width) + matrix(width, ffn) + matrix(ffn, width) + 2 * norm
    positions, types = (512, 2) if vocabulary == 30_522 else (514, 1)
    pooler = width * width + width
    return words + depth * layer + (positions + types) * width + norm + pooler, words + depth * layer


def test_every_encoder_recipe_is_tested() -> None:
    assert set(RECIPES) == set(SIZES)


@EVERY
def test_sizes_are_the_tables(name: str, plans_of: Callable[[str], list[Plan]]) -> None:
    plan = plans_of(name)[-1]
    published, counting, shape = SIZES[name]
    whole, layers = counted(*shape)
    assert plan.sizes["student_params"] == whole
    dense = build_reference(plan.student_config)
    around = (
        count_parameters(dense) - count_parameters(dense.get_input_embeddings()) - count_parameters(layers_of(dense))
    )
    assert plan.sizes["student_params"] - around == layers
    text = recipe_path(name).read_text(encoding="utf-8")
    assert f"{layers:,} in word embedding and layers" in text
    assert f"{whole:,} in all" in text
    if published is not None:
        digits = 1 if "." in published else 0
        assert f"{(whole if counting == 'whole' else layers) / 1e6:.{digits}f}M" == published


def test_makd_is_exact(plans_of: Callable[[str], list[Plan]]) -> None:
    assert plans_of("makd/bert-256")[0].sizes["student_params"] == 67_014_912
    assert plans_of("makd/bert-64")[0].sizes["student_params"] == 24_083_070


@EVERY
def test_terms_are_the_methods(name: str, plans_of: Callable[[str], list[Plan]]) -> None:
    folder, _, row = name.partition("/")
    expected = {
        "6x384-no-value-relation": {"attention"},
        "6x384-value-mse": {"attention", "value_mse"},
    }.get(row, TERMS[folder])
    if name in ("makd/bert-256", "makd/bert-64"):
        expected = expected | {"sequence_logits"}  # BERT's next sentence
    for plan in plans_of(name):
        assert set(plan.method.weights) == expected


@EVERY
def test_the_header_says_how_to_run_it(name: str) -> None:
    text = recipe_path(name).read_text(encoding="utf-8")
    command = f"#   deepspeed --num_gpus 8 llmdistill/train.py --ds_config ds_configs/zero2.json --recipe {name}\n"
    assert command in text


@EVERY
def test_training_is_the_papers(name: str) -> None:
    config = parse(name)
    folder = name.partition("/")[0]
    train = config.train
    rate = {"makd": 1e-4, "minilm": 3e-4, "mlm-kd": 3e-4}.get(folder, 6e-4)
    assert train.learning_rate == (5e-4 if name == "minilm/6x768" else rate)
    assert train.global_batch_size == (512 if folder == "makd" else 256)
    # MaKD trains its XLM-R like its BERT, in no table.
    assert train.steps == (1_000_000 if "xlmr" in name and folder != "makd" else 400_000)
    second = 0.99 if folder == "makd" else 0.98 if name == "minilmv2/12x768-roberta-large" else 0.999
    assert train.betas == (0.9, second)
    assert (train.schedule, train.warmup_steps, train.weight_decay) == ("linear", 4000, 0.01)
    assert (config.data.kind, config.data.max_length) == ("text", 512)


def test_minilmv2_takes_heads_and_layer_by_the_teacher() -> None:
    for name in RECIPES:
        config = parse(name)
        if config.method == "minilmv2":
            model = config.teacher.model
            layer = "last" if model.endswith(("base", "base-uncased")) else 21 if "bert-large" in model else 19
            layer = 19 if "roberta-large" in model else layer
            assert config.minilmv2.teacher_layer == layer
            assert config.minilmv2.relation_heads == (48 if layer == "last" else 64)


@pytest.mark.parametrize("name", [name for name in RECIPES if name.endswith("-ta")])
def test_an_assistant_stands_between(name: str, plans_of: Callable[[str], list[Plan]]) -> None:
    assistant, student = plans_of(name)
    assert assistant.student_config.num_hidden_layers == 12
    assert student.teacher_config.to_dict() == assistant.student_config.to_dict()
    assert assistant.student_config.hidden_size == student.student_config.hidden_size == 384


def test_layer_to_layer_and_starting_points() -> None:
    assert parse("minilm/6x384-layer-to-layer").minilm.layers == "uniform"
    starts = {name: (parse(name).student.init, parse(name).student.layers) for name in RECIPES if "makd" not in name}
    assert starts.pop("distilbert/6x768") == ("layers", "spread")
    assert starts.pop("truncated/bert-6x768") == starts.pop("truncated/roberta-6x768") == ("layers", "first")
    assert {init for init, _ in starts.values()} == {"random"}
    assert parse("mlm-kd/6x384").kd.ratio == 1


@pytest.mark.parametrize(("name", "accumulation"), [("minilmv2/6x384-bert-base", 1), ("makd/bert-256", 2)])
def test_eight_ranks_share_the_batch(name: str, accumulation: int) -> None:
    train = parse(name).train
    split = split_batch(train.global_batch_size, train.micro_batch_size, 8)
    assert (split.micro_batch_size, split.accumulation_steps) == (32, accumulation)
