"""Answers that the student writes while it learns, under DeepSpeed."""

from __future__ import annotations

import pytest

from support import largest_difference, logged

pytestmark = pytest.mark.dist

OWN = (
    *("--method", "kd", "--kd.divergence", "jsd", "--kd.ratio", "1.0", "--data.on_policy", "1.0"),
    *("--data.max_prompt_length", "96", "--data.max_length", "104"),
)


def test_two_sharded_ranks_write_and_learn_what_one_does(trained):
    assert largest_difference(trained(*OWN), trained(*OWN, ranks=2, ds_config="zero3")) < 1e-6


def test_the_student_learns_from_its_own_answers(trained):
    own, given = trained(*OWN), trained(*OWN[:-6], "--data.max_prompt_length", "96", "--data.max_length", "104")
    assert largest_difference(own, given) > 0
    assert min(logged(own, "jsd")) > 0
    # Its answers end within eight tokens, the given ones need not.
    assert logged(own, "tokens") != logged(given, "tokens")
