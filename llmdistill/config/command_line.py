"""Builds a configuration from recipe and command line; an unknown key is an error that names the nearest key."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin

from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from llmdistill.config import RunConfig
from llmdistill.config.methods import MethodInfo, MethodTable
from llmdistill.config.recipes import extended, recipe_names, recipe_path
from llmdistill.config.strict import check_keys, flattened, is_known, keys_of, nearest, one_sentence
from llmdistill.errors import FieldError, UserError

DEFAULT_RECIPE = "quickstart"

set_parsing_settings(docstring_parse_attribute_docstrings=True)

_Config = TypeVar("_Config")

_EXTENDS = (
    "Only in a recipe: the one it builds on, a shipped one's name or a path seen from its file; its own settings win."
)


def run_parser(methods: MethodTable) -> ArgumentParser:
    """The parser of the main job: all settings of a run and its methods, and the flags that are not settings."""
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
    )  # the launcher adds it; the environment has it too
    add_config(parser, RunConfig, dict(methods))
    return parser


def add_config(parser: ArgumentParser, kind: type[Any], methods: MethodTable) -> None:
    """Add all settings of a configuration with methods: its fields, and a section for each method's settings."""
    parser.add_class_arguments(kind, None, skip={"method_settings"})
    (action,) = (action for action in parser._actions if action.dest == "method")
    listed = "; ".join(f"{name}: {method.help}" for name, method in methods.items())
    action.help = f"{action.help} {listed}."
    for name, settings in _sections(methods):
        parser.add_class_arguments(settings, name)


def parse_run(arguments: Sequence[str], methods: MethodTable) -> tuple[RunConfig, argparse.Namespace]:
    """Parse the main job's command line.

    Args:
        arguments: the command line.
        methods: all methods, by name.

    Returns the configuration, and the flags ``recipe``, ``dry_run`` and ``json``.

    Raises:
        UserError: a key is unknown, a value does not fit, or a recipe does not exist.
    """
    arguments = list(arguments)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--recipe", default=DEFAULT_RECIPE)
    first.add_argument("--extends")
    # The recipe is parsed first, wherever it stands, so that the command line always overrides it.
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
    """The shell command that starts a script with these arguments on the same number of ranks."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    words = [word for word in arguments if not word.startswith("--local_rank")]
    return shlex.join(["deepspeed", *(["--num_gpus", ranks] if int(ranks) > 1 else []), script, *words])


def parse(parser: ArgumentParser, arguments: Sequence[str]) -> Any:
    """Calls `parser.parse_args` and gives its errors as one sentence; a list may be written `a,b` or `[a,b]`.

    Raises:
        UserError: a key is unknown, or a value does not fit.
    """
    known = keys_of(parser)
    for argument in arguments:
        if argument.startswith("--") and argument != "--":
            key = argument[2:].split("=")[0]
            if key not in ("help", "print_config") and not is_known(key, known):
                raise UserError(f"--{key}: there is no such setting{nearest(key, known, '--')}")
    try:
        return parser.parse_args(_bracketed(parser, arguments))
    except (ArgumentError, ValueError, TypeError) as error:
        raise UserError(one_sentence(str(error))) from error


def _bracketed(parser: ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """The arguments with `a,b` written as `[a,b]` after the flags whose settings are lists."""
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
    """Whether a type is a list, or a list or None. A type that may also be a string does not count."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return {get_origin(kind) for kind in kinds if kind is not NoneType} == {list}


def _as_list(value: str) -> str:
    return value if value.startswith(("[", "--")) or value == "null" else f"[{value}]"


def build(parsed: Any, kind: type[_Config], methods: MethodTable | None = None, *, prefix: str = "") -> _Config:
    """Build the frozen configuration from a parsed command line, nested sections included.

    Args:
        parsed: the result of the parser.
        kind: the class of the configuration.
        methods: the methods given to `add_config`, if it added the settings.
        prefix: what the user types before the name of a field, for error messages.

    Raises:
        UserError: settings contradict each other.
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
    """Build a configuration from the values of its fields and check it.

    Raises:
        UserError: settings contradict each other.
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
    """The methods that have settings, with the types of these settings."""
    return [(name, method.settings) for name, method in methods.items() if method.settings is not None]


def _part(field: Field[Any], value: Any, prefix: str) -> Any:
    """The value of a field. The type of a nested section is the default factory of its field."""
    if not is_dataclass(field.default_factory):
        return value
    return build(value, field.default_factory, prefix=f"{prefix}{field.name}.")


def changed(section: _Config, values: Mapping[str, Any], *, key: str) -> _Config:
    """Returns a section of a configuration with some values changed. The values are checked like those of a recipe.

    Args:
        section: the section.
        values: the new values.
        key: the dotted key of the section, for error messages; empty for names without a section.

    Raises:
        UserError: a key is unknown, or a value does not fit.
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


def set_value(values: dict[str, Any], key: str, value: Any) -> None:
    """Set one value of a configuration that is given as plain JSON values.

    Args:
        values: the result of `to_dict`.
        key: the dotted key.
        value: the new value.

    Raises:
        UserError: the setting does not exist.
    """
    *parents, name = key.split(".")
    block: Any = values
    for parent in parents:
        block = block.get(parent) if isinstance(block, dict) else None
    if not isinstance(block, dict) or name not in block:
        raise UserError(f"{key}: there is no such setting{nearest(key, dict.fromkeys(flattened(values), False), '')}")
    block[name] = value


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain JSON values, with the settings of each method under its name."""
    values = asdict(config)
    values |= values.pop("method_settings")
    values["train"]["betas"] = list(values["train"]["betas"])
    return values


def config_from_dict(values: Mapping[str, Any], methods: MethodTable) -> RunConfig:
    """Build the configuration from the result of `to_dict`, with the checks of its sections.

    Raises:
        UserError: settings contradict each other.
    """
    built = _parts(RunConfig, {name: value for name, value in values.items() if name not in methods})
    built["method_settings"] = {
        name: _from_dict(kind, values.get(name, {}), f"{name}.") for name, kind in _sections(methods)
    }
    return checked(RunConfig, built, methods)


def _from_dict(kind: type[_Config], values: Mapping[str, Any], prefix: str) -> _Config:
    return checked(kind, _parts(kind, values, prefix), prefix=prefix)


def _parts(kind: type[Any], values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a configuration's fields, with nested sections built."""
    parts = {field.name: field.default_factory for field in fields(kind) if is_dataclass(field.default_factory)}
    built = {
        name: _from_dict(parts[name], value, f"{prefix}{name}.") if name in parts else value  # type: ignore[arg-type]
        for name, value in values.items()
    }
    if "betas" in built:
        built["betas"] = tuple(built["betas"])
    return built


def scores_asked(config: RunConfig) -> dict[str, Any]:
    """The settings of the scoring and the sets to score, as plain JSON values."""
    values = to_dict(config)
    return {"scoring": values["scoring"], "valid": values["data"]["valid"], "tests": values["data"]["tests"]}
