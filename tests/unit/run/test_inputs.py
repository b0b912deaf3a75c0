"""Models and data in memory that a call from Python keeps in the run's folder."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from damage import damage, flip, kinds
from transformers import AutoModelForCausalLM

from llmdistill.errors import UserError
from llmdistill.models.load import load_model
from llmdistill.run.inputs import Given

ROWS = [{"instruction": f"Where is {n}?", "output": f"In town {n % 3}."} for n in range(4)]


@pytest.fixture
def saved(base, tmp_path):
    """Saves what a call is given, as each call does; returns the folder."""
    model = AutoModelForCausalLM.from_pretrained(base / "teacher")
    given = Given(model, None, ROWS, ROWS[:2], {}, None, {"zero_optimization": {"stage": 1}})

    def save() -> Path:
        given.saved(given.first_config({"method": "kd", "student.factorize.rank": 4}, {}, tmp_path / "run"))
        return tmp_path / "run" / "inputs"

    return save


def test_every_kind_of_file_is_checked_by_the_same_call_or_written_again(saved):
    inputs = saved()
    assert saved() == inputs
    found = kinds(inputs)
    assert {"teacher-N/model.safetensors", "teacher-N/tokenizer.json", "data-N.jsonl", "ds_config.json"} <= found.keys()
    for kind, files in found.items():
        for file in files:
            before = file.read_bytes()
            with damage(file):
                if kind == "ds_config.json":
                    assert file.read_bytes() != before
                    saved()
                    assert file.read_bytes() == before
                else:
                    with pytest.raises(UserError, match=rf"^{re.escape(str(file))}.*; remove .*, and the same call"):
                        saved()


def test_the_remedy_works_and_whoever_loads_the_model_sees_the_damage(saved):
    inputs = saved()
    (teacher,) = inputs.glob("teacher-*")
    with flip(teacher / "model.safetensors", -1), pytest.raises(UserError, match=r"model\.safetensors changed after"):
        load_model(teacher, dtype="auto")
    for path in inputs.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    saved()
    assert load_model(teacher, dtype="auto") is not None
