"""``llmdistill recipes``: the shipped recipes, a line each, or one as it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from jsonargparse import ArgumentParser

from llmdistill.config.command_line import parse
from llmdistill.config.recipes import RECIPES, recipe_names, recipe_path
from llmdistill.messages import print_result


def recipes(arguments: Sequence[str]) -> None:
    """List the recipes, or print one; raise UserError if there is no such recipe."""
    parser = ArgumentParser(
        prog="llmdistill recipes",
        exit_on_error=False,
        description="List the shipped recipes, or show one of them: it can be run as it is (--recipe NAME), with "
        "single settings changed on the command line, or be extended by one of your own (extends: NAME).",
    )
    parser.add_argument("name", nargs="?", help="Show this recipe: a shipped one, or a file.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")
    parsed = parse(parser, arguments)
    if parsed.name is not None:
        text = recipe_path(parsed.name).read_text(encoding="utf-8")
        print_result({"name": parsed.name, "text": text} if parsed.json else text.rstrip("\n"))
        return
    sentences = {name: about(RECIPES / f"{name}.yaml") for name in recipe_names()}
    if parsed.json:
        print_result(sentences)
        return
    width = max(map(len, sentences)) + 2
    print_result("\n".join(f"{name:{width}}{text}" for name, text in sentences.items()))
    print_result(
        "\nllmdistill recipes NAME shows one; llmdistill train --recipe NAME --dry_run says what it would run."
    )


def about(file: Path) -> str:
    """Return the first sentence of the comment that a recipe begins with."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = lines[: next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))]
    text = " ".join(line.lstrip("#").strip() for line in comment)
    return re.split(r"(?<=\.)\s", text, maxsplit=1)[0].rstrip(".")
