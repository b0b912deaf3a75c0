"""A fault on one of two ranks: the job ends soon and names the rank and the cause, and the next start goes on."""

import pytest

from support import largest_difference

SAID = {
    "error": "error: rank {rank} failed: ZeroDivisionError: broken on purpose",
    "memory": "error: rank {rank} failed: out of memory (OutOfMemoryError: CUDA out of memory. Tried to allocate",
}


@pytest.mark.parametrize(("stage", "kind", "rank"), [("loading", "error", 1), ("making", "memory", 0)])
def test_a_fault_ends_the_job_soon_and_is_named(faulty, settings, tmp_path, stage, kind, rank):
    done = faulty(stage, kind, str(rank), *settings, "--output_dir", str(tmp_path / "run"), ranks=2)
    assert done.returncode != 0
    assert SAID[kind].format(rank=rank) in done.stderr
    assert "of this node has ended" not in done.stderr, "a rank that says why is not reported"


def test_a_killed_rank_is_named_and_the_next_start_goes_on(faulty, launch, trained, settings, tmp_path):
    folder = tmp_path / "run"
    more = (*settings, "--output_dir", str(folder))
    assert "the process of rank 1 of this node has ended" in faulty("saving", "killed", "1", *more, ranks=2).stderr
    launch(*more, ranks=2)
    assert largest_difference(trained(ranks=2), folder) == 0
