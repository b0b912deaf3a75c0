"""The help of the main job, and hints at values that nearly fit."""

import re

import pytest

from llmdistill.config.command_line import parse_run, run_parser
from llmdistill.config.help import asked_help, help_of
from llmdistill.errors import UserError
from llmdistill.methods import METHODS


def help_text(*words, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_run(words, METHODS)
    assert ended.value.code == 0
    return capsys.readouterr().out


def flags(text):
    return re.findall(r"^  (?:-h, )?--([\w.]+)", text, flags=re.MULTILINE)


def test_the_help_is_short_and_has_the_common_settings_first(capsys):
    text = help_text("--train.steps", "3", "--help", capsys=capsys)
    assert len(text.splitlines()) <= 50
    assert max(map(len, text.splitlines())) <= 120
    assert flags(text)[:2] == ["recipe", "ds_config"]
    assert "--help all" in text
    for part in ("student", "train", "scoring", "makd", "kroneckerbert"):
        assert part in text.split("more settings:")[1]


def test_a_section_has_its_settings_and_no_others(capsys):
    keys = flags(help_text("--help", "train", capsys=capsys))
    assert {"train.steps", "train.learning_rate"} <= set(keys)
    assert all(key.startswith("train.") for key in keys)
    assert set(flags(help_text("-h", "student.lora", capsys=capsys))) == {
        f"student.lora.{key}" for key in ("rank", "alpha", "dropout", "targets")
    }
    assert {"method", "seed", "recipe"} <= set(flags(help_text("--help=run", capsys=capsys)))
    # What one help leaves out, the next one shows.
    assert set(keys) < set(flags(help_text("--help", "all", capsys=capsys)))


def test_a_section_that_does_not_exist_is_named(capsys):
    with pytest.raises(UserError, match=r"--help trian: there is no such section; did you mean train\?"):
        help_of(run_parser(METHODS), "trian", METHODS)
    assert asked_help(["--train.steps", "3"]) is None


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--method", "mkad"], "makd"),
        (["--train.dtype", "bfloat16"], "bf16"),
        (["--train.schedule", "cosin"], "cosine"),
        (["--student.init", "slise"], "slice"),
        (["--recipe", "makd/bert256"], "makd/bert-256"),
    ],
)
def test_values_that_nearly_fit(words, meant):
    with pytest.raises(UserError, match=rf"; did you mean {meant}\?$"):
        parse_run(words, METHODS)
