"""Which layers a loss acts in, as a user writes it."""

from __future__ import annotations

from llmdistill.errors import UserError


def parse_layers(spec: str, num_layers: int, *, key: str) -> tuple[int, ...]:
    """The layers (0-based, ascending) that a setting names.

    Args:
        spec: lower (1..L/2, rounded down), upper (the rest), all, none, or numbers from 1 such as "1-3,6".
        num_layers: L.
        key: the setting's name, for the error.

    Raises:
        UserError: the text is none of these, or names a layer that is not there.
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
