"""Writes docs/messages.md, the table of every message that llmdistill raises: python scripts/messages.py

    python scripts/messages.py                    # after any change of a message; a test compares page and code
    LLMDISTILL_MESSAGES=/tmp/raised python -m pytest -n 2 tests/unit
    python scripts/messages.py --raised /tmp/raised        # which of them these tests raised, and which not

The messages are read from the syntax trees, nothing is imported. A value is shown by the name that it has in the code;
where the code gives a text for it (a remedy that a caller passes, say), that text stands below the message.
"""

from __future__ import annotations

import argparse
import ast
import builtins
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "messages.md"
KINDS = ("UserError", "FieldError", "JSONDecodeError", "ValueError", "RuntimeError")
"""Exceptions with a message. AssertionError is for errors of ours."""
PARTS = {
    "config": "Settings: recipes and the command line",
    "data": "Data: instructions, texts and tokens",
    "tasks": "Tasks: examples and scores",
    "models": "Models, tokenizers and adapters",
    "factorize": "Factorization, calibration and export",
    "teacher": "The cache of a teacher's outputs",
    "methods": "Methods",
    "losses": "Losses",
    "runtime": "DeepSpeed, launchers and hosts",
    "run": "A run: its folder, checkpoints and numbers",
    "generation": "Generation",
    "report": "Logs and results",
    "experiments": "Comparisons and studies",
    "embedded": "The embedded world",
    "commands": "Commands",
    "": "Everywhere: files, names and records",
}
"""The folders of the package, in the order of the page."""
_DEPTH = 3
"""Calls and assignments that are followed to the text of a value."""
_INTRODUCTION = """\
# Messages

Every message that this version raises, to be searched by its fixed words. `{{name}}` stands for a value, `[...]` for
words that are not always there, and `(... | ...)` for one of several. A command prints the message as one line without
a traceback and exits with code 2; in Python it is a `UserError`, which is a `ValueError`. It says what is wrong, where
(setting, file or file:line), the value, and after the last colon or semicolon what to do. Only errors of somebody who
calls a function of ours from Python (a `ValueError` or `RuntimeError` that no setting can cause) say no more than what
is wrong. Settings get their prefix when they are printed, such as `train.`. Words of other libraries are in brackets.

Made by `python scripts/messages.py` from the code: {count} messages.
"""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One place in the code that makes an exception with words of its own."""

    file: str
    """Path within the package, such as data/sources.py."""
    lines: tuple[int, int]
    """First and last line of the statement."""
    kind: str
    text: str
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Texts that a placeholder of the message can stand for."""

    @property
    def part(self) -> str:
        """The folder of the package, "" for its own modules."""
        return self.file.partition("/")[0] if "/" in self.file else ""


@dataclass(frozen=True)
class Scope:
    """Where an expression stands: a module and, within it, a function."""

    file: str
    module: ast.Module
    function: ast.FunctionDef | None


