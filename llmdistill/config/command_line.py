"""Builds a configuration from recipe and command line, or in Python from settings by name.

An unknown key, a value that does not fit, and settings that contradict each other are UserErrors that name the key.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast, get_args

from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings

from llmdistill.config import DataConfig, RunConfig, TrainConfig, overrides
from llmdistill.config.foreign import our_name
from llmdistill.config.help import find_help_topic, help_of, hide_stubs
from llmdistill.config.marks import VALUES, check_taken, settings_of
from llmdistill.config.methods import MethodTable
from llmdistill.config.recipes import read_layers, recipe_names, recipe_path
from llmdistill.config.strict import check_keys, check_plain, did_you_mean, flatten, one_sentence
from llmdistill.errors import FieldError, UserError
from llmdistill.internals.parser_names import actions, is_list, type_of
from llmdistill.memo import cached_by

DEFAULT_RECIPE = "quickstart"
"""The recipe of a run that names none, and neither a teacher nor data of its own: the embedded example."""
_REPLACES_EXAMPLE = ("teacher.model", "data.train", "data.kind", "data.task.name")
"""Settings of a run that has no need of the embedded example, unless their values are embedded."""

_COMMAND = "llmdistill train [--num_gpus N]"
_USAGE = "[--recipe NAME] [--KEY VALUE ...]"
TYPED = "LLMDISTILL_TYPED"
"""Environment variable of ranks that `llmdistill train` has started: the command that the user typed."""

set_parsing_settings(docstring_parse_attribute_docstrings=True)  # the docstrings of fields are their help

_Config = TypeVar("_Config")

_NOT_PARSED = (ArgumentError, ValueError, TypeError, ArithmeticError, RecursionError)  # for values that do not fit


class _RunParser(ArgumentParser):
    def parse_path(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Namespace:
        # jsonargparse reads a file in the encoding of the locale; recipes are UTF-8.
        return self.parse_string(Path(path).read_text(encoding="utf-8"), os.path.basename(path), *args, **kwargs)


@cached_by(lambda methods: tuple(methods.items()))
def run_parser(methods: MethodTable) -> ArgumentParser:
    """Return the parser of the main job: all settings of a run and its methods, and the flags that are not settings."""
    parser = _RunParser(
        prog="llmdistill train",
        usage=f"{_COMMAND} {_USAGE}",
        exit_on_error=False,
        description="Distill a teacher into a smaller student under DeepSpeed. "
        "Every setting below can be given in a recipe (YAML) or on the command line, which takes precedence.",
    )
    text = (
        f"A shipped recipe's name or a YAML file. Default: {DEFAULT_RECIPE}, the embedded example; none if you name a "
    )
    text += "teacher or data of your own."
    parser.add_argument("--recipe", action="config", help=text)
    text = "Only in a recipe: the recipe that it builds on, a shipped one or a path relative to this recipe. Its own "
    text += "settings take precedence."
    parser.add_argument("--extends", type=str | None, help=text)
    parser.add_argument(
        "--dry_run", action="store_true", help="Check the settings and say what would run; no weights or data are read."
    )
    text = "With --dry_run: read the data and the models too, and check them on one batch, as llmdistill doctor does."
    parser.add_argument("--check", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="With --dry_run: print one JSON object with all settings.")
    # The launcher adds this flag; the environment has it too.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    add_config(parser, RunConfig, methods)
    hide_stubs(parser)
    return parser


def add_config(parser: ArgumentParser, kind: type[Any], methods: MethodTable) -> None:
    """Add all settings of a configuration with methods: its fields, and a section for each method's settings."""
    # Each method has a section of its own name instead.
    parser.add_class_arguments(kind, None, skip={"method_settings"})
    (action,) = (action for action in actions(parser) if action.dest == "method")
    listed = "; ".join(f"{name}: {method.help}" for name, method in methods.items())
    action.help = f"{action.help} {listed}."
    for name, settings in _method_sections(methods):
        parser.add_class_arguments(settings, name)


