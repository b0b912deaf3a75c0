"""Students of all starts have equally many parameters."""

from __future__ import annotations

import pytest

from llmdistill.config import FactorizeConfig
from llmdistill.config.command_line import parse_run
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.experiments.equal_params import check_starts, equal_size
from llmdistill.factorize.plan import summarise
from llmdistill.methods import METHODS


def recipe(*arguments):
    words = ["--recipe", "quickstart", "--ds_config", "ds_configs/zero2.json", *arguments]
    return parse_run(words, METHODS)[0]


RANK = ("--student.factorize.target_params", "null", "--student.factorize.rank", "30")
TARGET = ("--student.factorize.rank", "null", "--student.factorize.target_params", "40%")


@pytest.mark.parametrize(
    ("own", "size", "rank"), [(RANK, None, 30), (RANK, "20", 20), (TARGET, "20", 20), (TARGET, "25%", None)]
)
def test_a_rank_is_the_number_of_parameters_whose_largest_rank_it_is(own, size, rank):
    settings = {key.rsplit(".", 1)[-1]: value for key, value in equal_size(recipe(*own), size).items()}
    if rank is None:
        assert settings == {"rank": None, "ranks": None, "target_params": size}
        return
    teacher = locate("embedded:teacher")
    found = summarise(teacher, FactorizeConfig(**settings))
    assert (found["rank"], found["student_params"]) == (rank, settings["target_params"])
    assert found["student_params"] == summarise(teacher, FactorizeConfig(rank=rank))["student_params"]


def test_the_target_of_the_recipe_is_kept():
    assert equal_size(recipe(*TARGET))["student.factorize.target_params"] == "40%"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--student.shape", "3x64x2"], r"student\.shape is 3x64x2: leave one"),
        (["--student.model", "somewhere"], r"student\.model is somewhere: leave one"),
        ([*TARGET[:2], "--student.factorize.target_params", "null"], r"instead of ranks"),
        (["--student.method", "kronecker"], r"student\.method is kronecker"),
    ],
)
def test_starts_need_a_teacher_that_is_cut_to_one_size(arguments, said):
    with pytest.raises(UserError, match=said):
        check_starts(recipe(*arguments))
