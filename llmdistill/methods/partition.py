"""Parses the layers of a loss from a setting."""

from __future__ import annotations

from llmdistill.errors import UserError


def parse_layers(spec: str, num_layers: int, *, key: str) -> tuple[int, ...]:
    """The layers (0-based, ascending) that a setting names.

    Args:
        spec: lower (1..L/2, rounded down), upper (the rest), all, none, or numbers counted from 1 such as "1-3,6".
        num_layers: L.
        key: the name of the setting, for the error message.

    Raises:
        UserError: the text has none of these forms, or it names a layer that does not exist.
    """
    half = num_layers // 2
    named = {"lower": range(half), "upper": range(half, num_layers), "all": range(num_layers), "none": range(0)}
    text = spec.strip()
    if text in named:
        return tuple(named[text])
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        bounds = (first, last) if dash else (first, first)
        # ASCII only: str.isdigit also takes ² and the like, which int() refuses.
        if not all(bound.isascii() and bound.isdigit() for bound in bounds):
            raise _bad(key, spec, num_layers)
        low, high = int(bounds[0]), int(bounds[1])
        if not 1 <= low <= high <= num_layers:
            raise _bad(key, spec, num_layers)
        layers.update(range(low - 1, high))
    return tuple(sorted(layers))


def _bad(key: str, spec: str, num_layers: int) -> UserError:
    return UserError(
        f"{key} is {spec!r}: the model has {num_layers} layers; give lower, upper, all, none, or layers from 1 to "
        f"{num_layers} such as 1-3,6"
    )
