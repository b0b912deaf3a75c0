"""The llmdistill command."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys

import pytest
from tiny import tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation import candidate_generator

from llmdistill import cli
from llmdistill.cli import COMMANDS, main
from llmdistill.config.recipes import RECIPES, recipe_names
from llmdistill.embedded import locate
from llmdistill.generation import self_written
from llmdistill.models.tokenizer import load_tokenizer
from llmdistill.tasks.distance import HOPELESS
from llmdistill.train import main as train_main

from support import ROOT


@pytest.mark.parametrize(("arguments", "said"), [
    (["compres"], "there is no command 'compres'; there are train, plan, doctor, "),
    (["evaluate", "--suite", "glu"], "--suite: there is no set 'glu'; did you mean glue? (there are dolly,"),
    (["evaluate", "--suite", "glue,dolly"], "--suite glue,dolly: glue has settings of its own; give it alone"),
    (["evaluate", "--suite", "SST-2"], "--suite SST-2: it is a task, on which a model is fine-tuned first"),
    (["export", "--to", "onx", "--model", "x", "--output", "y"], "'onx' does not fit; expected dense, onnx, gguf"),
    (["export", "--to", "int4", "--group_size", "0", "--model", "x", "--output", "y"], "group_size is 0: give 2"),
    (["compress", "--model", "x", "--rnk", "3"], "--rnk: there is no such setting; did you mean --rank?"),
    (["plan", "--gpu_memory", "80XB"], "error: --gpu_memory is '80XB': give a number with one of the units MB, GB"),
    (["plan", "--gpus", "7"], "32 does not divide by 7 ranks: the nearest that does is 35"),
    (["compress", "--model", "x", "--rank", "2"], "error: --output is missing: name the student's folder, or add"),
])  # fmt: skip
def test_mistakes_are_one_sentence_and_exit_code_two(capsys, arguments, said):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("words", [
    ["compress", "--model", "embedded:teacher", "--dry_run", "--rank", "4", "--rank=3"],
    ["export", "--rank", "4", "--rank=3"],
    ["evaluate", "--model", "x", "--rank", "4", "--rank=3"],
    ["evaluate", "--suite", "speed", "--rank", "4", "--rank=3"],
    ["generate", "--rank", "4", "--rank=3"],
    ["push", "--rank", "4", "--rank=3"],
    ["recipes", "--rank", "4", "--rank=3"],
    ["plan", "--rank", "4", "--rank=3"],
    ["doctor", "--rank", "4", "--rank=3"],
    ["compare", "--rank", "4", "--rank=3"],
    ["cache", "--rank", "4", "--rank=3"],
], ids=" ".join)  # fmt: skip
def test_every_command_says_that_a_flag_is_given_twice(capsys, words):
    """As a training does; that most have no --rank they say after it."""
    assert main(words) == (0 if words[0] == "compress" else 2)
    assert capsys.readouterr().err.count("--rank is given 2 times: the last one counts\n") == 1


@pytest.mark.parametrize(
    "words", [["recipes"], ["recipes", "quickstart", "--json"], ["--help"], ["compress", "--help"]]
)
def test_nobody_reads_the_result_to_its_end(words, monkeypatch, capsys):
    """After `| head -1` a command ends quietly, with the code that SIGPIPE gives."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as ended:
            main(words)
        if ended.value.code == 141:  # argparse has dropped what nobody read, and has nothing left to write
            stdout.write("what Python still writes at its end goes nowhere")
    assert ended.value.code in ((0, 141) if "--help" in words else (141,))
    assert capsys.readouterr().err == ""


