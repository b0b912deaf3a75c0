"""The recipes of the papers' encoder tables, resolved against teachers that are nothing but a config.json."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, PreTrainedConfig, RobertaConfig, XLMRobertaConfig

from llmdistill.config import RunConfig
from llmdistill.config.command_line import parse_run, recipe_names, recipe_path
from llmdistill.factorize.counting import build_reference, count_parameters
from llmdistill.methods import METHODS
from llmdistill.models.families import layers_of
from llmdistill.run.plan import make_plans

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

PUBLISHED = {
    "makd/bert-256": "67.0M",
    "makd/bert-64": "24.1M",
    "minilm/6x768": "66M",
    "minilm/12x384": "33M",
    "minilm/6x384*": "22M",
    "minilm/4x384*": "19M",
    "minilm/3x384*": "17M",
    "minilm/xlmr-6x384-ta": "107M",
    "minilmv2/6x384-bert-*": "22M",
    "minilmv2/6x384-roberta-large": "30M",
    "minilmv2/6x768-bert-*": "66M",
    "minilmv2/6x768-roberta-large": "81M",
    "minilmv2/12x768-bert-large": "109M",
    "minilmv2/12x768-roberta-large": "125M",
    "minilmv2/12x384-bert-large-wwm": "25M",
    "minilmv2/6x384-xlmr-*": "107M",
    "distilbert/6x768": "66M",
    "tinybert/6x768": "66M",
    "mlm-kd/6x384": "22M",
    "small/6x768": "66M",
    "truncated/bert-6x768": "66M",
    "truncated/roberta-6x768": "81M",
    "kroneckerbert/bert-21": "5.2M",
}
"""Recipes -> the published number, where one can be compared: some tables leave out token types, or cut the digits."""
WHOLE = ("makd/", "kroneckerbert/", "minilmv2/12x768-")
"""Recipes whose tables count the whole model; those of the others count word embedding and layers alone."""

KRONECKER: dict[str, tuple[float, tuple[tuple[int, int], tuple[int, int], int, int]]] = {
    "kroneckerbert/bert-8": (5.5, ((384, 384), (8, 2), 1, 8)),  # the paper has 14.3M and 5.2B
    "kroneckerbert/bert-21": (1.4, ((384, 48), (16, 2), 1, 16)),
    "kroneckerbert/bert-5": (21.9, ((384, 384), (384, 384), 4, 12)),  # the paper has 20M and 9.4B
}
"""Recipe -> 10^9 FLOPs, and by Table 1 the shapes (m1, n1) of the first factor of an attention matrix and of the first
feed-forward matrix, the number of sums, and the columns of the embedding's second factor."""

RECIPES = [name for name in recipe_names() if "/" in name and "/finetune-" not in name]


def parse(name: str) -> RunConfig:
    return parse_run(["--ds_config", "zero2", "--recipe", name], METHODS)[0]


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


def expected_sizes(name: str) -> tuple[int, int]:
    """Parameters of the whole model, and of word embedding and layers, by the shape that papers.yaml has too."""
    if name in KRONECKER:
        return kronecker_counted(*KRONECKER[name][1])[:2]
    config = parse(name)
    depth, width, _, *ffn = map(int, (config.student.shape or "12x768x12").split("x"))
    ranks = config.student.factorize
    vocabulary = TEACHERS[config.teacher.model].vocab_size
    return counted(vocabulary, depth, width, ffn[0] if ffn else 4 * width, ranks.rank or 0, ranks.embedding_rank or 0)


@pytest.mark.parametrize("name", RECIPES)
def test_sizes_are_the_tables(name: str, tmp_path: Path) -> None:
    config = parse(name)
    TEACHERS[config.teacher.model].save_pretrained(tmp_path)
    plan = make_plans(replace(config, teacher=replace(config.teacher, model=str(tmp_path))))[-1]
    whole, layers = expected_sizes(name)
    assert plan.models.sizes["student_params"] == whole
    dense = build_reference(plan.models.student)
    around = (
        count_parameters(dense) - count_parameters(dense.get_input_embeddings()) - count_parameters(layers_of(dense))
    )
    assert plan.models.sizes["student_params"] - around == layers
    text = recipe_path(name).read_text(encoding="utf-8")
    assert f"{layers:,} in word embedding and layers" in text
    assert f"{whole:,} in all" in text
    for published in (number for pattern, number in PUBLISHED.items() if fnmatchcase(name, pattern)):
        digits = 1 if "." in published else 0
        assert f"{(whole if name.startswith(WHOLE) else layers) / 1e6:.{digits}f}M" == published


@pytest.mark.parametrize("name", KRONECKER)
def test_kronecker_recipes_say_what_table_1_counts(name: str) -> None:
    stated, factors = KRONECKER[name]
    whole, _, flops = kronecker_counted(*factors)
    text = " ".join(recipe_path(name).read_text(encoding="utf-8").split())
    assert round(flops, 1) == stated
    assert f"{stated}B" in text
    assert f"{whole - 768 * 769:,} without pooler" in text
