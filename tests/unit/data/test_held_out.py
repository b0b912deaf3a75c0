"""Rows that are held out are the same for a seed, and no example of the training."""

import numpy as np
import pytest

from llmdistill.data.held_out import count_held_out, hold_out
from llmdistill.errors import UserError


class Rows(list):
    """Stands for the examples of a file."""

    def length(self, index):
        return self[index]


@pytest.mark.parametrize(
    ("wanted", "total", "expected"),
    [(0.02, 2000, 40), (0.02, 100_000, 200), (0.02, 100, 8), (0.02, 12, 3), (0.02, 3, 0), (0, 2000, 0), (5, 20, 5)],
)
def test_a_share_has_limits_and_a_number_none(wanted, total, expected):
    assert count_held_out(wanted, total) == expected


def test_something_is_left_to_learn():
    with pytest.raises(UserError, match="is 20, but data"):
        count_held_out(20, 20)


@pytest.mark.parametrize("wanted", [0.3, 7])
def test_each_row_is_learned_or_held_out(wanted):
    parts = [Rows(range(30)), Rows(range(100, 110))]
    kept, held_out = hold_out(parts, wanted, seed=3)
    assert sorted([*kept[0], *kept[1], *held_out]) == [*parts[0], *parts[1]]
    assert len(held_out) == (10 if wanted < 1 else 7)
    assert kept[0][1:3] == [kept[0][1], kept[0][2]]
    assert [kept[0].length(place) for place in range(len(kept[0]))] == list(kept[0])
    again, other = hold_out(parts, wanted, seed=3)[1], hold_out(parts, wanted, seed=4)[1]
    assert held_out == again
    assert not np.array_equal(held_out, other)


def test_without_held_out_rows_the_files_stay_as_they_are():
    parts = [Rows(range(30))]
    assert hold_out(parts, 0, seed=0) == (parts, [])
