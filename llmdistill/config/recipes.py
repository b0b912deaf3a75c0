"""Finds recipes: those that ship with the package by name, others by path."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from llmdistill.config.strict import (
    TwiceError,
    UniqueKeys,
    check_keys,
    check_plain,
    check_sections,
    did_you_mean,
    flatten,
)
from llmdistill.errors import UserError

RECIPES = Path(str(resources.files("llmdistill") / "recipes"))
"""Folder of the shipped recipes. Files whose name begins with _ are no recipes; recipes extend them."""


_MOST_VALUES = 100_000


def recipe_names() -> list[str]:
    """Return the names of the shipped recipes; a recipe in a subfolder is FOLDER/NAME."""
    files = [path.relative_to(RECIPES) for path in RECIPES.rglob("*.yaml") if not path.name.startswith("_")]
    return sorted(file.as_posix().removesuffix(".yaml") for file in files)


def recipe_path(name_or_path: str) -> Path:
    """Return the path of a recipe, of a shipped one by its name. Raises UserError if it does not exist."""
    if name_or_path in recipe_names():
        return RECIPES / f"{name_or_path}.yaml"
    path = Path(name_or_path)
    if not os.path.isfile(path):  # Path.is_file raises an error for a name that is too long
        raise UserError(
            f"--recipe {name_or_path}: neither a file nor a shipped recipe; shipped are {', '.join(recipe_names())}"
            + did_you_mean(name_or_path, recipe_names())
        )
    return path


def read_layers(parser: ArgumentParser, path: Path) -> dict[Path, dict[str, Any]]:
    """Return the settings of a recipe after those of all recipes that it extends; each file overrides those before it.

    A mapping with free keys, such as data.tests, is replaced as a whole, and so is a list.

    Raises UserError if a recipe does not exist or is invalid, or recipes extend each other in a circle.
    """
    last, recipes = path, {path: _read_recipe(parser, path)}
    while (base := recipes[last].get("extends")) is not None:
        file = recipe_path(base) if base in recipe_names() else last.parent / str(base)
        if not os.path.isfile(file):
            raise UserError(
                f"{last}: extends {base}: neither a shipped recipe nor a file; give a path from this recipe's folder"
            )
        # samefile and not ==, because a path may be written in several ways.
        if any(file.samefile(other) for other in recipes):
            raise UserError(f"{last}: extends {base}, which itself builds on this one: take one extends out")
        last, recipes[file] = file, _read_recipe(parser, file)
    return dict(reversed(recipes.items()))


def _read_recipe(parser: ArgumentParser, path: Path) -> dict[str, Any]:
    """Return the settings in the file of a recipe. Raises UserError if it is not YAML or has an unknown key."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), UniqueKeys)
    except TwiceError as error:
        line = "" if error.problem_mark is None else f":{error.problem_mark.line + 1}"
        raise UserError(f"{path}{line}: {error.problem}: leave one of them out") from error
    except Exception as error:  # the readers of YAML's types raise exceptions of many types
        where = getattr(error, "problem_mark", None)
        line = f":{where.line + 1}" if where is not None else ""
        raise UserError(f"{path}{line}: not valid YAML; fix it or choose another --recipe") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a mapping of settings; write key: value, as the shipped recipes do")
    left: list[Any] = [values]
    # Walk with a limit: a YAML alias may contain itself, or a few lines of aliases may expand to billions of values.
    for _ in range(_MOST_VALUES):
        if not left:
            break
        value = left.pop()
        left += [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    else:
        raise UserError(
            f"{path}: it has more than {_MOST_VALUES} values: write those that aliases (*NAME) repeat only once"
        )
    flat = flatten(values)
    check_keys(parser, flat, where=f"{path}: ")
    check_sections(parser, flat, where=f"{path}: ")
    for key, value in flat.items():
        check_plain(value, f"{path}: {key}")
    return values
