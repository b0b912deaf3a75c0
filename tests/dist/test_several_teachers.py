"""Students of several teachers, under DeepSpeed."""

import json
from pathlib import Path

import pytest
from tiny import save_decoder

from llmdistill.embedded import locate

from support import largest_difference

SAME, OTHER = 5e-5, 5e-4
"""Largest differences of equal and of other students. Adam divides a gradient by its size, so where it is nearly 0 five
steps of 1e-3 make more of what was rounded."""
KD = ("--method", "kd", "--scoring.models", "[]")


@pytest.fixture(scope="module")
def skills(tmp_path_factory) -> Path:
    """A second teacher, which is far from the first."""
    return save_decoder(tmp_path_factory.mktemp("skills"), initializer_range=0.5, num_hidden_layers=2)


@pytest.fixture(scope="module")
def averaged(skills) -> tuple[str, ...]:
    return (*KD, "--teacher.others.skills.model", str(skills), "--teacher.others.skills.weight", "3")


@pytest.fixture(scope="module")
def of_rows(skills, tmp_path_factory) -> tuple[str, ...]:
    """Every third row asks for the second teacher."""
    rows = [json.loads(line) for line in Path(locate("embedded:valid")).read_text().splitlines()]
    asked = [{**row, **({"teacher": "skills"} if number % 3 == 0 else {})} for number, row in enumerate(rows)]
    data = tmp_path_factory.mktemp("data") / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")
    own = ("--teacher.average", "rows", "--teacher.others.skills.model", str(skills), "--data.train", str(data))
    return (*KD, *own)


@pytest.mark.slow
def test_two_sharded_ranks_learn_what_one_does_of_an_average(trained, averaged):
    own = (*averaged, "--teacher.average", "log_probabilities")
    alone = trained(*own)
    assert largest_difference(alone, trained(*averaged)) > OTHER, "the averages are the same"
    sharded = ("--teacher.sharding", "zero3", "--teacher.others.skills.sharding", "zero3")
    assert largest_difference(alone, trained(*own, *sharded, ranks=2, ds_config="zero3")) < SAME


def test_two_ranks_learn_what_one_does_of_the_teachers_of_rows(trained, of_rows):
    """With one row a micro batch each rank has batches that ask for one of the teachers alone."""
    alone = trained(*of_rows)
    sharded = ("--teacher.sharding", "zero3", "--teacher.others.skills.sharding", "zero3")
    both = trained(*of_rows, *sharded, "--train.micro_batch_size", "1", ranks=2, ds_config="zero3")
    assert largest_difference(alone, both) < SAME
    assert largest_difference(alone, trained(*of_rows, "--data.packing", "true")) < SAME


@pytest.mark.parametrize("rule", ["averaged", "of_rows"])
def test_caches_teach_what_the_teachers_do(trained, launch, settings, request, tmp_path, rule):
    """Each teacher is in memory alone, while its cache is made."""
    own = (*request.getfixturevalue(rule), *(("--data.train", "embedded:valid") if rule == "averaged" else ()))
    caches = {"teacher.cache": "", "teacher.others.skills.cache": "skills"}
    for key, name in caches.items():
        folder = ("--output", str(tmp_path / key), "--cache.teacher", name)
        launch("cache", *settings, *own, *folder, program="llmdistill.cli")
    sizes = [json.loads((tmp_path / key / "cache.json").read_text())["examples"] for key in caches]
    assert sizes == ([100, 100] if rule == "averaged" else [66, 34])
    read = [word for key in caches for word in (f"--{key}", str(tmp_path / key))]
    if rule == "averaged":
        read = read[:2]  # one of them from its cache, and the other live
    assert largest_difference(trained(*own), trained(*own, *read)) < SAME
    if rule == "of_rows":
        swapped = (read[0], read[3], read[2], read[1])
        job = (*settings, "--ds_config", "zero2", "--output_dir", str(tmp_path / "swapped"), *own, *swapped)
        assert "its teacher is" in launch(*job, code=2).stderr
