"""Writes the lines of what docs/architecture.md names into that page: python scripts/make/lines.py."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/architecture.md"
NAMED = re.compile(r"`([a-z_/]+\.py)(?::(\d+))?` `([\w.]+)`")
"""A file of the package, perhaps with a line, and a name that is defined in it."""


def line_of(file: Path, name: str) -> int:
    """The line on which a function, a class, a method or a name of the module is defined."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    for part in name.split("."):
        node = next((node for node in body if part in names_of(node)), None)
        assert node is not None, f"{PAGE.name}: {file.relative_to(ROOT)} defines no {name}"
        body = getattr(node, "body", [])
    return node.lineno


def names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def with_lines(page: str) -> str:
    def renew(match: re.Match[str]) -> str:
        path, _, name = match.groups()
        return f"`{path}:{line_of(ROOT / 'llmdistill' / path, name)}` `{name}`"

    return NAMED.sub(renew, page)


if __name__ == "__main__":
    PAGE.write_text(with_lines(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
