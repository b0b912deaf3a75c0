"""An installed copy is whole: from a wheel, outside of any checkout, every command works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from support import ROOT, environment, free_port

pytestmark = [pytest.mark.dist, pytest.mark.tools]

COMMANDS = """
import sys
import llmdistill
from llmdistill.cli import COMMANDS, main

print(llmdistill.__file__)
for words in (line.split() for line in sys.stdin.read().splitlines()):
    assert words[0] in COMMANDS
    try:
        code = main(words)
    except SystemExit as end:  # --help
        code = end.code
    assert not code, (code, words)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built in a copy: setuptools leaves folders behind where it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    left_out = (".*", "runs", "build", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, folder / "copy", ignore=shutil.ignore_patterns(*left_out), symlinks=True)
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=folder / "copy", check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def bin_folder(wheel, tmp_path_factory) -> Path:
    """Programs of a fresh environment with the wheel in it, and this one's libraries behind it."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # What a .pth file in there names, such as the checkout, is not looked at.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    # What pip would write for them.
    for name, module in (("llmdistill", "llmdistill.cli"), ("deepspeed", "deepspeed.launcher.runner")):
        program = folder / "bin" / name
        program.write_text(f"#!{folder}/bin/python\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
        program.chmod(0o755)
    return folder / "bin"


@pytest.fixture(scope="module")
def run_installed(bin_folder, tmp_path_factory):
    """Run a program of that environment in a folder without anything of ours; returns what it printed."""
    away = tmp_path_factory.mktemp("away")
    variables = {key: value for key, value in environment().items() if key != "PYTHONPATH"}
    variables["PATH"] = f"{bin_folder}{os.pathsep}{variables['PATH']}"

    def run(*words: str, said: str = "") -> str:
        command = [str(bin_folder / words[0]), *words[1:]]
        done = subprocess.run(command, cwd=away, env=variables, input=said, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    run.folder, run.environment = away, bin_folder.parent
    return run


def test_wheel_holds_only_the_package(wheel):
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert all(top.startswith("llmdistill") for top in tops), tops
    left_out = (".pyc", ".md")
    files = [path for path in (ROOT / "llmdistill").rglob("*.*") if path.is_file() and path.suffix not in left_out]
    files += (ROOT / "llmdistill" / "ds_configs").glob("*.json")
    (programs,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "llmdistill = llmdistill.cli:main" in archive.read(programs).decode()
    assert {f"llmdistill/{path.relative_to(ROOT / 'llmdistill')}" for path in files} <= set(names)


def test_every_command_runs_from_a_wheel(run_installed):
    folder = run_installed.folder
    short = "--train.steps 2 --train.global_batch_size 4 --train.warmup_steps 1 --train.dtype fp32 --train.log_every 1"
    short += " --scoring.limit 2 --scoring.models [student]"
    launcher = ["--num_gpus", "1", "--master_port", str(free_port())]
    run_installed("llmdistill", "train", *launcher, "--ds_config", "zero2", "--output_dir", "out", *short.split())
    assert len((folder / "out" / "metrics.jsonl").read_text().splitlines()) == 2
    assert json.loads((folder / "out" / "metrics.json").read_text())["student"]["params"] > 0
    limits = "--max_prompt_length 96 --max_length 112 --decoding greedy --limit 2 --dtype fp32"
    commands = (
        "train --ds_config ds_configs/zero3.json --dry_run --json",
        "compare --methods none,sft --seeds 1 --dry_run --json",
        "compress --model embedded:teacher --rank 8 --dry_run --json",
        "export --to dense --model out/student --output dense --json",
        f"generate --model embedded:teacher --data embedded:valid --output answers.jsonl --engine hf --json {limits}",
        f"evaluate --model dense --data answers.jsonl --json {limits}",
        "evaluate --suite glue --help",
    )
    module, *said = run_installed("python", "-c", COMMANDS, said="\n".join(commands)).splitlines()
    assert Path(module).is_relative_to(run_installed.environment)
    train, compare, compress, export, generate, evaluate, *_ = (json.loads(line) for line in said[:6])
    assert train["ds_config"]["zero_optimization"]["stage"] == 3
    assert [row["title"] for row in compare["runs"]]
    assert compress["student_params"] < compress["teacher_params"]
    assert export
    assert generate["prompts"] == 2
    assert evaluate["sets"]["answers"]["examples"] == 2
