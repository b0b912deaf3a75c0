"""The finding of a comparison in a sentence, and what it says of sets."""

from __future__ import annotations

import numpy as np

from llmdistill.report.results import Row, Run, describe_finding
from llmdistill.report.score import PERPLEXITY, ROUGE_L

SETS = ["seen", "unseen"]


def make_row(name, values, score=ROUGE_L):
    about = {"method": name, "folder": "f", "command": "c"}
    runs = [Run(seed=seed, scores=dict.fromkeys(SETS, value), **about) for seed, value in enumerate(values)]
    return Row(name=name, label=name.upper(), score=score, runs=runs)


def finding(score=ROUGE_L, **scores):
    return describe_finding([make_row(name, values, score) for name, values in scores.items()], SETS)


def test_finding_is_a_lead_only_over_the_standard_error():
    kd, makd = [40.0, 42.0, 44.0], [48.0, 49.0, 50.0]
    error = np.sqrt(np.var(kd, ddof=1) / 3 + np.var(makd, ddof=1) / 3)
    lead = "MAKD leads the next best, KD, by 7.0 points on the average of 2 sets"
    assert finding(sft=[1.0, 2.0], kd=kd, makd=makd) == f"{lead} (standard error of the difference {error:.1f})."
    close = "No method is ahead beyond one standard error: MAKD is 0.7"
    assert finding(kd=kd, makd=[43.0, 42.0, 43.0]).startswith(close)
    assert finding(kd=kd, makd=kd).startswith("No method is ahead")


def test_finding_is_honest_about_one_seed_and_no_gain():
    assert "from one seed" in finding(kd=[40.0], makd=[50.0])
    assert finding(none=[60.0], kd=[40.0, 41.0], makd=[50.0, 51.0]) == (
        "No method is above the untrained student: the best, MAKD, is 9.5 points below it on the average of 2 sets."
    )
    assert finding(teacher=[60.0], none=[5.0], kd=[40.0]) == (
        "KD reaches 40.0 on the average of 2 sets, 20.0 points below the teacher, "
        "35.0 points above the untrained student."
    )


def test_finding_knows_that_a_lower_perplexity_is_better():
    def of(**scores):
        return finding(score=PERPLEXITY, **{name: [value] for name, value in scores.items()})

    where = "on the average of 2 sets"
    assert of(sft=20.0, kd=16.0).startswith(f"KD is 4 points of perplexity below the next best, SFT, {where};")
    assert of(none=15.0, sft=20.0, kd=16.0) == (
        f"No method is below the untrained student: the best, KD, is 1 points of perplexity above it {where}."
    )
    below = "6 points of perplexity above the teacher, 884 points of perplexity below the untrained student."
    assert of(teacher=10.0, none=900.0, kd=16.0) == f"KD reaches 16 {where}, {below}"
