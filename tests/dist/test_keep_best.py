"""A run that keeps the student of its best validation."""

from __future__ import annotations

import json

import pytest

from support import largest_difference, logged

pytestmark = pytest.mark.dist

VALIDATED = (
    *("--makd.scale", "plain", "--data.valid", "embedded:valid", "--train.schedule", "constant"),
    *("--train.validate_every", "1", "--train.learning_rate", "0.03", "--scoring.models", "[]"),
)


def test_the_student_of_the_smallest_loss_is_that_of_a_run_that_ends_there(trained):
    long = (*VALIDATED, "--train.steps", "6")
    best = trained(*long, "--train.keep_best", "loss")
    losses = dict(zip(logged(best, "step"), logged(best, "valid_loss"), strict=True))
    step = min(losses, key=losses.__getitem__)
    assert step < 6, losses
    kept = json.loads((best / "metrics.json").read_text())["kept"]
    assert (kept["step"], kept["value"]) == (step, losses[step])
    short = trained(*VALIDATED, "--train.steps", str(step))
    assert largest_difference(best, short) == 0
    assert not (best / "best").exists()


def test_the_score_of_the_kept_student_is_the_best_in_the_log_of_sharded_ranks(trained):
    greedy = ("--recipe", "quickstart", "--student.factorize.weighting", "none", "--data.tests", "{}")
    greedy += ("--student.factorize.allocation", "uniform", "--student.factorize.target_params", "null")
    greedy += ("--student.factorize.rank", "40", "--train.steps", "4", "--train.validate_every", "2")
    greedy += ("--scoring.decoding", "greedy", "--scoring.limit", "2", "--scoring.models", "student")
    greedy += ("--train.keep_best", "score", "--train.global_batch_size", "16", "--data.max_length", "128")
    run = trained(*greedy, ranks=2, ds_config="zero3")
    scores = logged(run, "valid_score")
    metrics = json.loads((run / "metrics.json").read_text())
    assert len(scores) == 2
    assert max(scores) > 0
    # The kept student is loaded and scored again.
    assert metrics["student"]["valid"]["rougeL"] == pytest.approx(max(scores), abs=1e-9)
    assert (metrics["kept"]["value"], metrics["kept"]["metric"]) == (max(scores), "ROUGE-L")
    sentence = f"The student is that of step {metrics['kept']['step']}, the best validation (ROUGE-L {max(scores):.4g})"
    assert sentence in (run / "report.md").read_text()
