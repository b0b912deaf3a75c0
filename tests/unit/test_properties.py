"""Whatever a user gives is taken, or refused in one sentence: no traceback, no hang, nothing written.

LLMDISTILL_CASES=400 tries more than 10,000 inputs; the number is printed (with -n 0).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import yaml
from hostile import SEEDS, TEXTS, VALUES, damaged, outcome, tried, tries
from readers import READERS, read_ds

from llmdistill.config import FactorizeConfig, RunConfig
from llmdistill.config.cache import CacheConfig
from llmdistill.config.command_line import build, changed, checked, parse_run, run_parser
from llmdistill.config.generation import ResponseConfig
from llmdistill.config.machine import MachineConfig
from llmdistill.config.tasks import FineTuningConfig
from llmdistill.data.examples import parse_row
from llmdistill.data.sources import examples_of, open_rows
from llmdistill.embedded import locate
from llmdistill.factorize.sizes import summarize
from llmdistill.methods import METHODS
from llmdistill.methods.layers import parse_layers
from llmdistill.models.layer_maps import mapped_layers
from llmdistill.models.shapes import parse_shape
from llmdistill.runtime.ds_config import SHIPPED
from llmdistill.tasks import squad_files, task_key

pytestmark = pytest.mark.slow

DS = ("--ds_config", "zero2")


@pytest.fixture(scope="module", autouse=True)
def _say_how_many(request: pytest.FixtureRequest) -> Iterator[None]:
    """Print how many cases were tried."""
    yield
    plugins = request.config.pluginmanager
    with plugins.get_plugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{tried['cases']:,} inputs tried, of which {tried['refused']:,} were refused by a sentence")


# What is set, in a recipe, on the command line and in Python.


@cache
def keys() -> list[str]:
    """Every setting and section of a run."""
    options = [option for action in run_parser(METHODS)._actions for option in action.option_strings]
    return [option.removeprefix("--") for option in options if option.startswith("--") and option != "--help"]


def nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


@tries(share=0.25, data=st.data())
def test_recipes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from([*keys(), "data.tests.mine", "train.stepz", "a.b"]))
    text = yaml.safe_dump({"extends": "quickstart", **nested(key, data.draw(VALUES))}, allow_unicode=True)
    file = tmp_path_factory.getbasetemp() / "recipe.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    outcome(lambda: parse_run([*DS, "--recipe", str(file)], METHODS))


@tries(share=0.5, data=st.data())
def test_command_lines(data: st.DataObject) -> None:
    flag = st.builds("--{}".format, st.sampled_from([*keys(), "data.tests.a/b", "train.stepz", "", "-"]))
    words = data.draw(st.lists(st.one_of(flag, st.sampled_from(TEXTS)), max_size=4))
    if not {"--print_config", "--help", "-h"} & {word.split("=")[0] for word in words}:
        outcome(lambda: parse_run([*DS, *words], METHODS))


def sections(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each section of a configuration with its defaults, by its key."""
    yield prefix, kind
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.default_factory):
            yield from sections(field.default_factory(), f"{prefix}{field.name}.")


SECTIONS = [
    *(each for _, each in sections(RunConfig(ds_config="zero2")) if not isinstance(each, RunConfig)),
    *(entry.settings() for entry in METHODS.values() if entry.settings is not None),
    *(ResponseConfig(), CacheConfig(), MachineConfig(), FineTuningConfig(model="m", teacher="t")),
]
"""All settings that have numbers."""


@tries(data=st.data())
def test_values_of_every_section(data: st.DataObject) -> None:
    section = data.draw(st.sampled_from(SECTIONS))
    names = [field.name for field in dataclasses.fields(section) if field.name != "method_settings"]
    values = data.draw(st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=2))
    outcome(lambda: changed(section, values, key="section"))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda each: type(each).__name__)
def test_no_number_is_without_bounds(section: Any) -> None:
    for name, value in dataclasses.asdict(section).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            for number in (float("nan"), float("inf"), float("-inf"), 10**400):
                values = {**dataclasses.asdict(section), name: number}
                said = outcome(partial(build, values, type(section), prefix="section."))
                assert said is not None, f"{name} takes {number}"
                assert name in said


# DeepSpeed's configuration.


