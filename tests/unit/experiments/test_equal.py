"""Students of all starts have equally many parameters."""

from __future__ import annotations

import pytest

from llmdistill.config import FactorizeConfig
from llmdistill.config.command_line import parse_run
from llmdistill.embedded import locate
from llmdistill.errors import UserError
from llmdistill.experiments.equal import check_starts, equal_size
from llmdistill.factorize.sizes import summarize
from llmdistill.methods import METHODS


def recipe(*arguments):
    words = ["--recipe", "quickstart", "--ds_config", "ds_configs/zero2.json", *arguments]
    return parse_run(words, METHODS)[0]


RANK = ("--student.factorize.target_params", "null", "--student.factorize.rank", "30")
TARGET = ("--student.factorize.rank", "null", "--student.factorize.target_params", "40%")


@pytest.mark.parametrize(
    ("own", "size", "plain"),
    [
        (RANK, None, {"rank": 30}),
        (TARGET, None, {"target_params": "40%"}),
        (TARGET, "20", {"rank": 20}),
        (RANK, "25%", {"target_params": "25%"}),
    ],
)
def test_all_starts_have_the_parameters_of_the_plain_student(own, size, plain):
    settings = {key.rsplit(".", 1)[-1]: value for key, value in equal_size(recipe(*own), size).items()}
    teacher = locate("embedded:teacher")
    expected = summarize(teacher, FactorizeConfig(**plain))
    assert settings == {"rank": None, "ranks": None, "target_params": expected["student_params"]}
    # The largest single rank below this number is the plain student's rank again.
    assert summarize(teacher, FactorizeConfig(**settings))["rank"] == expected["rank"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--student.shape", "3x64x2"], r"student\.shape is 3x64x2: leave one"),
        (["--student.model", "somewhere"], r"student\.model is somewhere: leave one"),
        (["--student.factorize.ranks", '{"*": 20}'], r"instead of ranks"),
        (["--student.method", "kronecker"], r"student\.method is kronecker"),
    ],
)
def test_starts_need_a_teacher_that_is_cut_to_one_size(arguments, said):
    with pytest.raises(UserError, match=said):
        check_starts(recipe(*arguments).student)
