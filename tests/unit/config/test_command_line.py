"""Recipes and command lines."""

from __future__ import annotations

import dataclasses
import shlex
import sys

import pytest

from llmdistill.config import RunConfig, command_line
from llmdistill.config.command_line import parse_run, recipe_names, run_parser, to_dict
from llmdistill.errors import UserError
from llmdistill.methods import METHODS
from llmdistill.methods.minilmv2 import Minilmv2Config
from llmdistill.runtime.ds_config import read_ds_config

DS = ["--ds_config", "zero2.json"]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_command_line_wins_over_recipe_wherever_it_stands(tmp_path):
    recipe = write(tmp_path / "mine.yaml", "train: {steps: 7, learning_rate: 0.5}\n")
    before, _ = parse_run(["--train.steps", "3", "--recipe", recipe, *DS], METHODS)
    after, _ = parse_run([*DS, f"--recipe={recipe}", "--train.steps=3"], METHODS)
    assert before.train.steps == after.train.steps == 3
    assert before.train.learning_rate == 0.5


def test_default_folder_names_recipe_and_ds_config(tmp_path):
    config, _ = parse_run(["--recipe", write(tmp_path / "mine.yaml", "seed: 1\n"), *DS], METHODS)
    assert config.output_dir == "runs/mine-zero2"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--train.step", "3"], "--train.step: .* did you mean --train.steps?"),
        (["--learning_rate", "3"], "did you mean --train.learning_rate?"),
        (["--makd.atention=1"], "did you mean --makd.attention?"),
        (["--train.steps", "many"], "train.steps: 'many' does not fit; expected int"),
        (["--train.validate_every", "null"], "train.validate_every: null does not fit; expected int"),
        (["--method", "magic"], "method: 'magic' does not fit"),
        (["--data.tests", "foo.jsonl"], "data.tests: 'foo.jsonl' .* a mapping such as '{NAME: foo.jsonl}'"),
        (["--data.tests", "[a b]"], "data.tests: .* does not fit; expected a mapping such as '{NAME: VALUE}'"),
        (["--train.steps", "0"], "train.steps is 0: give 1 or more"),
        (["--train.warmup_steps", "-1"], "train.warmup_steps is -1: give 0 or more"),
        (["--scoring.batch_size", "0"], "^scoring.batch_size is 0: give 1 or more"),
        (["--scoring.seeds", "1,1"], r"^scoring.seeds is \[1, 1\]: give at least one, each once"),
        (["--data.max_length", "10"], "data.max_prompt_length is .* leave room"),
        (["--recipe", "nowhere"], "--recipe nowhere: .* shipped are .*quickstart"),
    ],
)
def test_mistakes_are_one_sentence(arguments, expected):
    with pytest.raises(UserError, match=expected) as caught:
        parse_run([*DS, *arguments], METHODS)
    assert "\n" not in str(caught.value)


def test_a_run_has_zero2_where_no_ds_config_is_given(tmp_path):
    assert read_ds_config(parse_run([], METHODS)[0].ds_config)["zero_optimization"]["stage"] == 2
    recipe = write(tmp_path / "mine.yaml", "ds_config: zero3\n")
    assert parse_run(["--recipe", recipe], METHODS)[0].ds_config == "zero3"


@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        ([], "quickstart"),
        (["--train.steps", "50", "--student.model", "some/where", "--data.tests", "{}"], "quickstart"),
        (["--teacher.model", "embedded:teacher", "--data.train=embedded:train"], "quickstart"),
        (["--teacher.model", "some/where"], None),
        (["--data.train=mine.jsonl"], None),
        (["--data.kind", "task", "--data.task.name", "rte"], None),
        (["--data.train", "mine.jsonl", "--recipe", "pruned"], "pruned"),
    ],
)
def test_the_embedded_example_is_only_for_runs_without_a_teacher_or_data_of_their_own(words, recipe):
    config, flags = parse_run(words, METHODS)
    assert flags.recipe == recipe
    assert config.output_dir == f"runs/{recipe or 'own'}-zero2"
    if recipe is None:
        usual = RunConfig(output_dir=config.output_dir)
        assert config.train == usual.train
        assert (config.data.valid, config.data.tests, config.data.max_length) == (None, {}, 512)
        assert (config.student, config.scoring) == (usual.student, usual.scoring)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: {stepz: 3}\n", r"mine.yaml: train.stepz: there is no such setting; did you mean train.steps\?"),
        ("a: [\n", r"mine.yaml:\d+: not valid YAML"),
        ("- 1\n", "mine.yaml: not a mapping of settings"),
    ],
)
def test_mistakes_in_a_recipe_name_it(tmp_path, text, expected):
    with pytest.raises(UserError, match=expected):
        parse_run([*DS, "--recipe", write(tmp_path / "mine.yaml", text)], METHODS)


