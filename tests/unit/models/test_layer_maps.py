from __future__ import annotations

import re

import pytest

from llmdistill.errors import UserError
from llmdistill.models.layer_maps import mapped_layers, uniform_map


def test_uniform_map() -> None:
    assert uniform_map(3, 12) == [4, 8, 12]
    assert uniform_map(2, 5) == [3, 5]  # 2.5 -> 3
    assert uniform_map(5, 12) == [2, 5, 7, 10, 12]  # 2.4 4.8 7.2 9.6 12
    assert uniform_map(5, 2) == [1, 1, 1, 2, 2]  # 0.4 is no layer: the first


def test_maps_of_three_of_six_layers() -> None:
    given = ("uniform", "spread", "first", "last", "6, 1,6 ")
    found = [mapped_layers(spec, 3, 6, key="k") for spec in given]
    assert found == [[2, 4, 6], [1, 3, 5], [1, 2, 3], [4, 5, 6], [6, 1, 6]]


def test_zero_is_a_layer_that_learns_from_none() -> None:
    assert mapped_layers("0,0,6", 3, 6, key="k", may_skip=True) == [0, 0, 6]


@pytest.mark.parametrize(("spec", "depth", "may_skip", "message"), [
    ("0,0,6", 3, False, "x.y 0,0,6 does not fit: give 3 numbers, one for each layer of the student, from 1 to the te"),
    ("0,0,0", 3, True, "x.y 0,0,0: no layer of the student has a layer of the teacher"),
    ("2,4", 3, True, "x.y 2,4 does not fit: give 3 numbers, one for each layer of the student, from 0 (0: none) to"),
    ("middle", 3, True, "x.y 'middle' names no layers: give uniform, spread, first, last, or numbers from 1"),
    ("first", 7, True, "x.y first: the student has 7 layers and the teacher 6; give a number for each layer"),
])  # fmt: skip
def test_what_is_no_map(spec: str, depth: int, may_skip: bool, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        mapped_layers(spec, depth, 6, key="x.y", may_skip=may_skip)