def test_the_package_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["llmdistill", "compres"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("llmdistill", run_name="__main__")
    assert "did you mean compress?" in capsys.readouterr().err


def test_launcher_flags_of_glue_reach_each_trial(monkeypatch):
    started = []
    monkeypatch.setattr("llmdistill.papers.fine_tuning.run.run", lambda config, **more: started.append(more))
    words = ["evaluate", "--suite", "glue", "--model", "m", "--tasks", "RTE", "--num_gpus", "4"]
    main([*words, "--trials_at_once", "2"])
    assert [each["launcher_flags"] for each in started] == [["--num_gpus", "4"]]


@pytest.mark.parametrize(("key", "value", "said"), [
    ("data.train", "nowhere.jsonl", "nowhere.jsonl: no such file; give a JSONL"),
    ("output_dir", "file/run", "--output_dir file/run: /"),
])  # fmt: skip
def test_dry_run_tells_what_is_missing_after_what_would_run(tmp_path, capsys, monkeypatch, key, value, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert train_main(["--recipe", "quickstart", "--dry_run", "--json", f"--{key}", value]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["student_params"] > 0
    assert printed.err.startswith(f"error: {said}")
    assert printed.err.count("\n") == 1


def test_a_dry_run_is_a_few_lines_and_takes_the_launcher_s_flags_but_the_script_alone_starts_no_ranks(capsys):
    names = ["Recipe", "Run", "Teacher", "Student", "Method", "Data", "Prompt", "Batch", "Cost"]
    for run, flags in ((train_main, ["--num_gpus", "2"]), (lambda words: main(["train", *words]), ["--num_gpus=2"])):
        assert run([*flags, "--ds_config", "zero2", "--train.steps", "7", "--dry_run"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == names
        assert max(map(len, lines)) <= 120
        assert "x 2 rank(s)" in lines[7]
        assert "7 steps" in lines[7]
    assert train_main(["--num_gpus", "2", "--ds_config", "zero2"]) == 2
    assert "--num_gpus is the launcher's: give it to deepspeed (--num_gpus 2 " in capsys.readouterr().err


BY_LOSS = ["--target_params", "40%", "--weighting", "gradients", "--allocation", "loss"]


def test_compress_tells_the_size_that_the_data_gave(tmp_path, capsys, monkeypatch):
    loaded = []
    load = PreTrainedModel.from_pretrained.__func__
    noted = classmethod(lambda cls, *words, **more: loaded.append(cls) or load(cls, *words, **more))
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", noted)
    output = str(tmp_path / "student")
    data = ["--calibration.data", "embedded:train", "--calibration.examples", "8", "--calibration.held_out", "4"]
    assert main(["compress", "--model", "embedded:teacher", "--output", output, *BY_LOSS, *data, "--json"]) == 0
    captured = capsys.readouterr()
    told = json.loads(captured.out.splitlines()[-1])
    found = re.search(r"on held-out data: (\S+) with ranks by predicted loss, (\S+) with one rank", captured.err)
    chosen = "the ranks" if float(found[1]) <= float(found[2]) else "one rank"
    assert f"it takes {chosen}" in captured.err
    assert len(loaded) == 1  # the teacher, once
    student = AutoModelForCausalLM.from_pretrained(output)
    assert told["student_params"] == sum(parameter.numel() for parameter in student.parameters())
    assert 0.399 < told["ratio"] <= 0.4
    factors = {name: value for name, value in student.state_dict().items() if name.endswith(".A.weight")}
    assert told["ranks"] == {name.removesuffix(".A.weight"): len(value) for name, value in factors.items()}
    kinds = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert told["lost"].keys() <= kinds
    assert all(0 < each["lost"] < 1 for each in told["lost"].values())


def test_compress_without_data_calibrates_on_what_the_model_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LLMDISTILL_CACHE", str(tmp_path / "cache"))
    words = ["compress", "--model", "embedded:teacher", "--rank", "32"]
    few = ["--calibration.examples", "2", "--calibration.held_out", "1"]
    plain, own, given = (tmp_path / name for name in ("plain", "own", "given"))
    assert main([*words, "--output", str(plain), "--weighting", "none"]) == 0
    assert "embedded:teacher --student.model" in capsys.readouterr().out
    assert not (tmp_path / "cache" / "written").exists()
    assert main([*words, *few, "--output", str(own)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "of rows that the model wrote" in shown
    assert shown.endswith("--data.train teacher --data.kind text")
    command = shlex.split(shown.partition("Train it: llmdistill train ")[2])
    assert train_main([*command, "--ds_config", "zero1", "--dry_run"]) == 0  # it runs as it is printed
    capsys.readouterr()
    [file] = (tmp_path / "cache" / "written").glob("*.jsonl")
    assert len(file.read_text().splitlines()) == 3
    assert main([*words, *few, "--output", str(given), "--calibration.data", str(file)]) == 0
    assert capsys.readouterr().out.rstrip().endswith(f"--data.train {file} --data.kind text")
    weights = [(folder / "model.safetensors").read_bytes() for folder in (plain, own, given)]
    assert weights[1] == weights[2] != weights[0]
    monkeypatch.setattr(self_written, "load_model", lambda *_, **__: pytest.fail("writes before the folder is checked"))
    assert main([*words, "--calibration.examples", "5", "--output", str(own)]) == 2


def test_compress_of_a_model_that_cannot_write_is_the_plain_svd(tmp_path, capsys):
    tokenizer = load_tokenizer(locate("embedded:teacher"))
    tokens = {name: getattr(tokenizer, name) for name in ("eos_token_id", "bos_token_id", "pad_token_id")}
    tiny_model("llama", vocab_size=len(tokenizer), **tokens).save_pretrained(tmp_path / "noise")
    tokenizer.save_pretrained(tmp_path / "noise")
    words = ["compress", "--model", str(tmp_path / "noise"), "--rank", "4", "--output"]
    assert main([*words, str(tmp_path / "own")]) == 0
    assert "without calibration data the student starts by the plain SVD" in " ".join(capsys.readouterr().err.split())
    assert main([*words, str(tmp_path / "plain"), "--weighting", "none"]) == 0
    assert main([*words, str(tmp_path / "weighted"), "--weighting", "activations"]) == 2
    assert "writes noise" in " ".join(capsys.readouterr().err.split())
    own, plain = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("own", "plain"))
    assert own == plain


@pytest.mark.parametrize(("start", "remedy"), [
    (["--weighting", "none"], "the plain SVD of the weights ruins most models"),
    (["--weighting", "activations"], "give it more parameters (--target_params)"),
])  # fmt: skip
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_compress_warns_where_nothing_sensible_is_left(tmp_path, capsys, start, remedy, as_json):
    words = ["compress", "--model", "embedded:teacher", "--rank", "1", "--output", str(tmp_path / "student"), *as_json]
    data = ["--calibration.data", "embedded:train", "--calibration.examples", "8"] if "none" not in start else []
    assert main([*words, *start, *data]) == 0
    captured = capsys.readouterr()
    warned = " ".join(captured.err.replace("\u2502", " ").split())
    assert "WARNING" in warned
    assert "the student keeps nothing sensible of its teacher: " in warned
    assert remedy in warned
    assert "nothing sensible" not in captured.out
    assert not as_json or json.loads(captured.out)["distance"]["divergence"] > HOPELESS


def test_compress_takes_the_limits_of_its_calibration_data(tmp_path, capsys):
    words = ["compress", "--model", "embedded:teacher", "--output", str(tmp_path / "student")]
    data = ["--rank", "8", "--weighting", "activations", "--calibration.data", "embedded:train"]
    data += ["--calibration.examples", "8", "--data.max_prompt_length", "12"]
    assert main([*words, *data]) == 2
    assert "data.long_prompts" in capsys.readouterr().err
    assert main([*words, *data, "--data.long_prompts", "truncate"]) == 0
    limits = "--data.max_prompt_length 12 --data.long_prompts truncate"
    assert capsys.readouterr().out.rstrip().endswith(f"--data.train embedded:train {limits}")
    assert main([*words, *data]) == 2
    assert "student exists and is not empty" in capsys.readouterr().err
    words[-1] = str(tmp_path / "other")
    assert main([*words, "--rank", "8", "--weighting", "none", "--data.max_length", "100"]) == 2
    assert "data.max_length is for calibration data: give them, or leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "busy", "added"), [
    ([], True, True),
    ([], False, False),
    (["--master_port=1234"], True, False),
    (["--master_port", "1234"], True, False),
    (["--no_ssh", "--node_rank", "0"], True, False),
])  # fmt: skip
def test_the_launcher_gets_a_free_port_where_its_own_is_busy(monkeypatch, flags, busy, added):
    started = []
    monkeypatch.setattr("os.execvp", lambda _, words: started.extend(words))
    monkeypatch.setattr(cli, "check_hosts", lambda _: None)
    monkeypatch.setattr(cli, "is_busy", lambda port: busy and port == 29500)
    monkeypatch.setattr(cli, "local_ranks", lambda _: None)
    cli.launch(flags, "llmdistill.train", "--seed", "1")
    given = started[: started.index("--no_local_rank")]
    assert given[: len(flags) + 1] == ["deepspeed", *flags]
    assert given[-2:] == ["--log_level", "critical"]
    assert len(given) == 3 + len(flags) + (2 if added else 0)
    assert not added or (given[-4] == "--master_port" and int(given[-3]) != 29500)


def test_recipes_are_listed_with_a_line_each_and_shown(capsys):
    assert main(["recipes"]) == 0
    *lines, _, _ = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    assert min(len(line.split(maxsplit=1)[1]) for line in lines) > 20
    assert main(["recipes", "makd/bert-256"]) == 0
    assert capsys.readouterr().out == (RECIPES / "makd/bert-256.yaml").read_text()
    assert main(["recipes", "makd/bert-25"]) == 2
    assert "did you mean makd/bert-256?" in capsys.readouterr().err


def test_a_dry_run_with_a_check_reads_the_data(capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    small = ["--student.factorize.rank", "6", "--train.global_batch_size", "4", "--dry_run"]
    assert train_main([*small, "--check", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["student"]["factorize"]["rank"] == 6
    assert {"settings and data", "teacher above chance", "term logits"} <= {each["what"] for each in found["check"]}
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"instruction": "a", "output": "b"}\nno row\n')
    missing = ["--recipe", "quickstart", *small, "--data.train", str(bad)]
    assert train_main(missing) == 0, "without --check the data are not read"
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        train_main([*missing, "--check"])
    assert ended.value.code == 1
    assert f"{bad}:2: not JSON" in capsys.readouterr().out
    assert train_main(["--check"]) == 2
    assert "--check belongs to --dry_run" in capsys.readouterr().err


# What a command loads before it has work to do.

CODE = """
import contextlib, io, json, runpy, sys
heavy = {"torch", "transformers", "deepspeed", "datasets", "matplotlib", "sklearn", "scipy", "pandas", "numpy"}
for line in sys.stdin.read().splitlines():
    sys.argv, code = line.split(), None
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    print("@" + json.dumps([line, code, sorted(heavy & sys.modules.keys())]))
"""


def loaded(*lines: str) -> list[list]:
    """Run scripts in a fresh process; returns each with its exit code and the heavy libraries loaded when it ends."""
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, input="\n".join(lines), check=True, capture_output=True, text=True, cwd=ROOT)
    return [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("@")]


def test_import_and_the_lists_of_methods_and_architectures_load_no_library():
    code = "import sys\nimport llmdistill\nfrom llmdistill.methods import METHODS\n"
    code += "from llmdistill.models.families import FAMILIES\nassert METHODS and FAMILIES\n"
    code += "print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n"


def test_help_loads_no_library_and_a_dry_run_only_what_builds_models():
    commands = [f"llmdistill/cli.py {name}" for name in (*COMMANDS, "evaluate --suite glue")]
    lines = [f"{each} --help" for each in (*commands, "llmdistill/train.py", "eval/glue.py", "eval/instruct.py")]
    *helped, dry = loaded(*lines, "llmdistill/train.py --ds_config ds_configs/zero2.json --dry_run --json")
    assert helped == [[line, 0, []] for line in lines]
    # transformers 5.20 itself imports scikit-learn, and with it pandas, where it generates.
    theirs = {"sklearn", "pandas"} if hasattr(candidate_generator, "roc_curve") else set()
    assert not ({"deepspeed", "datasets", "matplotlib", "sklearn", "pandas"} - theirs) & set(dry[2])
    assert "torch" in dry[2]  # or nothing was looked at