def parse_run(
    arguments: Sequence[str], methods: MethodTable, *, script: str | None = None
) -> tuple[RunConfig, argparse.Namespace]:
    """Parse the main job's command line: the configuration, and the flags recipe, dry_run, check and json, and notes.

    `script` is the file that a launcher runs, None for `llmdistill train`. `recipe` is None for a run without one: the
    embedded example is only for runs that name no teacher or data.
    """
    topic = find_help_topic(arguments)
    if topic is not None:
        text = help_of(run_parser(methods), topic, methods)
        print(text if script is None else text.replace(_COMMAND, f"deepspeed [--num_gpus N] {script}", 1), end="")
        raise SystemExit(0)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--recipe")
    first.add_argument("--extends")
    # The recipe is parsed first, wherever it stands, so that the command line always overrides it.
    try:
        flags, rest = first.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(str(error)) from error
    if flags.extends is not None:
        raise UserError(f"--extends {flags.extends}: that is for recipes; give --recipe {flags.extends} instead")
    typed = overrides.given_flags(rest)
    name = flags.recipe
    if name is None and all(str(typed.get(key, "embedded:")).startswith("embedded:") for key in _REPLACES_EXAMPLE):
        name = DEFAULT_RECIPE
    parser = run_parser(methods)
    recipes = {} if name is None else read_layers(parser, recipe_path(name))
    layers = [(flatten(values), ["--recipe", str(file)]) for file, values in recipes.items()]
    settings = settings_of(RunConfig)
    for method, kind in _method_sections(methods):
        settings |= settings_of(kind, f"{method}.")
    below: dict[str, Any] = {}
    words: list[str] = []
    # Write one command line for jsonargparse, where a later word wins: before each layer come the defaults of the
    # settings that it resets.
    for layer, layer_words in (*layers, (typed, rest)):
        back = overrides.find_replaced(layer, below, settings)
        words += [*overrides.flags(back), *layer_words]
        below |= {**back, **layer}
    parsed = _parse_words(parser, words)
    if parsed.output_dir is None:
        folder = "own" if name is None else name if name in recipe_names() else Path(name).stem
        parsed.output_dir = f"runs/{folder}-{Path(parsed.ds_config).stem}"
    if parsed.check and not parsed.dry_run:
        raise UserError("--check belongs to --dry_run: add that, or start llmdistill doctor with the same settings")
    run_flags = argparse.Namespace(recipe=name, **{key: parsed[key] for key in ("dry_run", "check", "json")})
    run_flags.notes = describe_repeated(rest)
    return build(parsed, RunConfig, methods), run_flags


def about_recipe(flags: argparse.Namespace) -> str:
    """Return the first lines that a run prints: where its settings come from. `flags` are those of `parse_run`."""
    name = flags.recipe
    source = f"{name}{', the embedded example' if name == DEFAULT_RECIPE else ''}"
    if name is None:
        source = "none: the defaults of llmdistill, and what the command line says"
    return "\n".join([f"Recipe      {source}", *(f"Note        {note}" for note in flags.notes)])


