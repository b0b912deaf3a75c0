"""The house: who may import whom, names that are safe when train.py runs as a script, and plain messages."""

import ast
import re
import runpy
import sys
from functools import cache
from pathlib import Path

from pages import ROOT

PACKAGE = ROOT / "llmdistill"
FILES = sorted(PACKAGE.rglob("*.py"))

LOWEST = {
    "artifacts",
    "attention_mask",
    "batch",
    "config",
    "errors",
    "files",
    "fingerprints",
    "internals",
    "memo",
    "messages",
    "objective",
    "plugins",
    "progress",
}
PARTS = {"data", "models", "students", "losses", "step", "teachers", "runtime", "generation", "tasks", "embedded"}
LEAVES = {"papers", "serving"}
FACE = {"commands", "train", "api", "cli", "factorize"}
ABOVE_PARTS = {"methods", "training", "planning", "report", "studies"} | LEAVES | FACE
FORBIDDEN = {
    **{name: PARTS | ABOVE_PARTS | LOWEST - {"errors"} for name in LOWEST},
    "artifacts": PARTS | ABOVE_PARTS | LOWEST - {"errors", "files", "fingerprints"},
    "batch": PARTS | ABOVE_PARTS | LOWEST - {"errors", "attention_mask"},
    "config": PARTS | ABOVE_PARTS | LOWEST - {"errors", "internals", "memo"},
    "fingerprints": PARTS | ABOVE_PARTS | LOWEST - {"errors", "files"},
    "objective": PARTS | ABOVE_PARTS | LOWEST - {"errors", "batch"},
    "messages": PARTS | ABOVE_PARTS | LOWEST - {"errors", "progress"},
    "plugins": PARTS | ABOVE_PARTS | LOWEST - {"messages"},
    **{name: ABOVE_PARTS for name in PARTS},
    "losses": ABOVE_PARTS | PARTS - {"losses"},
    "step": ABOVE_PARTS | {"students", "teachers", "generation", "tasks", "data"},
    "teachers": ABOVE_PARTS | {"students", "tasks"},
    "methods": ABOVE_PARTS - {"methods"} | {"runtime", "generation", "tasks", "data", "teachers", "students"},
    "report": ABOVE_PARTS - {"report"},
    "training": {"planning", "studies"} | LEAVES | FACE,
    "planning": {"studies"} | LEAVES | FACE,
    "studies": LEAVES | FACE,
    "serving": {"papers", "studies", "planning"} | FACE,
    "papers": {"serving"} | FACE,
    "commands": {"cli"},
    "train": {"commands", "api", "cli"},
}
"""Room -> the rooms it must not import."""


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imported(path: Path) -> list[str]:
    """The modules that a file imports; of the package itself the names."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = [f"llmdistill.{alias.name}" for alias in node.names]
            names += inner if node.module == "llmdistill" else [node.module]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def imported_rooms(path: Path) -> set[str]:
    """The other rooms that a file imports."""
    rooms = {name.split(".")[1] for name in imported(path) if name.startswith("llmdistill.")}
    return rooms - {room_of(path), "__version__"}


def test_imports_keep_their_direction():
    assert {room_of(path) for path in FILES} - {"__init__", "__main__"} <= LOWEST | PARTS | ABOVE_PARTS
    assert not {name.split(".")[0] for path in FILES for name in imported(path)} & {"eval", "scripts", "tests"}
    wrong = {path: imported_rooms(path) & FORBIDDEN.get(room_of(path), set()) for path in FILES}
    assert {path: rooms for path, rooms in wrong.items() if rooms} == {}


def test_rooms_have_no_circles():
    graph: dict[str, set[str]] = {}
    for path in FILES:
        graph.setdefault(room_of(path), set()).update(imported_rooms(path))
    done: set[str] = set()
    while len(done) < len(graph):
        ready = {room for room, needs in graph.items() if room not in done and needs <= done}
        assert ready, f"a circle among {sorted(set(graph) - done)}"
        done |= ready


def module_name(path: Path) -> str:
    return ".".join(part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__")


def test_files_have_no_circles():
    """Nor behind TYPE_CHECKING. Imports in functions are left out: they delay the loading of what few runs need."""
    modules, graph = {module_name(path) for path in FILES}, dict[str, set[str]]()
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        blocks = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.If))]
        froms = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom) and node.module]
        names = [(node.module, f"{node.module}.{alias.name}") for node in froms for alias in node.names]
        graph[module_name(path)] = {inner if inner in modules else outer for outer, inner in names} & modules
    done = {"llmdistill"}  # its public names are loaded when they are first used
    while len(done) < len(graph):
        ready = {name for name, needs in graph.items() if name not in done and needs <= done | {name}}
        assert ready, f"a circle among {sorted(set(graph) - done)}"
        done |= ready


def test_only_command_lines_read_what_was_typed():
    readers = {room_of(path) for path in FILES if "sys.argv" in path.read_text(encoding="utf-8")}
    assert readers <= {"train", "commands", "cli"}


def test_no_module_shadows_another_when_train_runs_as_a_script():
    third_party = {"datasets", "evaluate", "tokenizers", "accelerate", "peft", "deepspeed", "torch", "transformers"}
    own = {path.stem if path.suffix else path.name for path in PACKAGE.iterdir() if path.suffix in ("", ".py")}
    assert not own & (third_party | {"yaml", *sys.stdlib_module_names})


SCREEN = 60
"""Lines. Those of the page are renewed when they are further off than half of it, not at each commit."""

WRONG = {
    "ends like a text": r"[.!\s]$",
    "has two sentences": r"[a-z)}][.!?] +[A-Z]",
    "has more than one line": r"[\n\r\t]",
    "has two spaces": r"  ",
    "speaks of the program": r"(?i)\b(traceback|exception|stack|assert\w*|bug|oops|nonetype|internal error)\b",
    "is rude or vague": r"(?i)\b(please|sorry|invalid|illegal|bad|failed to|unable to|unexpected|something went)\b",
    "begins like a text": r"^(The|A|An|You|Your|This|It|Error|Cannot|Could|No|Missing)\b",
}
"""What no message may have."""


def text_of(node: ast.expr) -> str:
    """The words of a message, with {} for each value."""
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)


def test_a_message_is_one_plain_sentence() -> None:
    """The message of each exception that is made for a user."""
    found = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            kinds = ("UserError", "FieldError", "ValueError", "RuntimeError")
            if isinstance(node, ast.Call) and ast.unparse(node.func) in kinds and node.args:
                found[f"{path.relative_to(ROOT)}:{node.lineno}"] = text_of(node.args[0])
    assert len(found) > 300
    wrong = [(rule, place, text) for place, text in found.items() for rule in WRONG if re.search(WRONG[rule], text)]
    assert wrong == []


def test_the_page_about_the_architecture_names_what_is_there() -> None:
    """Its paths are files or folders of the package, and its tree shows each room."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    paths = re.findall(r"`([a-z_/]+(?:\.py|/))(?::\d+)?`", page)
    assert len(paths) > 40
    assert [path for path in paths if not ((PACKAGE / path).exists() or (ROOT / path).exists())] == []
    tree = page.split("```")[1]
    shown = set(re.findall(r"\b([a-z_]+)(?=/|\.py)", tree))
    assert {room_of(path) for path in FILES} - {"__init__", "__main__", "factorize"} <= shown


def test_the_page_about_the_architecture_has_the_lines_of_its_names() -> None:
    """A reader who opens the line sees the definition; scripts/make/lines.py writes the lines anew."""
    lines = runpy.run_path(str(ROOT / "scripts/make/lines.py"))
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    written, right = (lines["NAMED"].findall(text) for text in (page, lines["with_lines"](page)))
    assert len(right) > 30
    far = [
        f"{path} {name} is on line {now}"
        for (path, line, name), (_, now, _) in zip(written, right, strict=True)
        if abs(int(line or 0) - int(now)) > SCREEN // 2
    ]
    assert far == [], "run scripts/make/lines.py"
