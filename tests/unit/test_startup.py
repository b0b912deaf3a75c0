"""What a command loads before it has work to do: neither torch nor transformers."""

import json
import subprocess
import sys

from llmdistill.cli import COMMANDS

from support import ROOT

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


def run(*lines: str) -> list[list]:
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
    *helped, dry = run(*lines, "llmdistill/train.py --ds_config ds_configs/zero2.json --dry_run --json")
    assert helped == [[line, 0, []] for line in lines]
    assert not {"deepspeed", "datasets", "matplotlib", "sklearn", "pandas"} & set(dry[2])
    assert "torch" in dry[2]  # or nothing was looked at
