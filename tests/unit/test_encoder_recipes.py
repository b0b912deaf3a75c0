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
from llmdistill.config.command_line import parse_run, recipe_names, recipe_path
from llmdistill.factorize.counting import build_reference, count_parameters
from llmdistill.methods import METHODS
from llmdistill.models.families import layers_of
from llmdistill.run.plan import Plan, make_plans

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
    "minilmv2/6x384-roberta-base": (None, "layers", (50_265, 6, 384, 1536)),
    "minilmv2/6x768-bert-base": ("66M", "layers", (30_522, 6, 768, 3072)),
    "minilmv2/6x768-bert-large": ("66M", "layers", (30_522, 6, 768, 3072)),
    "minilmv2/6x768-roberta-large": ("81M", "layers", (50_265, 6, 768, 3072)),
    "minilmv2/12x768-bert-large": ("109M", "whole", (30_522, 12, 768, 3072)),
    "minilmv2/12x768-roberta-large": ("125M", "whole", (50_265, 12, 768, 3072)),
    "minilmv2/12x384-bert-large-wwm": ("25M", "layers", (30_522, 12, 384, 1536, 0, 128)),
    "minilmv2/6x384-xlmr-base": ("107M", "layers", (250_002, 6, 384, 1536)),
    "minilmv2/6x384-xlmr-large": ("107M", "layers", (250_002, 6, 384, 1536)),
    "distilbert/6x768": ("66M", "layers", (30_522, 6, 768, 3072)),
    "distilbert/4x768": (None, "whole", (30_522, 4, 768, 3072)),  # the table leaves out pooler and token types
    "tinybert/6x768": ("66M", "layers", (30_522, 6, 768, 3072)),
    "tinybert/4x312": (None, "whole", (30_522, 4, 312, 1200)),  # the table cuts 14.35M to 14.3M
    "mlm-kd/6x384": ("22M", "layers", (30_522, 6, 384, 1536)),
    "small/4x512": (None, "whole", (30_522, 4, 512, 2048)),  # the table has 29.2M
    "small/6x768": ("66M", "layers", (30_522, 6, 768, 3072)),
    "truncated/bert-6x768": ("66M", "layers", (30_522, 6, 768, 3072)),
    "truncated/roberta-6x768": ("81M", "layers", (50_265, 6, 768, 3072)),
}
"""Recipe -> the published number, whether it counts the whole model or word embedding and layers alone (the tables do
the latter for all but base-size students), and vocabulary, depth, width, feed-forward width, rank, rank of the
embedding."""

KRONECKER: dict[str, tuple[str | None, float, tuple[tuple[int, int], tuple[int, int], int, int]]] = {
    "kroneckerbert/bert-8": (None, 5.5, ((384, 384), (8, 2), 1, 8)),  # the paper has 14.3M and 5.2B
    "kroneckerbert/bert-21": ("5.2M", 1.4, ((384, 48), (16, 2), 1, 16)),
    "kroneckerbert/bert-5": (None, 21.9, ((384, 384), (384, 384), 4, 12)),  # the paper has 20M and 9.4B
}
"""Recipe -> the published number where the shapes give it, 10^9 FLOPs, and by Table 1 the shapes (m1, n1) of the first
factor of an attention matrix and of the first feed-forward matrix, the number of sums, and the columns of the
embedding's second factor."""

TERMS: dict[str, set[str]] = {
    "makd": {"query", "key", "value", "ffn_up", "ffn_down", "attention", "hidden", "logits"},
    "minilm": {"attention", "value_relation"},
    "minilmv2": {"relation_qq", "relation_kk", "relation_vv"},
    "distilbert": {"soft", "label", "cosine"},
    "tinybert": {"attention", "hidden", "embedding"},
    "mlm-kd": {"forward_kl"},
    "small": {"label"},
    "truncated": {"label"},  # of which nothing is trained
    "kroneckerbert": {"embedding", "attention", "ffn", "logits", "sequence_logits", "label", "sequence_label"},
}
"""What the recipes of a folder learn by."""

