"""From a recipe and a command line to a configuration, strictly: an unknown key stops and names the nearest."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from llmdistill.config import RunConfig
from llmdistill.config.methods import MethodInfo, MethodTable
from llmdistill.config.recipes import recipe_names, recipe_path
from llmdistill.errors import FieldError, UserError

DEFAULT_RECIPE = "quickstart"

set_parsing_settings(docstring_parse_attribute_docstrings=True)

_Config = TypeVar("_Config")

_EXTENDS = (
    "Only in a recipe: the one it builds on, a shipped one's name or a path seen from its file; its own settings win."
)


def run_parser(methods: MethodTable) -> ArgumentParser:
    """The parser of the main job: every setting of a run and its methods, and the flags that are not settings."""
    return _run_parser(tuple(methods.items()))


@cache
def _run_parser(methods: tuple[tuple[str, MethodInfo], ...]) -> ArgumentParser:
    parser = ArgumentParser(
        prog="llmdistill/train.py",
        usage="deepspeed [--num_gpus N] llmdistill/train.py --ds_config FILE [--recipe NAME] [--KEY VALUE ...]",
        exit_on_error=False,
        description="Distil a teacher into a smaller student under DeepSpeed. "
        "Any setting below may stand in a recipe (YAML) or on the command line; the command line wins.",
    )
    text = f"A shipped recipe's name or a YAML file; default: {DEFAULT_RECIPE}."
    parser.add_argument("--recipe", action="config", help=text)
    parser.add_argument("--extends", type=str | None, help=_EXTENDS)
    parser.add_argument("--dry_run", action="store_true", help="Resolve everything without weights or data, and stop.")
    parser.add_argument("--json", action="store_true", help="With --dry_run: print one JSON object.")
    parser.add_argument(
        "--local_rank", type=int, help=argparse.SUPPRESS
    )  # given by the launcher; the environment says it too
    add_config(parser, RunConfig, dict(methods))
    return parser


def add_config(parser: ArgumentParser, kind: type[Any], methods: MethodTable) -> None:
    """Add all settings of a configuration that has methods: its fields, and a section for each method's own."""
    parser.add_class_arguments(kind, None, skip={"method_settings"})
    (action,) = (action for action in parser._actions if action.dest == "method")
    listed = "; ".join(f"{name}: {method.help}" for name, method in methods.items())
    action.help = f"{action.help} {listed}."
    for name, settings in _sections(methods):
        parser.add_class_arguments(settings, name)


def parse_run(arguments: Sequence[str], methods: MethodTable) -> tuple[RunConfig, argparse.Namespace]:
    """Read the main job's command line.

    Args:
        arguments: the command line.
        methods: all that there are, by name.

    Returns the configuration, and the flags ``recipe``, ``dry_run`` and ``json``.

    Raises:
        UserError: an unknown key, a value that does not fit, a recipe that does not exist.
    """
    arguments = list(arguments)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--recipe", default=DEFAULT_RECIPE)
    first.add_argument("--extends")
    # The recipe first, wherever it stands, so that the command line always wins over it.
    flags, rest = first.parse_known_args(arguments)
    if flags.extends is not None:
        raise UserError(f"--extends {flags.extends}: that is for recipes; give --recipe {flags.extends} instead")
    path = recipe_path(flags.recipe)
    parser = run_parser(methods)
    recipes = [argument for file in extended(parser, path) for argument in ("--recipe", str(file))]
    parsed = parse(parser, [*recipes, *rest])
    if parsed.output_dir is None:
        name = flags.recipe if flags.recipe in recipe_names() else path.stem
        parsed.output_dir = f"runs/{name}-{Path(parsed.ds_config).stem}"
    recipe = argparse.Namespace(recipe=flags.recipe, dry_run=parsed.dry_run, json=parsed.json)
    return build(parsed, RunConfig, methods), recipe


def typed_command(script: str, arguments: Sequence[str]) -> str:
    """What a user types to start a script with these arguments on as many ranks as there are, ready for a shell."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    words = [word for word in arguments if not word.startswith("--local_rank")]
    return shlex.join(["deepspeed", *(["--num_gpus", ranks] if int(ranks) > 1 else []), script, *words])


def parse(parser: ArgumentParser, arguments: Sequence[str]) -> Any:
    """`parser.parse_args` with its errors as one sentence; a list may be written `a,b` or `[a,b]`.

    Raises:
        UserError: an unknown key or a value that does not fit.
    """
    known = _keys(parser)
    for argument in arguments:
        if argument.startswith("--") and argument != "--":
            key = argument[2:].split("=")[0]
            if key not in ("help", "print_config") and not _is_known(key, known):
                raise UserError(f"--{key}: there is no such setting{_nearest(key, known, '--')}")
    try:
        return parser.parse_args(_bracketed(parser, arguments))
    except (ArgumentError, ValueError, TypeError) as error:
        raise UserError(one_sentence(str(error))) from error


def _bracketed(parser: ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """The arguments with `a,b` as `[a,b]` behind the flags whose settings are lists."""
    flags = {
        flag
        for action in parser._actions
        for flag in action.option_strings
        if _is_list(getattr(action, "_typehint", None))
    }
    words: list[str] = []
    for word in arguments:
        flag, equals, value = word.partition("=")
        if equals and flag in flags:
            words.append(f"{flag}={_as_list(value)}")
        else:
            words.append(_as_list(word) if words and words[-1] in flags else word)
    return words


def _is_list(hint: Any) -> bool:
    """Whether a type is a list, or a list or None; one that may also be a text is not."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return {get_origin(kind) for kind in kinds if kind is not NoneType} == {list}


