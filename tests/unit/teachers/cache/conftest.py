"""A tiny teacher, runs that it teaches, and caches of its outputs."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from caches import SMALL, model

from llmdistill.config.command_line import parse_run
from llmdistill.config.teacher import CacheConfig
from llmdistill.methods import METHODS
from llmdistill.teachers.cache.making import make_cache
from llmdistill.training.plan import Plan, make_plan


@pytest.fixture(scope="package")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    rows = [{"instruction": f"Count {n}.", "output": " ".join("abcdefgh"[: n % 8 + 1])} for n in range(25)]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]), encoding="utf-8")  # one comes twice
    return {"teacher": model(folder / "teacher", 0), "student": model(folder / "student", 1), "data": data}


@pytest.fixture(scope="package")
def planned(files):
    """A plan with these settings, and its data; equal settings have one."""

    @functools.cache
    def make(*arguments: str) -> tuple[Plan, Any]:
        words = ["--recipe", "quickstart", "--ds_config", "zero2", "--data.train", str(files["data"])]
        words += ["--data.valid", "null", "--data.tests", "{}", "--train.dtype", "fp32", "--method", "kd"]
        words += ["--student.factorize.weighting", "none", "--student.factorize.allocation", "uniform"]
        words += ["--teacher.model", str(files["teacher"]), "--student.model", str(files["student"])]
        plan = make_plan(parse_run([*words, *arguments], METHODS)[0])
        return plan, plan.task.read(plan.models).prepare()

    return make


@pytest.fixture(scope="package")
def made(planned, tmp_path_factory):
    """The folder of a cache; equal settings are made once. It must not be changed."""
    folders: dict[Any, Path] = {}

    def make(*arguments: str, settings: CacheConfig = SMALL) -> Path:
        key = (*arguments, settings)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("cache") / "cache"
            make_cache(*planned(*arguments), settings, folders[key])
        return folders[key]

    return make


@pytest.fixture
def broken(made, tmp_path) -> Path:
    """A copy of a cache."""
    shutil.copytree(made(), tmp_path / "broken")
    return tmp_path / "broken"


@pytest.fixture(scope="package")
def text_words(tmp_path_factory) -> list[str]:
    """Settings of a text in two parts, of which one is over-sampled, with a validation text."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "parts").mkdir()
    for name, lines in {"parts/long": range(40), "parts/short": range(40, 46), "valid": range(100, 130)}.items():
        text = "\n\n".join(f"In year {n} the baker counted {'so ' * (n % 5)}{7 * n} loaves of bread." for n in lines)
        (folder / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
    words = ["--data.kind", "text", "--data.train", str(folder / "parts"), "--data.valid", str(folder / "valid.txt")]
    words += ["--data.text.sampling_exponent", "0.3", "--data.text.valid_sequences", "3"]
    return [*words, "--data.max_length", "24", "--data.cache_dir", str(folder / "tokens")]