def split_words(arguments: Sequence[str], names: Collection[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the flags of these names or sections with their values (and -h), and the rest."""
    own: list[str] = []
    rest: list[str] = []
    mine = False
    for word in arguments:
        if word.startswith("--") or word == "-h":
            key = word.removeprefix("--").split("=")[0]
            mine = word == "-h" or key in names or key.split(".")[0] in names
        (own if mine else rest).append(word)
    return own, rest


def parse_own(parser: ArgumentParser, arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """Parse the flags of a command that also takes the settings of a run; return their values and the other words."""
    names = {flag.removeprefix("--").split(".")[0] for action in actions(parser) for flag in action.option_strings}
    own, rest = split_words(arguments, names)
    _note_repeated(arguments)
    return _parse_words(parser, own), rest


def typed_command(script: str | None, arguments: Sequence[str]) -> str:
    """Return the shell command that starts a run with these arguments on the same number of ranks.

    `script` is the file that a launcher runs, None for `llmdistill train`, whose command its ranks return, too.
    """
    ranks = os.environ.get("WORLD_SIZE", "1")
    words = [word for word in arguments if not word.startswith("--local_rank")]  # the launcher adds it
    several = ["--num_gpus", ranks] if int(ranks) > 1 else []
    if script is None or TYPED in os.environ:
        return shlex.join(["llmdistill", "train", *several, *words])
    return shlex.join(["deepspeed", *several, script, *words])


def parse(parser: ArgumentParser, arguments: Sequence[str]) -> Any:
    """Call `parser.parse_args`, and raise its errors as one sentence; a list may be written `a,b` or `[a,b]`.

    A note on stderr names each flag that occurs more than once.
    """
    _note_repeated(arguments)
    return _parse_words(parser, arguments)


def _parse_words(parser: ArgumentParser, arguments: Sequence[str]) -> Any:
    hide_stubs(parser)
    for word in arguments:
        check_plain(word, "the command line")
    typed = overrides.given_flags(arguments)
    # "" is a bare --, and print_config a flag of jsonargparse's own.
    check_keys(parser, [key for key in typed if key not in ("", "print_config")], prefix="--")
    # `a,b` becomes `[a,b]` after the flags whose settings are lists.
    flags = {flag for action in actions(parser) if is_list(action) for flag in action.option_strings}
    words: list[str] = []
    for word in arguments:
        flag, equals, value = word.partition("=")
        if equals and flag in flags:  # --KEY=VALUE; else the value is a word of its own
            words.append(f"{flag}={_write_as_list(value)}")
        else:
            words.append(_write_as_list(word) if words and words[-1] in flags else word)
    try:
        return parser.parse_args(words)
    except _NOT_PARSED as error:
        for key, value in typed.items():
            check_plain(value, key)  # the parser does not name the key of a number that is too large
        message = one_sentence(str(error))
        for action in actions(parser):
            if not action.option_strings:  # a word without a flag, as the usage shows it
                message = message.replace(f"--{action.dest}", action.dest.upper())
        raise UserError(message) from error


def _note_repeated(words: Sequence[str]) -> None:
    if os.environ.get("RANK", "0") == "0":  # all ranks parse the same words
        for note in describe_repeated(words):
            print(f"Note        {note}", file=sys.stderr)


def describe_repeated(words: Sequence[str]) -> list[str]:
    """Return a note on each flag that stands on a command line more than once."""
    # --KEY+ appends to a list, so that it may stand there several times.
    flags = [word.partition("=")[0] for word in words if word.startswith("--") and not word.endswith("+")]
    counts = {flag: flags.count(flag) for flag in flags}
    return [f"{flag} is given {count} times: the last one counts" for flag, count in counts.items() if count > 1]


def _write_as_list(value: str) -> str:
    return value if value.startswith(("[", "--")) or value == "null" else f"[{value}]"


def build(
    values: Namespace | Mapping[str, Any], kind: type[_Config], methods: MethodTable | None = None, *, prefix: str = ""
) -> _Config:
    """Build a frozen configuration with its nested sections and check it.

    Args:
        values: what the parser returns, or the plain JSON values of `to_dict`; other keys in it are ignored.
        kind: the class of the configuration.
        methods: all methods, if the configuration has a section for each of them (see `add_config`).
        prefix: what the user types before the name of a field, for error messages.
    """
    by_name = values.as_dict() if isinstance(values, Namespace) else values
    built: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        part, key = field.default_factory, f"{prefix}{field.name}"
        if field.name in by_name:
            value = by_name[field.name]
            # The type of a nested section is the default factory of its field.
            if is_dataclass(part):
                built[field.name] = build(value, part, prefix=f"{key}.")
            else:
                if value is None and "None" not in str(field.type):
                    raise UserError(f"{key} is null: give a value, or leave it out")
                check_plain(value, key)
                check_taken(field, value, key)
                section = field.metadata.get(VALUES)
                if section is not None:
                    value = {name: build(entry, section, prefix=f"{key}.{name}.") for name, entry in value.items()}
                built[field.name] = value
    if "betas" in built:  # the field is a tuple, and YAML and JSON have lists
        built["betas"] = tuple(built["betas"])
    if methods is not None:
        built["method_settings"] = {
            name: build(by_name.get(name, {}), settings, prefix=f"{prefix}{name}.")
            for name, settings in _method_sections(methods)
        }
    return build_checked(kind, built, methods, prefix=prefix)


def build_checked(
    kind: type[_Config], values: Mapping[str, Any], methods: MethodTable | None = None, *, prefix: str = ""
) -> _Config:
    """Build a configuration from the values of its fields and check it."""
    try:
        config: Any = kind(**values)
        if methods is not None:
            config.check_methods(methods)
    except FieldError as error:
        raise UserError(f"{prefix}{error}") from error
    except ValueError as error:
        raise UserError(str(error)) from error
    return cast(_Config, config)


def _method_sections(methods: MethodTable) -> list[tuple[str, type[Any]]]:
    """Return the methods that have settings, with the types of these settings."""
    return [(name, method.settings) for name, method in methods.items() if method.settings is not None]


def with_values(section: _Config, values: Mapping[str, Any], *, key: str) -> _Config:
    """Return a section of a configuration with some values changed, which are checked like those of a recipe.

    `key` is the dotted key of the section for error messages; empty for names without a section.
    """
    if not values:
        return section
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(type(section), None)
    prefix = f"{key}." if key else ""
    parsed = _parse_values(parser, values, asdict(section), prefix)  # type: ignore[call-overload]
    return build(parsed, type(section), prefix=prefix)


def _parse_values(parser: ArgumentParser, values: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str) -> Any:
    """Parse values by dotted key."""
    check_keys(parser, values, prefix=prefix)
    for key, value in values.items():
        check_plain(value, f"{prefix}{key}")
    free = {action.dest: get_args(type_of(action)) for action in actions(parser) if "dict[" in str(type_of(action))}
    given: dict[str, Any] = {}
    for key, value in values.items():
        parent = next((name for name in free if key.startswith(f"{name}.")), None)
        if parent is None:
            given[key] = value
            continue
        # parse_object would make a section of these keys, where the setting is a mapping.
        entry, _, rest = key.removeprefix(f"{parent}.").partition(".")
        if rest and is_dataclass(free[parent][-1]):
            value = {**given.get(parent, {}).get(entry, {}), rest: value}
        elif rest:
            entry = f"{entry}.{rest}"
        given[parent] = {**given.get(parent, {}), entry: value}
    try:
        return parser.parse_object({**defaults, **given})
    except _NOT_PARSED as error:
        raise UserError(f"{prefix}{one_sentence(str(error))}") from error


def config_of(
    settings: Mapping[str, Any],
    keywords: Mapping[str, Any],
    methods: MethodTable,
    derived: Mapping[str, Any] = MappingProxyType({}),
) -> RunConfig:
    """Build the configuration of a run in Python; a setting that is in neither argument has its default.

    Args:
        settings: by dotted key, as on the command line: `{"train.micro_batch_size": 8, "kd.temperature": 2.0}`.
        keywords: by the setting's own name, which is searched in the run, in `train`, in `data`, and in the settings of
            the run's method: `{"steps": 200, "max_length": 256, "temperature": 2.0}`; or `decoding` of the scoring.
        methods: the table of all methods.
        derived: what settings and keywords replace, by dotted key.
    """
    method = str(settings.get("method", ""))
    own = _method_sections({method: methods[method]}) if method in methods else []
    # The only keyword for the scoring, because a batch_size or a limit could as well mean the training's.
    keys = {"decoding": "scoring.decoding"}
    sections: list[tuple[str, type[Any]]] = [*own, ("data", DataConfig), ("train", TrainConfig)]  # the last one wins
    for section, kind in sections:
        keys |= {field.name: f"{section}.{field.name}" for field in fields(kind)}
    keys |= {field.name: field.name for field in fields(RunConfig) if not is_dataclass(field.default_factory)}
    named = {keys.get(name, name): value for name, value in keywords.items()}
    twice = next((key for key in named if key in settings and named[key] != settings[key]), None)
    if twice is not None:
        raise UserError(f"{twice} is given twice, as {settings[twice]} and {named[twice]}: leave one of them out")
    values = {**derived, **settings, **named}
    return build(_parse_values(run_parser(methods), values, {}, ""), RunConfig, methods)


def method_settings(
    names: Sequence[str], settings: Mapping[str, Any], keywords: Mapping[str, Any], methods: MethodTable
) -> dict[str, Any]:
    """Build the settings of some methods, by the method's name; the main method is first in `names`.

    Settings are given by dotted key (`{"minilm.attention": 2.0}`), those of the main method also as keywords.
    """
    by_method: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in {**settings, **{f"{names[0]}.{name}": keyword for name, keyword in keywords.items()}}.items():
        method, _, name = key.partition(".")
        own = methods[names[0]].settings is not None
        if method not in by_method or methods[method].settings is None:
            hint = (
                our_name(key, [f.name for f in fields(methods[names[0]].settings)] if own else []) or "; leave it out"
            )
            raise UserError(f"{key}: there is no such setting of {' and '.join(names)}{hint}")
        by_method[method][name] = value
    sections = _method_sections({name: methods[name] for name in names})
    return {name: with_values(kind(), by_method[name], key=name) for name, kind in sections}


def set_value(values: dict[str, Any], key: str, value: Any) -> None:
    """Set one value, by its dotted key, in the result of `to_dict`; a UserError if there is no such setting."""
    *parents, name = key.split(".")
    block: Any = values
    for parent in parents:
        block = block.get(parent) if isinstance(block, dict) else None
    if not isinstance(block, dict) or name not in block:
        raise UserError(f"{key}: there is no such setting{did_you_mean(key, flatten(values))}")
    block[name] = value


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as plain JSON values, with the settings of each method under its name."""
    values = asdict(config)
    values |= values.pop("method_settings")
    values["train"]["betas"] = list(values["train"]["betas"])
    return values
