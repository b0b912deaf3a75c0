"""Whatever a user gives is taken, or refused in one sentence: no traceback, no hang, nothing written.

LLMDISTILL_CASES=400 tries more than 10,000 inputs.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import yaml
from hostile import SEEDS, TEXTS, VALUES, damaged, outcome, tries
from readers import READERS

from llmdistill.config import FactorizeConfig, RunConfig
from llmdistill.config.command_line import build, build_checked, parse_run, run_parser
from llmdistill.config.generation import ResponseConfig
from llmdistill.config.machine import MachineConfig
from llmdistill.config.tasks import FineTuningConfig
from llmdistill.config.teacher import CacheConfig
from llmdistill.data.rows import parse_row
from llmdistill.data.sources import examples_of, open_rows
from llmdistill.embedded import locate
from llmdistill.methods import METHODS
from llmdistill.methods.layers import parse_layers
from llmdistill.models.layer_maps import parse_layer_map
from llmdistill.students.shapes import parse_shape
from llmdistill.students.sizes import summarize
from llmdistill.tasks import task_key

pytestmark = pytest.mark.slow

DS = ("--ds_config", "zero2")


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


def sections(kind: Any) -> Iterator[Any]:
    """Each section of a configuration with its defaults."""
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(field.default_factory):
            yield (section := field.default_factory())
            yield from sections(section)


SECTIONS = [
    *sections(RunConfig(ds_config="zero2")),
    *(entry.settings() for entry in METHODS.values() if entry.settings is not None),
    *(ResponseConfig(), CacheConfig(), MachineConfig(), FineTuningConfig(model="m", teacher="t")),
]
"""All settings that have numbers."""


@pytest.mark.parametrize("section", SECTIONS, ids=lambda each: type(each).__name__)
def test_no_number_is_without_bounds(section: Any) -> None:
    for name, value in dataclasses.asdict(section).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            for number in (float("nan"), float("inf"), float("-inf"), 10**400):
                values = {**dataclasses.asdict(section), name: number}
                said = outcome(partial(build, values, type(section), prefix="section."))
                assert said is not None, f"{name} takes {number}"
                assert name in said


# Settings whose text has a form of its own: sizes, shapes and layers.


def planned(**settings: Any) -> None:
    summarize(locate("embedded:teacher"), FactorizeConfig(**settings), "kronecker" if "shapes" in settings else "svd")


FORMS: dict[str, Callable[[str], Any]] = {
    "shape": parse_shape,
    "layers of a copy": lambda text: parse_layer_map(text, student_depth=3, teacher_depth=6, key="student.layers"),
    "layers of a method": lambda text: parse_layers(text, 6, key="makd.layers"),
    "memory": lambda text: build_checked(MachineConfig, {"gpu_memory": text}),
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
