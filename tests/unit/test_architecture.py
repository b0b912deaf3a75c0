"""The house: who may import whom, and names that are safe when train.py runs as a script."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "llmdistill"

LOWEST = {"artifacts", "batch", "config", "errors", "files", "fingerprints", "messages", "objective", "progress"}
PARTS = {"data", "models", "factorize", "losses", "teacher", "runtime", "generation", "tasks", "embedded"}
ABOVE_PARTS = {"methods", "run", "report", "experiments", "commands", "train", "api", "cli"}
FORBIDDEN = {
    **{name: PARTS | ABOVE_PARTS | LOWEST - {"errors"} for name in LOWEST},
    "artifacts": PARTS | ABOVE_PARTS | LOWEST - {"errors", "files", "fingerprints"},
    "messages": PARTS | ABOVE_PARTS | LOWEST - {"errors", "progress"},
    **{name: ABOVE_PARTS for name in PARTS},
    "losses": ABOVE_PARTS | PARTS - {"losses"},
    "methods": ABOVE_PARTS - {"methods"} | {"runtime", "generation", "tasks", "data", "teacher"},
    "report": ABOVE_PARTS - {"report"},
    "run": {"experiments", "commands", "train", "api", "cli"},
    "experiments": {"commands", "train", "api", "cli"},
    "commands": {"cli"},
    "train": {"commands", "api", "cli"},
}
"""Room -> the rooms it must not import."""


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = (
                [node.module] if node.module != "llmdistill" else [f"llmdistill.{alias.name}" for alias in node.names]
            )
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("llmdistill.")}
    return rooms


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_keep_their_direction(path):
    room = room_of(path)
    if room == "__init__":
        return
    assert not (imported_rooms(path) - {room}) & FORBIDDEN.get(room, set())


def test_every_room_is_known():
    rooms = {room_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__"}
    assert rooms <= LOWEST | PARTS | ABOVE_PARTS


def test_rooms_have_no_circles():
    graph: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        graph.setdefault(room_of(path), set()).update(imported_rooms(path) - {room_of(path), "__version__"})
    done: set[str] = set()
    while len(done) < len(graph):
        ready = {room for room, needs in graph.items() if room not in done and needs <= done}
        assert ready, f"a circle among {sorted(set(graph) - done)}"
        done |= ready


def test_only_command_lines_read_what_was_typed():
    readers = {room_of(path) for path in PACKAGE.rglob("*.py") if "sys.argv" in path.read_text(encoding="utf-8")}
    assert readers <= {"train", "commands", "cli"}


def test_library_does_not_import_programs():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in ("eval", "scripts", "tests")


def test_no_module_shadows_another_when_train_runs_as_a_script():
    third_party = {
        "datasets",
        "evaluate",
        "tokenizers",
        "accelerate",
        "peft",
        "deepspeed",
        "torch",
        "transformers",
        "yaml",
    }
    own = {path.stem if path.suffix else path.name for path in PACKAGE.iterdir() if path.suffix in ("", ".py")}
    assert not own & (third_party | set(sys.stdlib_module_names))
