"""Builds the configuration of a run in Python, from dotted keys or from the settings' own names as keywords."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from jsonargparse import ArgumentError

from llmdistill.config import DataConfig, RunConfig, TrainConfig
from llmdistill.config.command_line import build, changed, run_parser
from llmdistill.config.methods import MethodTable
from llmdistill.config.strict import check_keys, one_sentence
from llmdistill.errors import UserError


def config_of(settings: Mapping[str, Any], keywords: Mapping[str, Any], methods: MethodTable) -> RunConfig:
    """Build the configuration of a run; a setting that is in neither argument has its default.

    Args:
        settings: by dotted key, as on the command line: `{"train.micro_batch_size": 8, "kd.temperature": 2.0}`.
        keywords: by the setting's own name, which is searched in the run, in `train`, in `data`, and in the settings of
            the run's method: `{"steps": 200, "max_length": 256, "temperature": 2.0}`.
        methods: all methods, by name.

    Raises:
        UserError: a key is unknown, a value does not fit, or settings contradict each other.
    """
    parser = run_parser(methods)
    method = str(settings.get("method", ""))
    of_method = methods[method].settings if method in methods else None
    values = {**settings, **{dotted(name, method, of_method): each for name, each in keywords.items()}}
    check_keys(parser, values)
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *parents, name = key.split(".")
        block = nested
        for parent in parents:
            block = block.setdefault(parent, {})
        block[name] = value
    try:
        parsed = parser.parse_object(nested)
    except (ArgumentError, ValueError, TypeError) as error:
        raise UserError(one_sentence(str(error))) from error
    return build(parsed, RunConfig, methods)


def method_settings(
    names: Sequence[str], settings: Mapping[str, Any], keywords: Mapping[str, Any], methods: MethodTable
) -> dict[str, Any]:
    """Build the settings of some methods, by the method's name.

    Args:
        names: the methods, the main method first.
        settings: by dotted key: `{"minilm.attention": 2.0}`.
        keywords: settings of the main method, by their own names.
        methods: all methods, by name.

    Raises:
        UserError: none of these methods has the setting, or a value does not fit.
    """
    given: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key, value in {**settings, **{f"{names[0]}.{name}": each for name, each in keywords.items()}}.items():
        method, _, name = key.partition(".")
        if method not in given or methods[method].settings is None:
            raise UserError(f"{key}: there is no such setting of {' and '.join(names)}; leave it out")
        given[method][name] = value
    kinds = {name: methods[name].settings for name in names}
    return {name: changed(kind(), given[name], key=name) for name, kind in kinds.items() if kind is not None}


def dotted(name: str, method: str, of_method: type[Any] | None) -> str:
    """The dotted key of a setting that is given by its own name; an unknown name is returned unchanged.

    Args:
        name: the name of the setting.
        method: the method of the run.
        of_method: the dataclass of the method's settings, if it has any.
    """
    if name in {field.name for field in fields(RunConfig) if not is_dataclass(field.default_factory)}:
        return name
    for section, kind in (("train", TrainConfig), ("data", DataConfig), (method, of_method)):
        if is_dataclass(kind) and name in {field.name for field in fields(kind)}:
            return f"{section}.{name}"
    return name
