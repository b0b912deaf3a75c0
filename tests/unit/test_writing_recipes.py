"""The recipes by which students learn to write, against the values of the papers and of UniLM's published commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig

from llmdistill.config.command_line import recipe_names, recipe_path
from llmdistill.train import main

ROOT = Path(__file__).resolve().parents[2]
SHARED: dict[str, Any] = {
    "data.max_length": 512,
    "data.task.writing.mask_share": 0.7,  # UniLM, --mask_prob
    "data.task.writing.label_smoothing": 0.1,  # UniLM, --label_smoothing
    "train.schedule": "linear",
    "train.weight_decay": 0.01,  # UniLM's default
}
VALUES: dict[str, dict[str, Any]] = {
    "minilm/finetune-question-generation": {
        "data.task.name": "question_generation",
        "train.learning_rate": 3e-5,  # MiniLM v1, appendix C, 12 layers
        "train.epochs": 10,  # UniLM's command for SQuAD, as the rest
        "train.global_batch_size": 32,
        "train.warmup_ratio": 0.1,
        "data.task.writing.max_length": 48,
    },
    "minilm/finetune-xsum": {
        "data.task.name": "xsum",
        "train.learning_rate": 1e-4,  # MiniLM v1, appendix C, 12 layers
        "train.steps": 108_000,  # MiniLM's command for XSum, as the rest
        "train.warmup_steps": 500,
        "train.global_batch_size": 64,
        "data.task.writing.max_length": 48,
        "data.task.writing.beams": 5,
        "data.task.writing.length_penalty": 0.0,
        "data.task.writing.no_repeat_ngram_size": 3,
    },
    "minilm/finetune-cnn-dailymail": {
        "data.task.name": "cnn_dailymail",
        "train.learning_rate": 1e-4,  # MiniLM v1, appendix C, 12 layers
        "train.steps": 45_000,  # UniLM's command for its base model, as the rest
        "train.warmup_steps": 1000,
        "train.global_batch_size": 64,
        "data.task.writing.max_length": 160,
        "data.task.writing.beams": 5,
        "data.task.writing.length_penalty": 0.0,
        "data.task.writing.no_repeat_ngram_size": 3,
    },
}


def test_every_recipe_is_tested() -> None:
    assert {name for name in recipe_names() if name.startswith("minilm/finetune-")} == set(VALUES)


@pytest.mark.parametrize("name", VALUES)
def test_values_are_the_published_ones(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12}
    BertConfig(**sizes, architectures=["BertModel"]).save_pretrained(tmp_path)
    words = ["--ds_config", str(ROOT / "ds_configs/zero2.json"), "--recipe", name, "--student.model", str(tmp_path)]
    assert main([*words, "--dry_run", "--json"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    for key, value in {**SHARED, **VALUES[name]}.items():
        found = config
        for part in key.split("."):
            found = found[part]
        assert found == value, key
    assert f"--recipe {name}" in recipe_path(name).read_text(encoding="utf-8")
