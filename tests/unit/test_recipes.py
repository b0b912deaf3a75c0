"""Shipped recipes, resolved on the meta device as `--dry_run` does, without weights or data."""

import json
import re

import pytest
from transformers import BertConfig, GPT2Config, LlamaConfig

from llmdistill.config.command_line import recipe_names, recipe_path
from llmdistill.train import main


def llama(words: int, width: int, ffn: int, *, layers: int, heads: int, key_value_heads: int) -> LlamaConfig:
    sizes = {"vocab_size": words, "hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": layers}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": key_value_heads}
    return LlamaConfig(**sizes, **heads_of, tie_word_embeddings=True)


TEACHERS = {
    "gpt2": GPT2Config(),
    "sentences": BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536),
    "smollm2": llama(49_152, 576, 1536, layers=30, heads=9, key_value_heads=3),
    "instruct": llama(49_152, 576, 1536, layers=30, heads=9, key_value_heads=3),
    "llama3": llama(128_256, 2048, 8192, layers=16, heads=32, key_value_heads=8),
}


@pytest.fixture
def dry_run(tmp_path, capsys, monkeypatch):
    """Resolve a recipe for so many ranks; gives the printed object."""

    def run(recipe: str, *arguments: str, ranks: int = 1):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        name = recipe.split("_")[0]
        if name in TEACHERS:
            TEACHERS[name].save_pretrained(tmp_path)
            arguments = ("--teacher.model", str(tmp_path), *arguments)
            if recipe.endswith("teacher"):
                arguments = ("--student.model", str(tmp_path), *arguments)
        if recipe == "smollm2":  # the one that ships no data and names none on the hub
            (tmp_path / "text.txt").write_text("A text that no test reads.\n")
            arguments = ("--data.train", str(tmp_path / "text.txt"), *arguments)
        assert main(["--ds_config", "zero2", "--recipe", recipe, "--dry_run", "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize("recipe", [name for name in recipe_names() if "/" not in name])
def test_every_shipped_recipe_resolves_and_costs_what_it_states(dry_run, recipe):
    plan = dry_run(recipe)
    assert 0 < plan["student_params"] <= plan["teacher_params"]
    counted_later = plan["config"]["train"]["epochs"] is not None
    assert counted_later or plan["estimate"]["tokens"] > 0
    stated = re.search(r"at most ([0-9.]+) A100 hours", recipe_path(recipe).read_text(encoding="utf-8"))
    assert (stated is not None) == (recipe in ("gpt2_dolly", "llama3_dolly"))
    if stated is not None:
        flops = plan["config"]["train"]["steps"] * 64 * 512 * (6 * plan["student_params"] + 2 * plan["teacher_params"])
        assert plan["estimate"]["a100_hours"] == pytest.approx(flops / 312e12 / 0.3 / 3600)
        assert plan["estimate"]["a100_hours"] == pytest.approx(float(stated[1]), rel=0.1)


def test_a_recipe_by_which_students_learn_to_write_resolves(dry_run, tmp_path):
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12}
    BertConfig(**sizes, architectures=["BertModel"]).save_pretrained(tmp_path)
    plan = dry_run("minilm/finetune-xsum", "--student.model", str(tmp_path), ranks=8)
    assert plan["config"]["data"]["task"]["writing"]["beams"] == 5
