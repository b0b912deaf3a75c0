"""Rows that are held out are the same for a seed, and no example of the training."""

import numpy as np
import pytest

from llmdistill.data.collate import Encoded
from llmdistill.data.held_out import count_held_out, find_learned_files, find_learned_rows, hold_out
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


def rows_of(*numbers):
    return [Encoded.of([1, 2, number], [2, 3], "", None) for number in numbers]


@pytest.mark.parametrize(
    ("train", "valid", "said"),
    [
        (range(40), range(40), "40 of the 40 rows"),
        (range(40), [3, *range(100, 104)], "1 of the 5 rows"),
        (range(40), [3, *range(100, 119)], None),  # greetings may stand in both
        (range(40), range(100, 110), None),
        (range(400), range(400), "at least 100 of the 400 rows"),
        (range(400), [*range(1, 5), *range(500, 516)], "at least 1 of the 20 rows"),  # every fourth row is read
        (range(400), [4, *range(500, 559)], None),
    ],
)
def test_validation_rows_that_are_learned_are_told(monkeypatch, train, valid, said):
    monkeypatch.setattr("llmdistill.data.held_out._COMPARED", 100)
    sentence = find_learned_rows(rows_of(*train), rows_of(*valid))
    assert (sentence is None) == (said is None)
    assert sentence is None or sentence.startswith(f"{said} of data.valid are also in data.train")


def test_validation_files_that_are_learned_are_told(tmp_path, monkeypatch):
    for name in ("a.txt", "folder/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("Once.")
    monkeypatch.chdir(tmp_path)
    for train, valid, is_told in (
        ("a.txt", str(tmp_path / "a.txt"), True),
        ("a.txt,folder", "folder/b.txt", True),
        ("a.txt=2,folder/b.txt=1", "a.txt", True),
        ("owner/name:train", "owner/name:train", True),
        ("owner/name:train", "owner/name:test", False),
        ("folder", "a.txt,folder", False),
        ("a.txt", "folder/b.txt", False),
    ):
        assert (find_learned_files(train, valid) is not None) == is_told, (train, valid)
