"""The flags of a parser, of which argparse has no public list, and the types that jsonargparse keeps of them.

Tried with Python 3.11 and jsonargparse 4.49 and 4.53; `tests/unit/test_internals.py` says which name is gone.
"""

from __future__ import annotations

from argparse import ArgumentParser
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin


def actions(parser: ArgumentParser) -> list[Any]:
    """Return the actions of a parser, one for each flag or word without a flag."""
    return parser._actions


def type_of(action: Any) -> Any:
    """Return the annotation of the setting that an action gives; None if it is no setting."""
    return getattr(action, "_typehint", None)


def is_list(action: Any) -> bool:
    """Return whether a setting is a list, or a list or None. A type that may also be a string does not count."""
    hint = type_of(action)
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return {get_origin(kind) for kind in kinds if kind is not NoneType} == {list}