def test_a_recipe_extends_another(tmp_path):
    write(tmp_path / "base/lowest.yaml", "seed: 3\ntrain: {steps: 5, learning_rate: 0.1, betas: [0.9, 0.98]}\n")
    write(tmp_path / "base/middle.yaml", "extends: lowest.yaml\ntrain: {steps: 6}\ndata: {max_length: 700}\n")
    mine = write(tmp_path / "mine.yaml", "train: {warmup_steps: 2, learning_rate: 0.2}\nextends: base/middle.yaml\n")
    config, flags = parse_run([*DS, "--recipe", mine, "--train.warmup_steps", "1"], METHODS)
    assert config.seed == 3
    assert (config.train.steps, config.train.learning_rate, config.train.warmup_steps) == (6, 0.2, 1)
    assert config.train.betas == (0.9, 0.98)
    assert config.data.max_length == 700
    assert config.output_dir == "runs/mine-zero2"
    assert flags.recipe == mine
    assert not hasattr(config, "extends")


def test_a_shipped_recipe_can_be_extended(tmp_path):
    shipped, _ = parse_run([*DS, "--recipe", "quickstart"], METHODS)
    config, _ = parse_run([*DS, "--recipe", write(tmp_path / "mine.yaml", "extends: quickstart\nseed: 7\n")], METHODS)
    assert config == dataclasses.replace(shipped, seed=7, output_dir="runs/mine-zero2")
    empty, _ = parse_run([*DS, "--recipe", write(tmp_path / "mine.yaml", "extends: quickstart\n")], METHODS)
    assert empty == dataclasses.replace(shipped, output_dir="runs/mine-zero2")


def test_free_mappings_and_lists_of_the_extended_recipe_are_replaced(tmp_path):
    write(
        tmp_path / "base.yaml",
        "data: {tests: {a: a.jsonl, b: b.jsonl}}\nminilmv2: {relations: [qq, kk]}\n"
        "student: {factorize: {ranks: {'*q*': 3}}}\n",
    )
    text = (
        "extends: base.yaml\ndata: {tests: {c: c.jsonl}}\nminilmv2: {relations: [vv]}\n"
        "student: {factorize: {ranks: {'*k*': 4}}}\n"
    )
    config, _ = parse_run([*DS, "--recipe", write(tmp_path / "mine.yaml", text)], METHODS)
    assert config.data.tests == {"c": "c.jsonl"}
    assert config.method_settings["minilmv2"].relations == ["vv"]
    assert config.student.factorize.ranks == {"*k*": 4}


@pytest.mark.parametrize(
    ("base", "mine", "expected"),
    [
        (
            "seed: 1\n",
            "extends: nowhere.yaml\n",
            r"mine.yaml: extends nowhere.yaml: neither a shipped recipe nor a file",
        ),
        ("seed: 1\n", "extends: [base.yaml]\n", r"mine.yaml: extends \['base.yaml'\]: neither"),
        ("seed: 1\n", "extends: .\n", r"mine.yaml: extends \.: neither"),
        ("seed: 1\n", "extends: mine.yaml\n", r"mine.yaml: extends mine.yaml, which itself builds on this one"),
        ("extends: ./mine.yaml\n", "extends: base.yaml\n", r"base.yaml: extends ./mine.yaml, which itself builds"),
        ("train: {stepz: 3}\n", "extends: base.yaml\n", r"base.yaml: train.stepz: .* did you mean train.steps\?"),
        ("seed: 1\n", "extends: base.yaml\nsed: 1\n", r"mine.yaml: sed: .* did you mean seed\?"),
        ("a: [\n", "extends: base.yaml\n", r"base.yaml:\d+: not valid YAML"),
        ("seed: 1\n", "extend: base.yaml\n", r"mine.yaml: extend: .* did you mean extends\?"),
        ("train: {steps: x}\n", "extends: base.yaml\n", r"train.steps: 'x' does not fit"),
    ],
)
def test_mistakes_in_extending_name_the_file(tmp_path, base, mine, expected):
    write(tmp_path / "base.yaml", base)
    with pytest.raises(UserError, match=expected) as caught:
        parse_run([*DS, "--recipe", write(tmp_path / "mine.yaml", mine)], METHODS)
    assert "\n" not in str(caught.value)


def test_extends_is_no_flag():
    with pytest.raises(UserError, match="--extends quickstart: that is for recipes; give --recipe quickstart"):
        parse_run([*DS, "--extends", "quickstart"], METHODS)


def test_recipes_in_subfolders_have_names_and_folders_of_their_own(tmp_path, monkeypatch):
    for name in ("one", "paper/two", "paper/_base"):
        write(tmp_path / f"{name}.yaml", "seed: 5\n")
    monkeypatch.setattr("llmdistill.config.recipes.RECIPES", tmp_path)
    assert recipe_names() == ["one", "paper/two"]
    config, flags = parse_run([*DS, "--recipe", "paper/two"], METHODS)
    assert (config.seed, config.output_dir, flags.recipe) == (5, "runs/paper/two-zero2", "paper/two")
    with pytest.raises(UserError, match=r"shipped are one, paper/two;"):
        parse_run([*DS, "--recipe", "paper/_base"], METHODS)