def places(block: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in block.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from places(value, (*above, key))


BLOCKS = ("aio", "flops_profiler", "timers", "comms_logger", "wandb", "checkpoint", "data_types", "compile", "fp16")


@tries(data=st.data())
def test_ds_configs(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    config = json.loads((SHIPPED / f"{data.draw(st.sampled_from(['zero2', 'zero3_offload']))}.json").read_text())
    *above, key = data.draw(st.sampled_from([*places(config), *((each,) for each in BLOCKS), ("steps_per_print",)]))
    block = config
    for name in above:
        block = block[name]
    block[data.draw(st.sampled_from([key, key, f"{key}s", key[:-1]]))] = data.draw(VALUES)
    file = tmp_path_factory.getbasetemp() / "ds.json"
    try:
        file.write_text(json.dumps(config))
    except ValueError:  # json writes no number of more than 4,300 digits
        return
    outcome(lambda: read_ds(file))


# Settings whose text has a form of its own: sizes, shapes and layers.


def planned(**settings: Any) -> None:
    summarize(locate("embedded:teacher"), FactorizeConfig(**settings), "kronecker" if "shapes" in settings else "svd")


FORMS: dict[str, Callable[[str], Any]] = {
    "shape": parse_shape,
    "layers of a copy": lambda text: mapped_layers(text, student_depth=3, teacher_depth=6, key="student.layers"),
    "layers of a method": lambda text: parse_layers(text, 6, key="makd.layers"),
    "memory": lambda text: checked(MachineConfig, {"gpu_memory": text}),
    "target_params": lambda text: planned(target_params=text),
    "ranks": lambda text: planned(ranks={text: 4}),
    "shapes": lambda text: planned(shapes={"*": text}),
    "max_flops": lambda text: planned(shapes={"*": "2x2"}, max_flops=text),
    "task": task_key,
}
PARTS = [*("9" * 5_000, "9" * 400, "12", "0", "-1", "1.5", "²", "٣"), *("x", ",", "-", "%", "B", "GB", "MiB", " ", "*")]


@pytest.mark.parametrize("name", FORMS)
@tries(share=0.5, parts=st.lists(st.sampled_from(PARTS), max_size=6))
def test_texts_with_a_form(name: str, parts: list[str]) -> None:
    outcome(lambda: FORMS[name]("".join(parts)))


# Rows.

TURN = st.fixed_dictionaries({}, optional={"role": st.sampled_from(["user", "assistant", 3]), "content": VALUES})
ROW = st.dictionaries(
    st.sampled_from(["instruction", "input", "output", "prompt", "completion", "messages", "conversations", "text"]),
    st.one_of(VALUES, st.lists(TURN, max_size=3), st.text(max_size=9)),
    max_size=4,
)


@tries(share=4, row=ROW)
def test_rows(row: dict[str, Any]) -> None:
    outcome(lambda: parse_row(row, "data:1"))


@tries(share=2, data=st.lists(st.one_of(ROW, VALUES), max_size=3))
def test_rows_in_memory(data: list[Any]) -> None:
    outcome(lambda: examples_of(data))


@tries(share=4, row=st.dictionaries(st.sampled_from(["id", "question", "context", "answers"]), VALUES))
def test_questions(row: dict[str, Any]) -> None:
    outcome(lambda: squad_files._question(row, "here"))


# Files, of which some bytes are changed.


@pytest.mark.parametrize("name", READERS)
def test_files_as_they_are(name: str, tmp_path: Path) -> None:
    path = READERS[name].write(tmp_path)
    assert outcome(lambda: READERS[name].read(path)) is None


@pytest.mark.parametrize("name", READERS)
@tries(seed=SEEDS, number=st.integers(0, 2))
def test_damaged_files(name: str, tmp_path_factory: pytest.TempPathFactory, seed: int, number: int) -> None:
    reader = READERS[name]
    folder = tmp_path_factory.getbasetemp() / "damaged" / name
    path = reader.write(folder, number, lambda content: damaged(content, seed))
    outcome(lambda: reader.read(path))
    assert {each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file()} == reader.files.keys()


@tries(share=3, reference=st.sampled_from(TEXTS))
def test_names_of_data(reference: str) -> None:
    if reference != "a/b":  # a name on the hub
        outcome(lambda: list(open_rows(reference, streaming=True)))
