"""Passes over the calibration data, and the dealing of matrices to ranks."""

from __future__ import annotations

import pytest

from llmdistill.factorize.measure import GIB, deal, plan_passes

SHAPES = {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8), "gate": (12, 8), "up": (12, 8), "down": (8, 12)}
GROUPS = [["q", "k", "v"], ["o"], ["gate", "up"], ["down"]]


def test_passes_stay_below_the_memory_and_measure_shared_inputs_again_where_they_are_split():
    def size(group, *, of_inputs=True):
        return 4 * (of_inputs * SHAPES[group[0]][1] ** 2 + sum(SHAPES[name][0] ** 2 for name in group))

    # Room for queries and keys, but not for the values.
    most = size(["q", "k"])
    passes = plan_passes(GROUPS, SHAPES, gradients=True, memory=most / GIB)
    assert [each.groups for each in passes] == [[["q", "k"]], [["v"]], [["o"]], [["gate"]], [["up"]], [["down"]]]
    assert [each.bytes for each in passes] == [most, *(size([name]) for name in ("v", "o", "gate", "up", "down"))]
    # A whole layer but one matrix, and then what is left.
    most = sum(map(size, GROUPS)) - 1
    first, last = plan_passes(GROUPS, SHAPES, gradients=True, memory=most / GIB)
    assert (first.groups, last.groups) == (GROUPS[:3], GROUPS[3:])
    # Less memory than any matrix has: each is measured alone.
    alone = [each.groups for each in plan_passes(GROUPS, SHAPES, gradients=True, memory=1e-9)]
    assert alone == [[[name]] for name in SHAPES]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_every_matrix_has_a_rank_and_the_work_is_even(ranks: int):
    groups = [[f"{layer}.{name}" for name in group] for layer in range(4) for group in GROUPS]
    shapes = {name: SHAPES[name.split(".")[1]] for group in groups for name in group}
    owners = deal(groups, shapes, ranks)
    assert set(owners) == set(shapes)
    assert all(len({owners[name] for name in group}) == 1 for group in groups)
    loads = [0] * ranks
    for name, (m, n) in shapes.items():
        loads[owners[name]] += m * n * min(m, n)
    largest = max(sum(m * n * min(m, n) for m, n in (shapes[name] for name in group)) for group in groups)
    assert max(loads) - min(loads) <= largest
