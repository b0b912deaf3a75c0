"""Answers of the student by a server, which a stand-in in this process plays: what it costs when it dies, and when not.

A real vLLM is in test_vllm_server.py.
"""

import pytest
from stand_in_server import serving

from llmdistill.errors import ServerLost
from llmdistill.report.metrics_log import TOP_SHARED, WRITER_GAP

from support import largest_difference, logged

OWN = ("--method", "kd", "--kd.ratio", "1", "--scoring.models", "[]", "--data.on_policy", "1", "--train.log_every", "1")
OWN += ("--data.max_length", "266")  # answers of up to ten tokens


@pytest.fixture(scope="module")
def untrained(trained):
    """The student as every run here makes it, which a server must be started with."""
    return trained(*OWN, "--train.steps", "1", ranks=1) / "untrained"


@pytest.fixture(scope="module")
def whole(trained, untrained):
    """The folder of a run that nothing interrupts."""

    def run(*more, ranks):
        with serving(untrained) as server:
            return trained(*OWN, "--data.rollout.url", server.url, *more, ranks=ranks)

    return run


@pytest.mark.parametrize("more", [(), ("--kd.divergence", "log_ratio")])
def test_the_log_says_how_near_the_models_are(whole, more):
    run = whole(*more, ranks=1)
    assert logged(run, "step") == [1, 2, 3, 4, 5]
    assert all(0 < share < 1 for share in logged(run, TOP_SHARED))
    assert max(logged(run, WRITER_GAP)) < 1e-5
    assert not (run / "handed-over").exists()


def test_an_older_student_is_further_from_what_it_writes(whole):
    gaps = logged(whole("--data.rollout.every", "3", ranks=1), WRITER_GAP)
    # The rows of steps 1, 2 and 4 are on answers of an older student, that of 3 is on the first of a new one.
    assert gaps[2] < 1e-5 < 1e-3 < min(gaps[0], gaps[1], gaps[3])


@pytest.mark.slow
def test_ranks_do_not_change_the_answers(whole):
    assert largest_difference(whole(ranks=2), whole(ranks=1)) < 1e-5
    sharded = whole("--ds_config", "zero3", ranks=2)
    assert largest_difference(sharded, whole(ranks=1)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_that_dies_costs_no_step(untrained, launch, whole, settings, tmp_path, ranks):
    words = (*settings, *OWN, "--output_dir", str(tmp_path / "run"), "--data.rollout.url")
    with serving(untrained) as dying:
        dying.lives = 20  # answers, of 8 a step
        lost = ("--train.save_every", "5", "--data.rollout.wait", "10")
        done = launch(*words, dying.url, *lost, ranks=ranks, code=ServerLost.code)
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert said.startswith(f"error: data.rollout.url {dying.url}: the server has not answered for 10 s")
    assert said.endswith("start it again; step 2 is saved, and the same command goes on from there")
    with serving(untrained) as again:
        launch(*words, again.url, ranks=ranks)
    assert logged(tmp_path / "run", "step") == [1, 2, 3, 4, 5]
    assert largest_difference(tmp_path / "run", whole(ranks=ranks)) == 0
