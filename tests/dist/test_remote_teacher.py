"""A teacher behind a server that dies: nothing is lost, bit for bit.

A stand-in in this process plays the server; its answers do not depend on who asks and when.
"""

import pytest
from stand_in_server import serving

from llmdistill.errors import ServerLost

from support import largest_difference, logged, saved_steps

SAME = 2e-5
"""Adam divides a gradient by its size, so where it is nearly 0 five steps of 1e-3 make more of what was rounded."""
ASKED = ("--method", "kd", "--scoring.models", "[]", "--data.train", "embedded:valid", "--data.packing", "true")
ASKED += ("--data.max_length", "300")
SERVED = ("--teacher.top_k", "20", "--teacher.url")


@pytest.fixture(scope="module")
def server(tiny_teacher):
    with serving(tiny_teacher) as running:
        yield running


@pytest.fixture
def words(server, settings):
    """The arguments of a run that asks the server, or another one."""
    return lambda url=server.url: (*settings, *ASKED, *SERVED, url)


@pytest.fixture(scope="module")
def whole(trained, server):
    """The folder of a run that nothing interrupts."""
    return lambda *arguments, ranks: trained(*ASKED, *SERVED, server.url, *arguments, ranks=ranks)


def test_the_run_is_that_of_a_cache_of_as_many_tokens(whole, trained, launch, settings, tmp_path):
    own = ("--output", str(tmp_path / "cache"), "--cache.content", "top_k", "--cache.top_k", "20")
    launch("cache", *settings, *ASKED, *own, program="llmdistill.cli")
    from_cache = trained(*ASKED, "--teacher.cache", str(tmp_path / "cache"))
    assert logged(whole(ranks=1), "loss") == pytest.approx(logged(from_cache, "loss"), rel=1e-5)
    assert largest_difference(whole(ranks=1), from_cache) < SAME
    assert largest_difference(whole(ranks=2), from_cache) < SAME


@pytest.mark.parametrize(
    ("ranks", "more"),
    [(2, ()), pytest.param(1, ("--data.on_policy", "0.5", "--data.packing", "false"), marks=pytest.mark.slow)],
)
def test_a_server_that_dies_costs_no_step(tiny_teacher, launch, whole, words, tmp_path, ranks, more):
    """It dies after the answers of two and a half steps; another one takes its place elsewhere."""
    folder = ("--output_dir", str(tmp_path / "run"))
    with serving(tiny_teacher) as dying:
        dying.lives = 1 + 20  # the check asks one
        # No step is due before the end, and on busy cores even a server that lives may take seconds.
        lost = ("--train.save_every", "5", "--teacher.wait", "10")
        done = launch(*words(dying.url), *more, *lost, *folder, ranks=ranks, code=ServerLost.code)
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    (step,) = saved_steps(tmp_path / "run")
    assert step in (1, 2)  # the answers of a step and the next one come in any order
    assert said.startswith(f"error: teacher.url {dying.url}: the server has not answered for 10 s")
    assert said.endswith(f"start it again; step {step} is saved, and the same command goes on from there")
    refused = launch(*words(), *more, *folder, "--teacher.top_k", "19", code=2)
    assert "teacher.top_k was 20 and is now 19" in refused.stderr
    launch(*words(), *more, *folder, ranks=ranks)
    assert logged(tmp_path / "run", "step") == [1, 2, 3, 4, 5]
    assert largest_difference(tmp_path / "run", whole(*more, ranks=ranks)) == 0