def test_free_keys_below_a_mapping_are_allowed():
    config, _ = parse_run([*DS, "--data.tests.mine=some.jsonl", "--student.factorize.rank=null"], METHODS)
    assert config.data.tests["mine"] == "some.jsonl"
    assert config.student.factorize.rank is None


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_parses(name):
    config, flags = parse_run([*DS, "--recipe", name], METHODS)
    assert isinstance(config, RunConfig)
    assert flags.recipe == name


def test_every_setting_is_documented_in_help():
    text = " ".join(run_parser(METHODS).format_help().split())
    paths = [key for key in leaf_keys(RunConfig, "") if key != "method_settings"]
    for name, method in METHODS.items():
        paths += [] if method.settings is None else leaf_keys(method.settings, f"{name}.")
        assert "".join(f"{name}: {method.help}".split()) in "".join(text.split()), "--method tells what each is"
    assert len(paths) > 50
    for key in paths:
        entry = text.split(f"--{key} ", 1)[1]
        assert len(entry.split(" (type:")[0].split()) >= 3, f"{key} has no help"


def leaf_keys(kind, prefix):
    hints = {field.name: field for field in dataclasses.fields(kind)}
    keys = []
    for name, field in hints.items():
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        keys += (
            leaf_keys(type(default), f"{prefix}{name}.") if dataclasses.is_dataclass(default) else [f"{prefix}{name}"]
        )
    return keys


def test_configuration_is_plain_json_values():
    config, _ = parse_run([*DS, "--train.betas", "[0.9, 0.99]"], METHODS)
    assert to_dict(config)["train"]["betas"] == [0.9, 0.99]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3


def test_target_may_be_a_bare_number_in_yaml(tmp_path):
    recipe = write(tmp_path / "mine.yaml", "student: {factorize: {target_params: 690000000}}\n")
    assert parse_run([*DS, "--recipe", recipe], METHODS)[0].student.factorize.target_params == 690_000_000
    share, _ = parse_run([*DS, "--recipe", recipe, "--student.factorize.target_params=62%"], METHODS)
    assert share.student.factorize.target_params == "62%"


def test_lists_may_be_written_with_commas():
    given = ["--tasks.names", "rte,cola", "--tasks.seeds=1,2", "--tasks.epochs", "[3,5]", "--tasks.learning_rates"]
    others = ["--student.lora.targets", "null", "--data.train", "a,b", "--also", "kd"]
    config, _ = parse_run([*DS, *given, "1e-5", *others], METHODS)
    tasks = config.tasks
    assert (tasks.names, tasks.seeds, tasks.epochs, tasks.learning_rates) == (["rte", "cola"], [1, 2], [3, 5], [1e-5])
    assert (config.student.lora.targets, config.data.train, config.also) == (None, "a,b", ["kd"])
    for words in (["--tasks.seeds", "1,x"], ["--tasks.names", "--seed", "3"], ["--tasks.seeds"]):
        with pytest.raises(UserError, match="tasks"):
            parse_run([*DS, *words], METHODS)


def test_a_part_changes_as_a_recipe_would_change_it():
    part = Minilmv2Config()
    found = command_line.changed(part, {"relation_heads": 12, "teacher_layer": 3}, key="k")
    assert found == dataclasses.replace(part, relation_heads=12, teacher_layer=3)
    assert command_line.changed(part, {}, key="k") == part
    for values, said in (
        ({"relation_head": 1}, r"k\.relation_head: there is no such setting; did you mean k\.relation_heads\?"),
        ({"relation_heads": "many"}, r"k\.relation_heads: 'many' does not fit; expected int"),
        ({"relation_heads": 0}, "minilmv2.relation_heads is 0: give 1 or more"),
    ):
        with pytest.raises(UserError, match=said):
            command_line.changed(part, values, key="k")


def test_the_command_can_be_pasted_into_a_shell(monkeypatch):
    words = ["--student.factorize.shapes", '{"*.attention.*": 8x2, "*": 2x2}', "--seed=1"]
    monkeypatch.setattr(sys, "argv", ["another", "program"])
    typed = command_line.typed_command("llmdistill/train.py", ["--local_rank=0", *words])
    assert shlex.split(typed) == ["deepspeed", "llmdistill/train.py", *words]
    monkeypatch.setenv("WORLD_SIZE", "2")
    typed = command_line.typed_command("llmdistill/train.py", words)
    assert shlex.split(typed) == ["deepspeed", "--num_gpus", "2", "llmdistill/train.py", *words]
