"""The recipes that ship with the package, and others by their path."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from llmdistill.errors import UserError

RECIPES = Path(str(resources.files("llmdistill") / "recipes"))
"""Folder of the shipped recipes. Files there whose name begins with _ are no recipes, only something to extend."""


def recipe_names() -> list[str]:
    """The recipes that ship with the package, those in a subfolder as FOLDER/NAME."""
    files = [path.relative_to(RECIPES) for path in RECIPES.rglob("*.yaml") if not path.name.startswith("_")]
    return sorted(file.as_posix().removesuffix(".yaml") for file in files)


def recipe_path(name_or_path: str) -> Path:
    """A shipped recipe by its name, any other by its path.

    Raises:
        UserError: there is no such recipe.
    """
    if name_or_path in recipe_names():
        return RECIPES / f"{name_or_path}.yaml"
    path = Path(name_or_path)
    if not path.is_file():
        raise UserError(
            f"--recipe {name_or_path}: neither a file nor a shipped recipe; shipped are {', '.join(recipe_names())}"
        )
    return path
