"""Combines several methods: adds up the terms of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from llmdistill.batch import Aspect
from llmdistill.methods.method import Method


def combine(methods: Mapping[str, Method]) -> Method:
    """Combine the terms of several methods; a name that two methods share gets the method as a prefix (`kd.label`)."""
    shared = Counter(term for method in methods.values() for term in method.weights)

    def naming(method: str) -> Callable[[str], str]:
        return lambda term: f"{method}.{term}" if shared[term] > 1 else term

    names = {name: naming(name) for name in methods}
    (shift,) = {method.shift for method in methods.values()}
    return Method(
        weights={names[of](term): weight for of, each in methods.items() for term, weight in each.weights.items()},
        layer_terms=[
            replace(term, name=names[of](term.name)) for of, each in methods.items() for term in each.layer_terms
        ],
        token_terms=[
            replace(term, name=names[of](term.name)) for of, each in methods.items() for term in each.token_terms
        ],
        sequence_terms=[
            replace(term, name=names[of](term.name)) for of, each in methods.items() for term in each.sequence_terms
        ],
        shift=shift,
        projections=_merged(method.projections for method in methods.values()),
    )


def _merged(projections: Iterable[Mapping[Aspect, tuple[int, int]]]) -> dict[Aspect, tuple[int, int]]:
    merged: dict[Aspect, tuple[int, int]] = {}
    for each in projections:
        for aspect, widths in each.items():
            assert merged.get(aspect, widths) == widths, f"two methods map {aspect} to different widths"
            merged[aspect] = widths
    return merged
