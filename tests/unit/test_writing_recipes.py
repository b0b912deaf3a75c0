"""The recipes by which students learn to write are resolved; papers.yaml has their values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import BertConfig

from llmdistill.config.command_line import recipe_names, recipe_path
from llmdistill.train import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", [name for name in recipe_names() if name.startswith("minilm/finetune-")])
def test_a_recipe_resolves_for_a_student_of_twelve_layers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12}
    BertConfig(**sizes, architectures=["BertModel"]).save_pretrained(tmp_path)
    words = ["--ds_config", str(ROOT / "ds_configs/zero2.json"), "--recipe", name, "--student.model", str(tmp_path)]
    assert main([*words, "--dry_run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["data"]["task"]["writing"]["beams"] == 5
    assert f"--recipe {name}" in recipe_path(name).read_text(encoding="utf-8")
