"""Answers that the student writes while it learns, under DeepSpeed."""

from __future__ import annotations

import json

import pytest
import torch

from support import largest_difference, weights

pytestmark = pytest.mark.dist

OWN = (
    *("--method", "kd", "--kd.divergence", "jsd", "--kd.ratio", "1.0", "--data.on_policy", "1.0"),
    *("--data.max_prompt_length", "96", "--data.max_length", "104"),
)


def test_two_sharded_ranks_write_and_learn_what_one_does(trained):
    assert largest_difference(trained(*OWN), trained(*OWN, ranks=2, ds_config="zero3")) < 1e-6


def test_the_student_learns_from_its_own_answers(trained):
    own, given = trained(*OWN), trained(*OWN[:-6], "--data.max_prompt_length", "96", "--data.max_length", "104")
    first, second = weights(own), weights(given)
    assert any(not torch.equal(first[name], second[name]) for name in first)
    rows = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
    assert all(row["jsd"] > 0 for row in rows)
    # Its answers end within eight tokens, the given ones need not.
    others = [json.loads(line) for line in (given / "metrics.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in rows] != [row["tokens"] for row in others]
