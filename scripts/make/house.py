"""Measures how much of the package a reader must hold in mind: python scripts/make/house.py [--calls] [--list NAME].

The figures are counted in the code's own text. `--calls` also trains the quick start for a step and counts the calls of
this package above the backward pass and from a step to a divergence; it takes half a minute. `--list` shows what one of
the figures is made of.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tempfile
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "llmdistill"
FILES = sorted(
    path for path in PACKAGE.rglob("*.py") if not path.read_text(encoding="utf-8").startswith('"""The old name of')
)
FEATURES = {
    "student.quantize": r"student\.quantize|QuantizeConfig|models\.quantized|FewBits\b",
    "teacher.quantize": r"teacher\.quantize|one\.quantize|TeacherBits|RoundedSource",
    "on-policy": r"on_policy|OnPolicy|[Rr]ollout|\"samples\"\]|labels_are.*\"samples\"",
    "teacher.url": r"teacher\.url|RemoteTeacher|TeacherServer|ServerSource",
    "visible_until": r"visible_until",
    "several teachers": r"teacher\.others|Several(Heads|Source)|JointRows|AveragedTeachers|TeachersOfRows"
    r"|(?<!self\.)teachers?\.average\b",
}
"""An optional feature, and what a file that knows of it says: its setting, or a name of its code.

models/rounding.py, which both kinds of quantize use, speaks of neither. In report/results.py self.teacher.average is
an average of scores.
"""
HOMES = ("cache", "answers", "sentences", "windows", "chunks", "artifacts", "card", "checkpoints")
PARAMETERS = 7
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def place(path: Path, node: ast.AST | None = None) -> str:
    line = "" if node is None else f":{getattr(node, 'lineno', 0)}"
    return f"{path.relative_to(ROOT)}{line}"


def functions() -> Iterator[tuple[Path, Function]]:
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, Function):
                yield path, node


def parameters(function: Function) -> list[str]:
    """The parameters of a function, without self and cls."""
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def of_features() -> dict[str, list[str]]:
    texts = {path: path.read_text(encoding="utf-8") for path in FILES}
    return {
        f"files that speak of {name}": [place(path) for path, text in texts.items() if re.search(pattern, text)]
        for name, pattern in FEATURES.items()
    }


def wide_functions() -> tuple[list[str], list[str]]:
    """The functions with many parameters, and apart from them the Triton kernels with as many."""
    others, kernels = list[str](), list[str]()
    for path, function in functions():
        if len(parameters(function)) >= PARAMETERS:
            is_kernel = any("triton.jit" in ast.unparse(each) for each in function.decorator_list)
            (kernels if is_kernel else others).append(f"{place(path, function)} {function.name}")
    return others, kernels


def with_world() -> list[str]:
    return [f"{place(p, f)} {f.name}" for p, f in functions() if "world" in parameters(f)]


def private_once() -> tuple[list[str], list[str], int]:
    """The private functions and methods that one place of the package uses, those that it calls, and the number of all.

    The others of the first list cannot be inlined: they are handed over, as a hook, an entry of a table or the work of
    a rank, or a decorator caches them or makes them a context.
    """
    used, called = Counter[str](), Counter[str]()
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                used[name_of(node)] += 1
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                called[name_of(node.func)] += 1
    private = [(p, f) for p, f in functions() if f.name.startswith("_") and not f.name.startswith("__")]
    once = [(p, f) for p, f in private if used[f.name] == 1]
    inline = [(p, f) for p, f in once if called[f.name] == 1 and not f.decorator_list]
    names, inlinable = ([f"{place(p, f)} {f.name}" for p, f in each] for each in (once, inline))
    return names, inlinable, len(private)


def name_of(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def imports(path: Path) -> set[Path]:
    """The files of the package that a file imports, also in functions and behind TYPE_CHECKING."""
    files = set[Path]()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "llmdistill":
            for alias in node.names:
                # The name is a module, or else something in one; the public names of the package itself are left out.
                names = [f"{node.module}.{alias.name}", *([node.module] if node.module != "llmdistill" else [])]
                bases = [ROOT / Path(*name.split(".")) for name in names]
                candidates = (file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py"))
                files |= {file for file in [next((file for file in candidates if file in FILES), None)] if file}
    return files


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def circles(name: Callable[[Path], str]) -> list[str]:
    """The rooms or files that import each other, directly or around; `name` is that of a file, or of its room."""
    graph = defaultdict[str, set[str]](set)
    for path in FILES:
        graph[name(path)] |= {name(file) for file in imports(path)} - {name(path)}
    reach: dict[str, set[str]] = {}
    for start in graph:
        reach[start], left = {start}, [start]
        while left:
            new = graph[left.pop()] - reach[start]
            reach[start] |= new
            left += new
    groups = {frozenset(b for b in graph if b in reach[a] and a in reach[b]) for a in graph}
    return [" ".join(sorted(group)) for group in groups if len(group) > 1]


def homes() -> dict[str, list[str]]:
    found = dict[str, list[str]]()
    for word in HOMES:
        stem = word.rstrip("s")
        found[f"homes of {word}"] = [
            place(each)
            for each in (*FILES, *(path for path in PACKAGE.rglob("*") if path.is_dir()))
            if re.search(rf"(^|_){stem}(s|d)?(_|$)", each.stem) and each.parent.stem != "commands"
        ]
    return found


def private_attributes() -> list[str]:
    """Private names of other libraries: those that are read or set on an object, and that no file here defines."""
    own, found = set[str](), list[str]()
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, Function | ast.ClassDef):
                own.add(node.name)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("self", "cls")
            ):
                own.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            is_private = isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr) and node.attr not in own
            if is_private and node.attr not in ("_replace", "_asdict", "_fields", "_exit"):  # documented all the same
                found.append(f"{place(path, node)} {ast.unparse(node)}")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
                named = ast.unparse(node.args[1]).strip("'")
                if re.match(r"_[a-z]", named) and named not in own:
                    found.append(f"{place(path, node)} {ast.unparse(node)}")
            elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("llmdistill"):
                names = [each.name for each in node.names if each.name.startswith("_") or "._" in f".{node.module}"]
                found += [f"{place(path, node)} {node.module}.{name}" for name in names if node.module != "__future__"]
    return found


