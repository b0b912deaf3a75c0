"""Recipes and command lines, and the help of the main job."""

import argparse
import dataclasses
import os
import re
import shlex
import subprocess
import sys

import pytest
from hostile import refuses

from llmdistill.commands import cache, compare, evaluate
from llmdistill.config import RunConfig, command_line, foreign
from llmdistill.config.command_line import parse_run, recipe_names, run_parser
from llmdistill.methods import METHODS
from llmdistill.methods.minilmv2 import Minilmv2Config
from llmdistill.runtime.ds_config import read_ds_config

DS = ["--ds_config", "zero2.json"]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_command_line_wins_over_recipe_wherever_it_stands(tmp_path):
    mine = "ds_config: zero3\ntrain: {steps: 7, learning_rate: 0.5}\nstudent: {factorize: {target_params: 690000000}}\n"
    recipe = write(tmp_path / "mine.yaml", mine)
    for words in (["--train.steps", "3", "--recipe", recipe], [f"--recipe={recipe}", "--train.steps=3"]):
        config, _ = parse_run(words, METHODS)
        assert (config.train.steps, config.train.learning_rate, config.ds_config) == (3, 0.5, "zero3")
        assert config.student.factorize.target_params == 690_000_000, "it may be a bare number"
    usual = read_ds_config(parse_run([], METHODS)[0].ds_config)
    assert usual["zero_optimization"]["stage"] == 2


