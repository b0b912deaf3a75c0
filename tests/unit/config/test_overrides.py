"""A later layer of settings takes back what it replaces in the layers below it, and nothing else."""

import pytest

from llmdistill.config.command_line import parse_run
from llmdistill.methods import METHODS

DS = ["--ds_config", "zero2"]
BASE = """
student:
  method: svd
  factorize: {target_params: 34%, weighting: gradients, allocation: loss}
"""


def factorize_of(tmp_path, text, *words):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(text, encoding="utf-8")
    return parse_run([*DS, "--recipe", str(recipe), *words], METHODS)[0].student


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"target_params": "34%", "weighting": "gradients", "allocation": "loss"}),
        (["--student.factorize.rank", "30"], {"rank": 30, "weighting": "gradients"}),
        (["--student.factorize.rank=30"], {"rank": 30, "weighting": "gradients"}),
        (
            ["--student.factorize.rank", "null"],
            {"target_params": "34%", "weighting": "gradients", "allocation": "loss"},
        ),
        (["--student.factorize.ranks", "{'*q*': 3}"], {"ranks": {"*q*": 3}, "weighting": "gradients"}),
        (
            ["--student.factorize.target_params", "50%"],
            {"target_params": "50%", "weighting": "gradients", "allocation": "loss"},
        ),
        (["--student.factorize.weighting", "activations"], {"target_params": "34%", "weighting": "activations"}),
        (
            ["--student.factorize.weighting", "gradients"],
            {"target_params": "34%", "weighting": "gradients", "allocation": "loss"},
        ),
        # What the recipe says already changes nothing.
        (["--student.method", "svd"], {"target_params": "34%", "weighting": "gradients", "allocation": "loss"}),
        (["--student.shape", "3x128x4"], {"target_params": "34%"}),
        (["--student.model", "some/where"], {"target_params": "34%"}),
        (["--student.method=kronecker", "--student.factorize.shapes", "{'*': 8x2}"], {"shapes": {"*": "8x2"}}),
    ],
)
def test_the_command_line_replaces_the_rivals_of_its_settings(tmp_path, words, expected):
    usual = {"weighting": "none", "allocation": "uniform"}
    factorize = factorize_of(tmp_path, BASE, *words).factorize
    for key in ("rank", "ranks", "target_params", "shapes", "weighting", "allocation"):
        assert getattr(factorize, key) == expected.get(key, usual.get(key)), key


def test_a_recipe_replaces_the_rivals_in_the_recipe_that_it_extends(tmp_path):
    (tmp_path / "base.yaml").write_text(BASE, encoding="utf-8")
    text = "extends: base.yaml\nstudent: {factorize: {ranks: {'*k*': 4}}}\n"
    factorize = factorize_of(tmp_path, text).factorize
    assert (factorize.ranks, factorize.target_params, factorize.allocation) == ({"*k*": 4}, None, "uniform")


def test_settings_of_one_layer_do_not_replace_each_other(tmp_path):
    words = ["--student.factorize.rank", "30", "--student.factorize.target_params", "50%"]
    factorize = factorize_of(tmp_path, "seed: 1\n", *words).factorize
    assert (factorize.rank, factorize.target_params) == (30, "50%")  # the plan refuses both together


def test_a_given_student_and_a_shape_replace_each_other(tmp_path):
    student = factorize_of(tmp_path, "student: {shape: 3x64x4}\n", "--student.model", "some/where")
    assert (student.model, student.shape) == ("some/where", None)


@pytest.mark.parametrize(("pairs", "next_sentence"), [("false", None), ("true", True)])
def test_a_text_without_pairs_has_no_next_sentences(pairs, next_sentence):
    words = ["--recipe", "makd/bert-256", "--data.text.pairs", pairs]
    assert parse_run([*DS, *words], METHODS)[0].data.text.next_sentence is next_sentence
