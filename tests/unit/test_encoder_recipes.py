"""The recipes of the papers' encoder tables, resolved against teachers that are nothing but a config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, PreTrainedConfig, RobertaConfig, XLMRobertaConfig

from llmdistill.config.command_line import parse_run, recipe_names, recipe_path
from llmdistill.factorize.counting import build_reference, count_parameters
from llmdistill.methods import METHODS
from llmdistill.models.families import layers_of
from llmdistill.run.plan import make_plans

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

RECIPES = [name for name in recipe_names() if "/" in name and "/finetune-" not in name]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_resolves_to_a_student_of_the_size_that_it_states(name: str, tmp_path: Path) -> None:
    """The sizes were counted matrix by matrix from the shapes of the papers, and agree with their tables."""
    config = parse_run(["--ds_config", "zero2", "--recipe", name], METHODS)[0]
    TEACHERS[config.teacher.model].save_pretrained(tmp_path)
    plan = make_plans(replace(config, teacher=replace(config.teacher, model=str(tmp_path))))[-1]
    whole, dense = plan.models.sizes["student_params"], build_reference(plan.models.student)
    inside = count_parameters(dense.get_input_embeddings()) + count_parameters(layers_of(dense))
    text = recipe_path(name).read_text(encoding="utf-8")
    assert f"{whole - count_parameters(dense) + inside:,} in word embedding and layers" in text
    assert f"{whole:,} in all" in text
