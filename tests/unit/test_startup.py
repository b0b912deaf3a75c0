"""What a command loads before it has work to do: neither torch nor transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = (
    *("train", "plan", "doctor", "recipes", "compare", "compress", "cache", "generate", "export"),
    *("push", "evaluate", "evaluate --suite glue"),
)
CODE = """
import json, runpy, sys
heavy = {"torch", "transformers", "deepspeed", "datasets", "matplotlib", "sklearn", "scipy", "pandas", "numpy"}
for sys.argv in json.loads(sys.argv[1]):
    script = sys.argv[0]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        print("ended:", *sys.argv, end.code, *sorted(heavy & sys.modules.keys()))
"""


def run(*commands: str) -> tuple[list[str], str]:
    """Run scripts in one process, and return each with its exit code and the heavy libraries loaded, and the errors."""
    words = [sys.executable, "-c", CODE, json.dumps([command.split() for command in commands])]
    done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT)
    lines = done.stdout.splitlines()
    return [line.removeprefix("ended: ") for line in lines if line.startswith("ended: ")], done.stderr


@pytest.mark.parametrize("imports", ["llmdistill", "llmdistill.methods, llmdistill.models.families"])
def test_import_loads_no_library(imports):
    code = f"import sys\nimport {imports}\nprint({{'torch', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n"


def test_help_loads_no_library():
    helped = [f"llmdistill/cli.py {command} --help" for command in COMMANDS]
    helped += [f"{script} --help" for script in ("llmdistill/train.py", "eval/glue.py", "eval/instruct.py")]
    assert run(*helped) == ([f"{each} 0" for each in helped], "")


def test_mistyped_setting_loads_no_library():
    command = "llmdistill/train.py --ds_config zero2 --train.step 3"
    said = "error: --train.step: there is no such setting; did you mean --train.steps?\n"
    assert run(command) == ([f"{command} 2"], said)


def test_dry_run_loads_only_what_builds_models():
    (ended,), _ = run("llmdistill/train.py --ds_config ds_configs/zero2.json --dry_run --json")
    assert not {"deepspeed", "datasets", "matplotlib", "sklearn", "pandas"} & set(ended.split())
    assert "torch" in ended.split()  # or nothing was looked at


def test_every_command_has_its_help_tried():
    from llmdistill.cli import COMMANDS as known

    assert {command.split()[0] for command in COMMANDS} == known.keys()