class Code:
    """All syntax trees of the package, with what is looked up in them."""

    def __init__(self, package: Path) -> None:
        """`package` is the folder llmdistill."""
        self.modules = {
            path.relative_to(package).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
            for path in sorted(package.rglob("*.py"))
        }
        self.functions: dict[str, list[Scope]] = {}
        self.calls: dict[str, list[tuple[Scope, ast.Call]]] = {}
        self.constants: dict[str, set[str]] = {}
        for file, module in self.modules.items():
            for name, text in _constants(module).items():
                self.constants.setdefault(name, set()).add(text)
            for scope, node in _nodes(Scope(file, module, None), module):
                if isinstance(node, ast.FunctionDef):
                    self.functions.setdefault(node.name, []).append(Scope(file, module, node))
                elif isinstance(node, ast.Call):
                    self.calls.setdefault(_last(node.func), []).append((scope, node))

    def messages(self) -> list[Message]:
        """Return each message that has words of its own, in the order of files and lines."""
        found = [
            self._message(scope, node, kind) for kind in KINDS for scope, node in self.calls.get(kind, ()) if node.args
        ]
        kept = [each for each in found if has_words(each.text) or each.values]
        return sorted(kept, key=lambda each: (each.file, each.lines, each.text))

    def _message(self, scope: Scope, node: ast.Call, kind: str) -> Message:
        text = self.text(node.args[0], scope)
        values = {}
        for part in _placeholders(node.args[0]):
            texts = tuple(dict.fromkeys(each for each in self._texts(part, scope, _DEPTH) if " " in each))
            if texts and texts != (text,):
                values[_name(part)] = texts
        assert node.end_lineno is not None
        return Message(file=scope.file, lines=(node.lineno, node.end_lineno), kind=kind, text=text, values=values)

    def text(self, node: ast.expr, scope: Scope) -> str:
        """Return the text of an expression, with placeholders for what only a run knows."""
        match node:
            case ast.Constant(value=value):
                return "" if value is None else str(value)
            case ast.JoinedStr(values=values):
                return "".join(self.text(each, scope) for each in values)
            case ast.FormattedValue(value=value) if _is_text(value) or self._constant(value, scope) is not None:
                return self.text(value, scope)
            case ast.FormattedValue(value=value):
                return f"{{{_name(value)}}}"
            case ast.IfExp(body=body, orelse=orelse):
                return _either(self.text(body, scope), self.text(orelse, scope))
            case ast.BinOp(left=left, right=right, op=ast.Add()):
                return self.text(left, scope) + self.text(right, scope)
        constant = self._constant(node, scope)
        return f"{{{_name(node)}}}" if constant is None else constant

    def _constant(self, node: ast.expr, scope: Scope) -> str | None:
        """The text of a module's constant, which may be that of another module."""
        if not isinstance(node, ast.Name) or node.id in _locals(scope.function):
            return None
        own = _constants(scope.module).get(node.id)
        others = self.constants.get(node.id, set())
        return own if own is not None else next(iter(others)) if len(others) == 1 else None

    def _texts(self, node: ast.expr, scope: Scope, depth: int) -> Iterator[str]:
        """The texts that an expression can be, as far as the code tells."""
        if depth == 0:
            return
        match node:
            case ast.Constant(value=str()) | ast.JoinedStr():
                yield self.text(node, scope)
            case ast.BinOp(left=left, right=right, op=ast.Add()) if _is_text(left) or _is_text(right):
                yield self.text(node, scope)
            case ast.IfExp(body=body, orelse=orelse):
                yield from self._texts(body, scope, depth)
                yield from self._texts(orelse, scope, depth)
            case ast.BoolOp(values=values):
                for each in values:
                    yield from self._texts(each, scope, depth)
            case ast.Name(id=name):
                yield from self._texts_of_name(name, scope, depth - 1)
                if (constant := self._constant(node, scope)) is not None:
                    yield constant
            case ast.Call(func=ast.Name(id=name)) if len(self.functions.get(name, ())) == 1:
                (called,) = self.functions[name]
                for inner in ast.walk(called.function or called.module):
                    if isinstance(inner, ast.Return) and inner.value is not None:
                        yield from self._texts(inner.value, called, depth - 1)

    def _texts_of_name(self, name: str, scope: Scope, depth: int) -> Iterator[str]:
        """The texts that a function's variable is given: by an assignment, or by those who call the function."""
        if scope.function is None:
            return
        for node in ast.walk(scope.function):
            if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets):
                yield from self._texts(node.value, scope, depth)
        parameters = [each.arg for each in (*scope.function.args.args, *scope.function.args.kwonlyargs)]
        if name not in parameters or len(self.functions[scope.function.name]) > 1:
            return
        method = parameters[0] in ("self", "cls")
        for caller, call in self.calls.get(scope.function.name, ()):
            place = parameters.index(name) - method
            given = [each.value for each in call.keywords if each.arg == name]
            given += call.args[place : place + 1]
            for each in given:
                yield from self._texts(each, caller, depth)


def has_words(text: str) -> bool:
    """Whether a message has fixed words, by which it is found; one without only passes on another's."""
    depth, fixed = 0, ""
    for char in text:
        depth += (char == "{") - (char == "}")
        fixed += char if depth == 0 and char != "}" else ""
    return any(len(word) > 1 and word.isalpha() for word in fixed.replace("'", " ").replace(",", " ").split())


def _nodes(scope: Scope, node: ast.AST) -> Iterator[tuple[Scope, ast.AST]]:
    """Each node below one, with the function that it stands in."""
    for child in ast.iter_child_nodes(node):
        yield scope, child
        inner = Scope(scope.file, scope.module, child) if isinstance(child, ast.FunctionDef) else scope
        yield from _nodes(inner, child)