def _as_list(value: str) -> str:
    return value if value.startswith(("[", "--")) or value == "null" else f"[{value}]"


def build(parsed: Any, kind: type[_Config], methods: MethodTable | None = None, *, prefix: str = "") -> _Config:
    """The frozen configuration of a parsed command line, nested parts included.

    Args:
        parsed: what the parser gave.
        kind: the configuration.
        methods: of one that `add_config` added, the same methods.
        prefix: what the user types before a field's name, for messages.

    Raises:
        UserError: settings that contradict each other.
    """
    own = [field for field in fields(kind) if methods is None or field.name != "method_settings"]  # type: ignore[arg-type]
    values = {field.name: _part(field, getattr(parsed, field.name), prefix) for field in own}
    if methods is not None:
        values["method_settings"] = {
            name: build(getattr(parsed, name), kind, prefix=f"{prefix}{name}.") for name, kind in _sections(methods)
        }
    return checked(kind, values, methods, prefix=prefix)


def checked(
    kind: type[_Config], values: Mapping[str, Any], methods: MethodTable | None = None, *, prefix: str = ""
) -> _Config:
    """A configuration with the values of its fields.

    Raises:
        UserError: settings that contradict each other.
    """
    try:
        config: Any = kind(**values)
        if methods is not None:
            config.check_methods(methods)
    except FieldError as error:
        raise UserError(f"{prefix}{error}") from error
    except ValueError as error:
        raise UserError(str(error)) from error
    return cast(_Config, config)


def _sections(methods: MethodTable) -> list[tuple[str, type[Any]]]:
    """The methods that have settings, and the settings' types."""
    return [(name, method.settings) for name, method in methods.items() if method.settings is not None]


def _part(field: Field[Any], value: Any, prefix: str) -> Any:
    """A field's value; the parts of a configuration name their type in their default factory."""
    if not is_dataclass(field.default_factory):
        return value
    return build(value, field.default_factory, prefix=f"{prefix}{field.name}.")


def changed(section: _Config, values: Mapping[str, Any], *, key: str) -> _Config:
    """A part of a configuration with some of its values changed, checked as those of a recipe are.

    Args:
        section: the part.
        values: what changes.
        key: where they stand, for messages; empty for names that stand by themselves.

    Raises:
        UserError: an unknown key, or a value that does not fit.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(type(section), None)
    prefix = f"{key}." if key else ""
    check_keys(parser, values, prefix=prefix)
    try:
        parsed = parser.parse_object({**asdict(section), **values})  # type: ignore[call-overload]
    except (ArgumentError, ValueError, TypeError) as error:
        raise UserError(f"{prefix}{one_sentence(str(error))}") from error
    return build(parsed, type(section), prefix=prefix)


def check_keys(parser: ArgumentParser, keys: Iterable[str], *, prefix: str = "") -> None:
    """Refuse what no setting of the parser is called.

    Raises:
        UserError: with the key, behind the prefix, and the nearest known one.
    """
    known = _keys(parser)
    for key in keys:
        if not _is_known(key, known):
            raise UserError(f"{prefix}{key}: there is no such setting{_nearest(key, known, prefix)}")


def set_value(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a value of a configuration as plain JSON values.

    Args:
        values: as `to_dict` gives them.
        key: dotted.
        value: the new one.

    Raises:
        UserError: there is no such setting.
    """
    *parents, name = key.split(".")
    block: Any = values
    for parent in parents:
        block = block.get(parent) if isinstance(block, dict) else None
    if not isinstance(block, dict) or name not in block:
        raise UserError(f"{key}: there is no such setting{_nearest(key, dict.fromkeys(_flatten(values), False), '')}")
    block[name] = value