def test_a_recipe_is_utf8_whatever_the_locale(tmp_path):
    recipe = write(tmp_path / "mine.yaml", "extends: minilm/6x384  # with a §\ndata: {train: Übung.txt}\n")
    code = "import sys; from llmdistill.config.command_line import parse_run; from llmdistill.methods import METHODS; "
    code += "print(ascii(parse_run(['--recipe', sys.argv[1]], METHODS)[0].data.train))"
    locale = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", code, recipe]
    result = subprocess.run(command, env=os.environ | locale, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ascii("Übung.txt")


def test_settings_in_python_take_keys_of_mappings():
    ranks = {"student.factorize.ranks.layers.*": 3, "student.factorize.ranks.*": 4}
    others = {"teacher.others.b.model": "b", "teacher.others.b.weight": 2.0}
    config = command_line.config_of({"data.tests.a": "a.jsonl", **ranks, **others}, {}, METHODS)
    assert config.data.tests == {"a": "a.jsonl"}
    assert config.student.factorize.ranks == {"layers.*": 3, "*": 4}
    assert (config.teacher.others["b"].model, config.teacher.others["b"].weight) == ("b", 2.0)


@pytest.mark.parametrize(("words", "recipe"), [
    ([], "quickstart"),
    (["--train.steps", "50", "--student.model", "some/where", "--data.tests", "{}"], "quickstart"),
    (["--teacher.model", "embedded:teacher", "--data.train=embedded:train"], "quickstart"),
    (["--teacher.model", "some/where"], None),
    (["--data.kind", "task", "--data.task.name", "rte"], None),
    (["--data.train", "mine.jsonl", "--recipe", "pruned"], "pruned"),
])  # fmt: skip
def test_the_embedded_example_is_only_for_runs_without_a_teacher_or_data_of_their_own(words, recipe):
    config, flags = parse_run(words, METHODS)
    assert flags.recipe == recipe
    assert config.output_dir == f"runs/{recipe or 'own'}-zero2"
    if recipe is None:
        usual = RunConfig(output_dir=config.output_dir)
        assert config.train == usual.train
        assert (config.data.valid, config.data.tests, config.data.max_length) == (None, {}, 512)
        assert (config.student, config.scoring) == (usual.student, usual.scoring)


def test_a_recipe_extends_another(tmp_path):
    lowest = "seed: 3\ntrain: {steps: 5, learning_rate: 0.1, betas: [0.9, 0.98]}\ndata: {tests: {a: a.jsonl}}\n"
    write(tmp_path / "base/lowest.yaml", lowest + "student: {factorize: {ranks: {'*q*': 3}}}\n")
    middle = "extends: lowest.yaml\ntrain: {steps: 6}\ndata: {max_length: 700}\nminilmv2: {relations: [qq, kk]}\n"
    write(tmp_path / "base/middle.yaml", middle)
    mine = "train: {warmup_steps: 2, learning_rate: 0.2}\ndata: {tests: {c: c.jsonl}}\nminilmv2: {relations: [vv]}\n"
    mine += "student: {factorize: {ranks: {'*k*': 4}}}\nextends: base/middle.yaml\n"
    mine = write(tmp_path / "mine.yaml", mine)
    config, flags = parse_run([*DS, "--recipe", mine, "--train.warmup_steps", "1"], METHODS)
    assert config.seed == 3
    assert (config.train.steps, config.train.learning_rate, config.train.warmup_steps) == (6, 0.2, 1)
    assert config.train.betas == (0.9, 0.98)
    assert (config.output_dir, flags.recipe) == ("runs/mine-zero2", mine)
    assert not hasattr(config, "extends")
    # Free mappings and lists are replaced as a whole.
    assert (config.data.tests, config.data.max_length) == ({"c": "c.jsonl"}, 700)
    assert config.method_settings["minilmv2"].relations == ["vv"]
    assert config.student.factorize.ranks == {"*k*": 4}


def test_recipes_in_subfolders_have_names_and_folders_of_their_own(tmp_path, monkeypatch):
    for name in ("one", "paper/two", "paper/_base"):
        write(tmp_path / f"{name}.yaml", "seed: 5\n")
    monkeypatch.setattr("llmdistill.config.recipes.RECIPES", tmp_path)
    assert recipe_names() == ["one", "paper/two"]
    config, flags = parse_run([*DS, "--recipe", "paper/two"], METHODS)
    assert (config.seed, config.output_dir, flags.recipe) == (5, "runs/paper/two-zero2", "paper/two")
    refuses("shipped are one, paper/two;", parse_run, [*DS, "--recipe", "paper/_base"], METHODS)


def test_every_setting_is_documented_in_help():
    parser = run_parser(METHODS)
    text = "".join(parser.format_help().split())
    settings = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    assert len(settings) > 50
    for action in settings:
        assert len(str(action.help).split()) >= 2, f"{action.dest} has no help"
    for name, method in METHODS.items():
        assert "".join(f"{name}: {method.help}".split()) in text, "--method tells what each is"


def test_help_fits_a_terminal_of_80_columns(monkeypatch, capsys):
    """argparse wraps no titles. They are the first line of a docstring, and a longer one would end in mid-sentence."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = help_text("--help", capsys=capsys).splitlines()
    for parser in (
        run_parser(METHODS),
        evaluate.build_parser("evaluate"),
        cache.build_parser(),
        compare.build_parser(),
    ):
        lines += [f"usage: {parser.usage or ''}", *(f"{group.title}:" for group in parser._action_groups)]
    assert [line for line in lines if len(line) > 80] == []


def help_text(*words, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_run(words, METHODS)
    assert ended.value.code == 0
    return capsys.readouterr().out


def flags(text):
    return re.findall(r"^  (?:-h, )?--([\w.]+)", text, flags=re.MULTILINE)


def test_the_help_is_short_and_what_it_leaves_out_is_in_its_sections(capsys):
    text = help_text("--train.steps", "3", "--help", capsys=capsys)
    assert len(text.splitlines()) <= 50
    assert max(map(len, text.splitlines())) <= 120
    assert flags(text)[:2] == ["recipe", "ds_config"]
    more = text.split("more settings:")[1]
    assert all(part in more for part in ("--help all", "student", "scoring", "kroneckerbert"))
    keys = flags(help_text("--help", "train", capsys=capsys))
    assert {"train.steps", "train.learning_rate"} <= set(keys) < set(flags(help_text("--help", "all", capsys=capsys)))
    assert all(key.startswith("train.") for key in keys)
    lora = {f"student.lora.{key}" for key in ("rank", "alpha", "dropout", "targets")}
    assert set(flags(help_text("-h", "student.lora", capsys=capsys))) == lora
    assert {"method", "seed", "recipe"} <= set(flags(help_text("--help=run", capsys=capsys)))


def test_lists_may_be_written_with_commas():
    given = ["--tasks.names", "rte,cola", "--tasks.seeds=1,2", "--tasks.epochs", "[3,5]", "--tasks.learning_rates"]
    others = ["--student.lora.targets", "null", "--data.train", "a,b", "--also", "kd"]
    config, _ = parse_run([*DS, *given, "1e-5", *others], METHODS)
    tasks = config.tasks
    assert (tasks.names, tasks.seeds, tasks.epochs, tasks.learning_rates) == (["rte", "cola"], [1, 2], [3, 5], [1e-5])
    assert (config.student.lora.targets, config.data.train, config.also) == (None, "a,b", ["kd"])
    for words in (["--tasks.seeds", "1,x"], ["--tasks.names", "--seed", "3"], ["--tasks.seeds"]):
        refuses("tasks", parse_run, [*DS, *words], METHODS)


def test_the_command_can_be_pasted_into_a_shell(monkeypatch):
    words = ["--student.factorize.shapes", '{"*.attention.*": 8x2, "*": 2x2}', "--seed=1"]
    monkeypatch.setattr(sys, "argv", ["another", "program"])
    typed = command_line.typed_command("llmdistill/train.py", ["--local_rank=0", *words])
    assert shlex.split(typed) == ["deepspeed", "llmdistill/train.py", *words]
    monkeypatch.setenv("WORLD_SIZE", "2")
    typed = command_line.typed_command("llmdistill/train.py", words)
    assert shlex.split(typed) == ["deepspeed", "--num_gpus", "2", "llmdistill/train.py", *words]


MISTAKES = [
    (["--help", "trian"], "--help trian: there is no such section; did you mean train?"),
    (["--method", "mkad"], "; did you mean makd?"),
    (["--train.dtype", "bfloat16"], "; did you mean bf16?"),
    (["--recipe", "makd/bert256"], "; did you mean makd/bert-256?"),
    (["--learning_rate", "3"], "did you mean --train.learning_rate?"),
    (["--extends", "quickstart"], "--extends quickstart: that is for recipes; give --recipe quickstart"),
    (["--train.validate_every", "null"], "train.validate_every: null does not fit; expected int"),
    (["--data.tests", "foo.jsonl"], "a mapping such as '{NAME: foo.jsonl}'"),
    (["--train.steps", "0"], "train.steps is 0: give 1 or more"),
    (["--scoring.seeds", "1,1"], "scoring.seeds is [1, 1]: give one or more, each once"),
    (["--recipe"], "argument --recipe: expected one argument"),
    (["--recipe", "a\nb"], "--recipe a\\nb: neither a file nor a shipped recipe"),
    (["--train", "5"], "train: '5' does not fit; expected settings"),
    (["--train.steps", "9" * 5_000], "train.steps: a number with too many digits; give a smaller one"),
    (["--data.tests./etc/x", "a.jsonl"], "data.tests has the name '/etc/x'"),
    (["--output_dir", "a\0b"], "it holds what is no character"),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=lambda each: str(each)[:40])
def test_a_mistake_on_the_command_line(words, said):
    refuses(said, parse_run, [*DS, *words], METHODS)


RECIPES = [
    ("- 1", "mine.yaml: not a mapping of settings"),
    ("train:", "mine.yaml: train is null: a section holds settings"),
    ("train: {learning_rate: .nan}", "train.learning_rate is nan: give a finite number"),
    ("train: {weight_decay: 1e+9}", "train.weight_decay is 1000000000.0 and train.learning_rate"),
    ("train: {betas: [0.9, 1.0]}", "train.betas is (0.9, 1.0): give two numbers from 0 to below 1"),
    ("seed: 99999999999999999999999", "seed has 77 bits: give a number of at most 63"),
    ("a: [", "mine.yaml:2: not valid YAML"),
    ("seed: 1\ntrain:\n  steps: 3\n  steps: 4\n", "mine.yaml:4: steps is given twice: leave one of them out"),
    ("seed: 1\ndata: {tests: {a: b, a: c}}\n", "mine.yaml:2: a is given twice"),
    ("seed: " + "[" * 28_000, "mine.yaml: not valid YAML"),
    ("seed: !!timestamp x", "mine.yaml: not valid YAML"),
    ("student: &a [*a]", "mine.yaml: it has more than 100000 values"),
    ("data: {tests: {%s: x.jsonl}}" % ("n" * 400), "of 400 bytes: give 200 at most"),
    ("tasks: {out_of_domain: {../x: {}}}", "tasks.out_of_domain has the name '../x'"),
    ("extends: nowhere.yaml", "mine.yaml: extends nowhere.yaml: neither a shipped recipe nor a file"),
    ("extends: mine.yaml", "mine.yaml: extends mine.yaml, which itself builds on this one"),
    ("extends: back.yaml", "back.yaml: extends ./mine.yaml, which itself builds"),
    ("extends: wrong.yaml", "wrong.yaml: train.stepz: there is no such setting; did you mean train.steps?"),
]


@pytest.mark.parametrize(("text", "said"), RECIPES, ids=lambda each: each[:40])
def test_a_mistake_in_a_recipe(tmp_path, text, said):
    write(tmp_path / "back.yaml", "extends: ./mine.yaml\n")
    write(tmp_path / "wrong.yaml", "train: {stepz: 3}\n")
    refuses(said, parse_run, [*DS, "--recipe", write(tmp_path / "mine.yaml", text + "\n")], METHODS)


def test_a_part_is_checked_in_python_as_in_a_recipe():
    part = Minilmv2Config()
    found = command_line.with_values(part, {"relation_heads": 12, "teacher_layer": 3}, key="k")
    assert found == dataclasses.replace(part, relation_heads=12, teacher_layer=3)
    for key, value, said in (
        ("relation_head", 1, "k.relation_head: there is no such setting; did you mean k.relation_heads?"),
        ("relation_heads", "many", "k.relation_heads: 'many' does not fit; expected int"),
        ("relation_heads", None, "k.relation_heads is null: give a value"),
    ):
        refuses(said, command_line.with_values, part, {key: value}, key="k")


def test_a_flag_that_is_given_twice():
    config, flags = parse_run(["--seed", "3", "--ds_config", "zero2", "--seed=4"], METHODS)
    assert config.seed == 4
    assert flags.notes == ["--seed is given 2 times: the last one counts"]
    told = "Recipe      quickstart, the embedded example\nNote        --seed is given 2 times: the last one counts"
    assert command_line.about_recipe(flags) == told
    refuses("--data.tests: a is given twice", parse_run, ["--data.tests", "{a: b, a: c}"], METHODS)


def test_a_setting_that_is_given_twice_in_python():
    names = {"method": "kd", "ds_config": ""}
    said = "train.steps is given twice, as 3 and 4: leave one of them out"
    refuses(said, command_line.config_of, {**names, "train.steps": 3}, {"steps": 4}, METHODS)
    assert command_line.config_of({**names, "train.steps": 4}, {"steps": 4}, METHODS).train.steps == 4
    text = {**names, "data.train": "a.txt"}
    assert command_line.config_of(text, {"kind": "text"}, METHODS, {"data.kind": "instructions"}).data.kind == "text"


def test_a_ds_config_with_a_key_twice(tmp_path):
    file = write(tmp_path / "ds.json", '{"bf16": {},\n\t"zero_optimization": {"stage": 1,\n"stage": 2}}')
    refuses("ds.json:3: stage is given twice", read_ds_config, str(file))


@pytest.mark.parametrize(("theirs", "ours"), [
    ("lr", "train.learning_rate"),
    ("max_steps", "train.steps"),
    ("per_device_train_batch_size", "train.micro_batch_size"),
    ("per-device-train-batch-size", "train.micro_batch_size"),
    ("train.num_train_epochs", "train.epochs; for instructions train.steps"),
    ("gradient_accumulation_steps", "train.global_batch_size, the sequences of a whole step"),
    ("fp16", "train.dtype fp32 or bf16"),
    ("logging_steps", "train.log_every"),
    ("save_steps", "train.save_every"),
    ("model_name_or_path", "student.model"),
    ("dataset_name", "data.train"),
    ("lmbda", "data.on_policy"),
])  # fmt: skip
def test_the_names_of_other_libraries_lead_to_ours(tmp_path, theirs, ours):
    refuses(f"--{theirs}: there is no such setting; here it is --{ours}", parse_run, [*DS, f"--{theirs}", "3"], METHODS)
    recipe = write(tmp_path / "mine.yaml", f"{theirs.rpartition('.')[2]}: 3\n")
    refuses(f"here it is {ours}", parse_run, [*DS, "--recipe", recipe], METHODS)
    refuses(f"here it is {ours}", command_line.config_of, {"method": "kd", "ds_config": ""}, {theirs: 3}, METHODS)


def test_each_hint_names_a_setting():
    known = {option.removeprefix("--") for action in run_parser(METHODS)._actions for option in action.option_strings}
    assert set(foreign._OURS) <= known
    assert not {name for names in foreign._OURS.values() for name in names} & known


def test_a_report_names_the_command_that_was_typed(monkeypatch):
    words = ["--recipe", "quickstart"]
    assert command_line.typed_command(None, words) == "llmdistill train --recipe quickstart"
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(command_line.TYPED, "llmdistill train")
    typed = command_line.typed_command("/x/llmdistill/train.py", [*words, "--local_rank=1"])
    assert typed == "llmdistill train --num_gpus 2 --recipe quickstart"
