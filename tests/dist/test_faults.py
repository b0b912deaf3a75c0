"""A fault on one of two ranks: the job ends soon and names the rank and the cause, and the next start goes on."""

import time

import pytest

from support import PATIENCE, largest_difference

SAID = {
    "error": "error: rank {rank} failed: ZeroDivisionError: broken on purpose",
    "memory": "error: rank {rank} failed: out of memory (OutOfMemoryError: CUDA out of memory. Tried to allocate",
    "killed": "the process of rank {rank} of this node has ended",
}
CASES = [("loading", "error", 1), ("making", "memory", 0), ("training", "killed", 0), ("saving", "error", 0)]


@pytest.mark.parametrize(("stage", "kind", "rank"), CASES)
def test_a_fault_ends_the_job_soon_and_is_named(faulty, settings, tmp_path, stage, kind, rank):
    done = faulty(stage, kind, str(rank), *settings, "--output_dir", str(tmp_path / "run"), ranks=2)
    assert done.returncode != 0
    assert SAID[kind].format(rank=rank) in done.stderr
    assert ("of this node has ended" in done.stderr) == (kind == "killed"), "a rank that says why is not reported"


def test_the_next_start_goes_on(faulty, launch, trained, settings, tmp_path):
    folder = tmp_path / "run"
    more = (*settings, "--output_dir", str(folder))
    faulty("saving", "killed", "1", *more, ranks=2)
    launch(*more, ranks=2)
    assert largest_difference(trained(ranks=2), folder) == 0


def test_a_job_that_does_not_end_shows_where_it_stands_and_leaves_nothing_to_the_next(rank_server, tmp_path):
    stuck, short, begun = (tmp_path / name for name in ("stuck.py", "short.py", "begun"))
    stuck.write_text(f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\ntime.sleep(600)\n")
    short.write_text("")
    job = rank_server.start([], ranks=1, program=str(stuck))
    patience = time.monotonic() + PATIENCE
    while not begun.exists():
        assert time.monotonic() < patience
        time.sleep(0.01)
    with pytest.raises(AssertionError, match=r'stuck\.py", line 3'):
        job.wait(0.5)
    assert rank_server.run([], program=str(short)).returncode == 0
