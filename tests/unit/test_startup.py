"""What a command loads before it has work to do: neither torch nor transformers."""

from __future__ import annotations

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
import runpy, sys
heavy = {"torch", "transformers", "deepspeed", "datasets", "matplotlib", "sklearn", "scipy", "pandas", "numpy"}
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    print("code:", end.code)
print("loaded:", *sorted(heavy & sys.modules.keys()))
"""


def run(*words: str) -> tuple[list[str], str]:
    """The exit code and the heavy libraries that a script has loaded when it ends, as two lines, and its errors."""
    done = subprocess.run([sys.executable, "-c", CODE, *words], check=True, capture_output=True, text=True, cwd=ROOT)
    return done.stdout.splitlines()[-2:], done.stderr


def test_import_loads_no_library():
    code = "import sys\nimport llmdistill\nprint({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n"


def test_methods_and_architectures_are_listed_without_libraries():
    code = "import sys\nfrom llmdistill.methods import METHODS\nfrom llmdistill.models.families import FAMILIES\n"
    code += "assert METHODS and FAMILIES\nprint({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    "words",
    [
        *(["llmdistill/cli.py", *command.split()] for command in COMMANDS),
        *(["llmdistill/train.py"], ["eval/glue.py"], ["eval/instruct.py"]),
    ],
    ids=" ".join,
)
def test_help_loads_no_library(words):
    assert run(*words, "--help") == (["code: 0", "loaded:"], "")


def test_mistyped_setting_loads_no_library():
    ended, said = run("llmdistill/train.py", "--ds_config", "zero2", "--train.step", "3")
    assert ended == ["code: 2", "loaded:"]
    assert said == "error: --train.step: there is no such setting; did you mean --train.steps?\n"


def test_dry_run_loads_only_what_builds_models():
    _, loaded = run("llmdistill/train.py", "--ds_config", "ds_configs/zero2.json", "--dry_run", "--json")[0]
    assert not {"deepspeed", "datasets", "matplotlib", "sklearn", "pandas"} & set(loaded.split())
    assert "torch" in loaded  # or nothing was looked at


def test_every_command_has_its_help_tried():
    from llmdistill.cli import COMMANDS as known

    assert {command.split()[0] for command in COMMANDS} == known.keys()
