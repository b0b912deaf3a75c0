"""A teacher's cache under the launcher: the same on two ranks as on one, and the training of the live teacher."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from llmdistill.artifacts import read_record
from llmdistill.files import write_json

from support import interrupted_copy, largest_difference, logged

ASKED = ("--method", "kd", "--scoring.models", "[]", "--data.train", "embedded:valid")


@pytest.fixture(scope="module")
def cached(launch, settings, tmp_path_factory):
    """Make a cache on some ranks."""

    def make(*arguments: str, ranks: int = 1) -> Path:
        folder = tmp_path_factory.mktemp("cache") / "cache"
        own = ("--output", str(folder), "--cache.shard_tokens", "2000")
        launch("cache", *settings, *ASKED, *own, *arguments, program="llmdistill.cli", ranks=ranks)
        return folder

    return make


@pytest.fixture(scope="module")
def alone(cached):
    return cached()


def shards(folder: Path) -> list[Path]:
    return sorted((folder / "shards").iterdir())


def test_two_ranks_write_the_cache_of_one(cached, alone):
    both = cached(ranks=2)
    assert len(shards(alone)) % 2 == 1, "one rank has nothing to do in the last round"
    assert (both / "cache.json").read_bytes() == (alone / "cache.json").read_bytes()
    assert [file.name for file in shards(both)] == [file.name for file in shards(alone)]
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(shards(both), shards(alone), strict=True))


def test_a_sharded_teacher_writes_the_same_cache(cached, alone):
    sharded = cached("--teacher.sharding", "zero3", ranks=2)
    for one, other in zip(
        (*shards(sharded), sharded / "head.safetensors"), (*shards(alone), alone / "head.safetensors"), strict=True
    ):
        ours, theirs = load_file(one), load_file(other)
        assert ours.keys() == theirs.keys()
        assert all((ours[name] - theirs[name]).abs().max() < 1e-5 for name in ours), one.name


def test_training_from_it_is_that_from_the_teacher_and_resumes_bit_equal(trained, alone, launch, settings, tmp_path):
    live, cache = trained(*ASKED), ("--teacher.cache", str(alone))
    run = trained(*ASKED, *cache, ranks=2)
    assert logged(run, "loss") == pytest.approx(logged(live, "loss"), rel=1e-5)
    assert largest_difference(run, live) < 1e-5
    folder = interrupted_copy(run, tmp_path / "resumed")
    words = (*settings, *ASKED, *cache, "--output_dir", str(folder))
    launch(*words, ranks=2)
    assert largest_difference(folder, run) == 0
    record = read_record(folder / "run.json", remedy="")
    record["inputs"]["teacher.cache"] = "sha256:0"
    write_json(folder / "run.json", record)
    assert "content of teacher.cache was sha256:0" in launch(*words, code=2).stderr


def test_damage_ends_both_ranks_with_one_sentence(alone, launch, settings, tmp_path):
    shutil.copytree(alone, tmp_path / "damaged")
    file = shards(tmp_path / "damaged")[1]  # rank 1 reads it
    file.write_bytes(file.read_bytes()[:-10])
    words = (*settings, *ASKED, "--output_dir", str(tmp_path / "run"))
    done = launch(*words, "--teacher.cache", str(tmp_path / "damaged"), ranks=2, code=2)
    assert done.stderr.count("error: ") == 1
    assert f"error: {file} has" in done.stderr
    assert not (tmp_path / "run").exists()