def follow(start: str, name: str) -> list[str]:
    """The functions to which a parameter of a function is handed on, by that name or another, and theirs.

    An attribute of a class that keeps it (`self.plan`) ends the way.
    """
    places = {(path, each.name): each for path, each in functions()}
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in FILES}
    stops, left = list[str](), [(ROOT / start.split(":")[0], start.split(":")[1], name)]
    seen = set[tuple[Path, str, str]]()
    while left:
        path, function, held = left.pop()
        node = places.get((path, function))
        if node is None or (path, function, held) in seen:
            continue
        seen.add((path, function, held))
        stops.append(f"{place(path, node)} {function}({held})")
        known = {
            alias.asname or alias.name: (
                modules.get(each.module),
                modules.get(f"{each.module}.{alias.name}"),
                alias.name,
            )
            for each in ast.walk(tree_of(path))
            if isinstance(each, ast.ImportFrom) and each.module
            for alias in each.names
        }
        for call in (each for each in ast.walk(node) if isinstance(each, ast.Call)):
            target, callee = path, ""
            if isinstance(call.func, ast.Name):
                target, _, callee = known.get(call.func.id, (path, None, call.func.id))
            elif isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
                first, module, alias = known.get(call.func.value.id, (None, None, ""))
                target, callee = module or first, call.func.attr
                if module is None and (first, "of") in places and alias:
                    callee = call.func.attr
            reached = places.get((target, callee)) if target is not None else None
            if reached is None:
                continue
            taken = [each.arg for each in reached.args.args if each.arg not in ("self", "cls")]
            for number, argument in enumerate(call.args):
                if isinstance(argument, ast.Name) and argument.id == held and number < len(taken):
                    left.append((target, callee, taken[number]))
            for keyword in call.keywords:
                if isinstance(keyword.value, ast.Name) and keyword.value.id == held and keyword.arg:
                    left.append((target, callee, keyword.arg))
    return stops


def calls() -> dict[str, list[str]]:
    """Train the quick start for a step; the calls of this package above the backward pass and above a divergence."""
    import deepspeed

    from llmdistill.losses import divergence
    from llmdistill.train import main

    found = dict[str, list[str]]()

    def watched(name: str, real):  # type: ignore[no-untyped-def]
        def call(*given, **named):  # type: ignore[no-untyped-def]
            frames = [each for each in traceback.extract_stack() if each.filename.startswith(str(PACKAGE))]
            names = [frame.name for frame in frames]
            if name == "calls from train_step to a divergence":
                # The last of these frames is the divergence itself, and is called as engine.backward is.
                frames = frames[names.index("train_step") : -1]
            found.setdefault(
                name, [f"{Path(each.filename).relative_to(ROOT)}:{each.lineno} {each.name}" for each in frames]
            )
            return real(*given, **named)

        return call

    engine = deepspeed.runtime.engine.DeepSpeedEngine
    engine.backward = watched("calls above engine.backward", engine.backward)
    # The formula of reverse_kl calls that of forward_kl, and has no shorter path on a CPU as forward_kl itself has.
    divergence.forward_kl = watched("calls from train_step to a divergence", divergence.forward_kl)
    with tempfile.TemporaryDirectory() as folder:
        words = (
            f"--recipe quickstart --ds_config {ROOT}/ds_configs/zero2.json --output_dir {folder}/run --train.steps 1"
        )
        words += " --scoring.models [] --student.factorize.weighting none --method kd --kd.divergence reverse_kl"
        main(words.split())
    return found


def measure() -> dict[str, list[str]]:
    """The figures, each as the list of what is counted."""
    once, inline, private = private_once()
    wide, kernels = wide_functions()
    start = next((each for each in ("training/job.py", "run/job.py") if (PACKAGE / each).is_file()), "")
    return {
        "files": [place(path) for path in FILES],
        **of_features(),
        f"functions with {PARAMETERS} or more parameters, Triton kernels apart": wide,
        f"Triton kernels with {PARAMETERS} or more parameters": kernels,
        "functions that take world": with_world(),
        f"private functions used once (of {private})": once,
        "of these called there, and not decorated": inline,
        "circles of rooms": circles(room),
        "circles of files, with imports in functions": circles(place),
        **homes(),
        "private names of other libraries": private_attributes(),
        "stops of the plan from run_claimed": follow(f"llmdistill/{start}:run_claimed", "plan"),
    }


def main_() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="also count calls, by training for a step")
    parser.add_argument("--list", metavar="NAME", help="show what the figures with this in their name are made of")
    parser.add_argument("--json", action="store_true", help="print the numbers as one JSON object")
    options = parser.parse_args()
    figures = measure() | (calls() if options.calls else {})
    if options.json:
        print(json.dumps({name: len(each) for name, each in figures.items()}))
    for name, each in figures.items() if not options.json else ():
        rooms = {Path(one.split(":")[0]).parts[1] for one in each if "/" in one}
        print(f"{len(each):5}  {name}" + (f" ({len(rooms)} rooms)" if name.startswith("stops") else ""))
        if options.list and options.list in name:
            print("\n".join(f"         {one}" for one in each))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main_()
