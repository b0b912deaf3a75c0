"""Keeps the results of functions in memory under a key of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def cached_by(
    key: Callable[_Arguments, Hashable], *, most: int | None = None
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Return a decorator that calls a function once for each key of its arguments; `most` limits the results kept.

    For arguments without a hash, such as a config, and those that change under one name, such as a file. Unlike
    `functools.cache` it keeps the keys alone, and not the arguments. An exception is not kept.
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @lru_cache(maxsize=most)
        def compute(call: _Call) -> _Result:
            # The cache holds the call as long as the result, and needs no more than its key.
            (given, named), call.arguments = call.arguments, ((), {})
            return function(*given, **named)

        @wraps(function)
        def cached(*given: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
            return compute(_Call(key(*given, **named), (given, named)))

        return cached

    return decorate


class _Call:
    """The arguments of a call, which equals another one with the same key."""

    def __init__(self, key: Hashable, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self.key, self.arguments = key, arguments

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)