RECIPES = [name for name in recipe_names() if "/" in name and "/finetune-" not in name]
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
    return parse_run(["--ds_config", str(ROOT / "ds_configs/zero2.json"), "--recipe", name], METHODS)[0]


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


def kronecker_counted(
    attention: tuple[int, int], up: tuple[int, int], sums: int, columns: int
) -> tuple[int, int, float]:
    """As `counted`, of BERT-base as Kronecker products; and 10^9 FLOPs of its linears for 128 tokens (eq. 7)."""
    numbers = flops = 0
    for m, n, (m1, n1), times in ((768, 768, attention, 4), (3072, 768, up, 1), (768, 3072, up[::-1], 1)):
        m2, n2 = m // m1, n // n1
        numbers += times * (sums * (m1 * n1 + m2 * n2) + m)
        right = (2 * n2 - 1) * m2 * n1 + (2 * n1 - 1) * m2 * m1
        left = (2 * n1 - 1) * n2 * m1 + (2 * n2 - 1) * m2 * m1
        flops += times * (sums * min(right, left) + (sums - 1) * m)
    words, norm, pooler = 30_522 * (768 // columns) + columns, 2 * 768, 768 * 768 + 768
    layers = words + 12 * (numbers + 2 * norm)
    return layers + (512 + 2) * 768 + norm + pooler, layers, 12 * flops * 128 / 1e9


def expected_sizes(name: str) -> tuple[str | None, str, int, int]:
    """The published number, what it counts, and the parameters of the whole model and of word embedding and layers."""
    if name in KRONECKER:
        published, _, factors = KRONECKER[name]
        whole, layers, _ = kronecker_counted(*factors)
        return published, "whole", whole, layers
    published, counting, shape = SIZES[name]
    return published, counting, *counted(*shape)


def test_every_encoder_recipe_is_tested() -> None:
    assert set(RECIPES) == {*SIZES, *KRONECKER}


@EVERY
def test_sizes_are_the_tables(name: str, plans_of: Callable[[str], list[Plan]]) -> None:
    plan = plans_of(name)[-1]
    published, counting, whole, layers = expected_sizes(name)
    assert plan.models.sizes["student_params"] == whole
    dense = build_reference(plan.models.student)
    around = (
        count_parameters(dense) - count_parameters(dense.get_input_embeddings()) - count_parameters(layers_of(dense))
    )
    assert plan.models.sizes["student_params"] - around == layers
    text = recipe_path(name).read_text(encoding="utf-8")
    assert f"{layers:,} in word embedding and layers" in text
    assert f"{whole:,} in all" in text
    if published is not None:
        digits = 1 if "." in published else 0
        assert f"{(whole if counting == 'whole' else layers) / 1e6:.{digits}f}M" == published


@pytest.mark.parametrize("name", KRONECKER)
def test_kronecker_recipes_say_what_table_1_counts(name: str) -> None:
    _, stated, factors = KRONECKER[name]
    whole, _, flops = kronecker_counted(*factors)
    text = " ".join(recipe_path(name).read_text(encoding="utf-8").split())
    assert round(flops, 1) == stated
    assert f"{stated}B" in text
    assert f"{whole - 768 * 769:,} without pooler" in text


def test_kroneckerbert_21_has_the_papers_size_and_bert_base_its_flops() -> None:
    whole, layers, flops = kronecker_counted(*KRONECKER["kroneckerbert/bert-21"][2])
    assert (whole, layers) == (5_228_272, 4_241_392)
    assert flops == pytest.approx(1.4, rel=0.05)
    dense = 12 * (4 * (2 * 768 - 1) * 768 + (2 * 768 - 1) * 3072 + (2 * 3072 - 1) * 768)
    assert 128 * dense / 1e9 == pytest.approx(21.7, abs=0.05)


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