def extended(parser: ArgumentParser, path: Path) -> list[Path]:
    """A recipe and all that it extends, the last of them first: each one's settings win over those before it.

    A mapping with free keys, such as data.tests, is replaced as a whole, and so is a list.

    Raises:
        UserError: a recipe that is not there or not right, or that extends itself by way of others.
    """
    files = [path]
    while (base := check_recipe(parser, files[0]).get("extends")) is not None:
        file = recipe_path(base) if base in recipe_names() else files[0].parent / str(base)
        if not file.is_file():
            raise UserError(f"{files[0]}: extends {base}: neither a shipped recipe nor a file, seen from this recipe")
        if any(file.samefile(other) for other in files):
            raise UserError(f"{files[0]}: extends {base}, which itself builds on this one: take one extends out")
        files.insert(0, file)
    return files


def check_recipe(parser: ArgumentParser, path: Path) -> dict[str, Any]:
    """The settings of a recipe's own file, if it is YAML and has no key that no setting has.

    Raises:
        UserError: with the file, the key and the nearest known one.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f":{where.line + 1}" if where is not None else ""
        raise UserError(f"{path}{line}: not valid YAML; mend it or choose another --recipe") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: a recipe is a mapping of settings, as in the shipped ones; this is not")
    known = _keys(parser)
    for key in _flatten(values):
        if not _is_known(key, known):
            raise UserError(f"{path}: {key}: there is no such setting{_nearest(key, known, '')}")
    return values


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain JSON values, the settings of each method under its name."""
    values = asdict(config)
    values |= values.pop("method_settings")
    values["train"]["betas"] = list(values["train"]["betas"])
    return values


def config_from_dict(values: Mapping[str, Any], methods: MethodTable) -> RunConfig:
    """The configuration that `to_dict` gave, with the checks of its parts.

    Raises:
        UserError: settings that contradict each other.
    """
    built = _parts(RunConfig, {name: value for name, value in values.items() if name not in methods})
    built["method_settings"] = {
        name: _from_dict(kind, values.get(name, {}), f"{name}.") for name, kind in _sections(methods)
    }
    return checked(RunConfig, built, methods)


def _from_dict(kind: type[_Config], values: Mapping[str, Any], prefix: str) -> _Config:
    return checked(kind, _parts(kind, values, prefix), prefix=prefix)


def _parts(kind: type[Any], values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a configuration's fields, nested parts built."""
    parts = {field.name: field.default_factory for field in fields(kind) if is_dataclass(field.default_factory)}
    built = {
        name: _from_dict(parts[name], value, f"{prefix}{name}.") if name in parts else value  # type: ignore[arg-type]
        for name, value in values.items()
    }
    if "betas" in built:
        built["betas"] = tuple(built["betas"])
    return built


def scores_asked(config: RunConfig) -> dict[str, Any]:
    """What a run is to score and how, as plain JSON values."""
    values = to_dict(config)
    return {"scoring": values["scoring"], "valid": values["data"]["valid"], "tests": values["data"]["tests"]}


def _keys(parser: ArgumentParser) -> dict[str, bool]:
    """Every key of a parser, and whether it is a mapping with free keys below it."""
    return {
        option.removeprefix("--"): "dict[" in str(getattr(action, "_typehint", ""))
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    }


def _is_known(key: str, known: dict[str, bool]) -> bool:
    parents = [key.rsplit(".", depth)[0] for depth in range(1, key.count(".") + 1)]
    return key in known or any(known.get(parent, False) for parent in parents)


def _nearest(key: str, known: dict[str, bool], prefix: str) -> str:
    """A hint at the key that was perhaps meant: by the whole name, else by its last part alone."""
    found = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    last = key.rsplit(".", 1)[-1]
    by_last = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}  # of several the first: the run's own
    same_last = difflib.get_close_matches(last, by_last, n=1, cutoff=0.75)
    if same_last and (not found or found[0].rsplit(".", 1)[-1] != same_last[0]):
        found = [by_last[same_last[0]]]
    return f"; did you mean {prefix}{found[0]}?" if found else "; --help lists them all"


def _flatten(values: dict[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for name, value in values.items():
        key = f"{prefix}{name}"
        keys += _flatten(value, f"{key}.") if isinstance(value, dict) and value else [key]
    return keys


def one_sentence(message: str) -> str:
    """jsonargparse explains over several lines; what the user needs is the key, the value and what fits."""
    key = re.search(r'[Kk]ey "([^"]+)"', message)
    value = re.search(r"(?:Given value|Got value): (.*)", message)
    expected = re.findall(r"Expected an? ([^\n]*?)(?:\. Got|\n|$)", message)
    if key is not None and value is not None:
        kinds = " or ".join(dict.fromkeys(re.sub(r"<class '(\w+)'>|typing\.", r"\1", kind) for kind in expected))
        return f"{key.group(1)}: {value.group(1)!r} does not fit; expected {kinds or 'what --help says'}"
    required = re.search(r'"([\w.]+)" is required', message)
    if required is not None:
        return f"--{required.group(1)} is missing: give it on the command line or in the recipe"
    return " ".join(message.split())