@cache
def _constants(module: ast.Module) -> dict[str, str]:
    """The texts that a module names."""
    return {
        node.targets[0].id: node.value.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


@cache
def _locals(function: ast.FunctionDef | None) -> frozenset[str]:
    """The names that a function gives to values of its own."""
    if function is None:
        return frozenset()
    stored = {each.id for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return frozenset(stored | {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)})


def _placeholders(node: ast.expr) -> list[ast.expr]:
    """The values of a message whose text the code may tell."""
    found: list[ast.expr] = [each.value for each in ast.walk(node) if isinstance(each, ast.FormattedValue)]
    return [each for each in found or [node] if not _is_text(each)]


def _is_text(node: ast.expr) -> bool:
    """Whether an expression is written as text, perhaps one of two."""
    if isinstance(node, ast.IfExp):
        return _is_text(node.body) and _is_text(node.orelse)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add) and _is_text(node.left) and _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _either(one: str, other: str) -> str:
    return f"({one} | {other})" if one and other else f"[{one or other}]"


def _last(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _name(node: ast.expr) -> str:
    """A word for a value: the name of the variable or field, or of what a function is given."""
    match node:
        case ast.Name(id=name):
            return name.strip("_").lower()
        case ast.Attribute(value=value, attr=attr):
            return _name(value) if attr.startswith("__") else attr.strip("_")
        case ast.Subscript(value=value) | ast.Starred(value=value) | ast.FormattedValue(value=value):
            return _name(value)
        case ast.Call(func=ast.Attribute(value=value, attr=attr), args=[]):
            return attr if _name(value) in ("self", "...") else _name(value)
        case ast.Call(func=ast.Name(id="getattr")):
            return "value"
        case ast.Call(func=ast.Name(id=name), args=[*_, last]) if name.startswith("_") or hasattr(builtins, name):
            return _name(last)
        case ast.Call(func=ast.Attribute(), args=[first, *_]):
            return _name(first)
        case ast.Call(func=func):
            return _name(func)
        case ast.GeneratorExp(elt=elt) | ast.ListComp(elt=elt):
            return _name(elt)
        case ast.BinOp(left=left, right=right):
            return _name(left) if _name(left) != "..." else _name(right)
        case ast.BoolOp(values=[first, *_]):
            return _name(first)
        case ast.IfExp(body=body, orelse=orelse):
            return _name(body) if _name(body) != "..." else _name(orelse)
    return "..."


@cache
def messages() -> list[Message]:
    """Return all messages of the package."""
    return Code(ROOT / "llmdistill").messages()


def page(found: Sequence[Message]) -> str:
    """Return the page with a table for each part."""
    lines = [_INTRODUCTION.format(count=len(found))]
    for part, title in PARTS.items():
        rows = dict.fromkeys(f"| {_cell(each)} | {each.file} |" for each in found if each.part == part)
        if rows:
            lines.append("\n".join([f"## {title}", "", "| message | raised in |", "|---|---|", *rows, ""]))
    return "\n".join(lines)


def _cell(message: Message) -> str:
    values = [f"{_code('{' + name + '}')}: {', or '.join(map(_code, texts))}" for name, texts in message.values.items()]
    return "<br>".join([_code(message.text), *values])


def _code(text: str) -> str:
    shown = text.strip().replace("\n", "\\n").replace("|", "\\|")
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"


def raised(folder: Path, found: Sequence[Message]) -> str:
    """Say which messages the tests raised that wrote into this folder (tests/noting.py)."""
    places: set[tuple[str, int]] = set()
    for file in folder.iterdir():
        for line in file.read_text(encoding="utf-8").splitlines():
            path, _, number = line.rpartition(":")
            places.add((path, int(number)))
    never = [
        each for each in found if not any((each.file, n) in places for n in range(each.lines[0] - 1, each.lines[1] + 1))
    ]
    lines = [f"{len(found) - len(never)} of {len(found)} messages were raised; never raised were:"]
    return "\n".join([*lines, *(f"  llmdistill/{each.file}:{each.lines[0]} {each.text}" for each in never)])


def main() -> None:
    """Write the page, or print what was raised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raised", type=Path, help="folder that tests wrote with LLMDISTILL_MESSAGES")
    arguments = parser.parse_args()
    if arguments.raised is not None:
        print(raised(arguments.raised, messages()))
        return
    PAGE.write_text(page(messages()), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} has {len(messages())} messages")


if __name__ == "__main__":
    main()
