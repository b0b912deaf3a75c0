"""An installed copy is whole: from a wheel, outside of any checkout, every command works."""

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from support import ROOT, environment

pytestmark = pytest.mark.slow

COMMANDS = """
import sys
import llmdistill
import torch.distributed as dist
from llmdistill.cli import COMMANDS, main

dist.destroy_process_group = lambda *_: None  # DeepSpeed keeps what it was first given
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
def wheel(tmp_path_factory):
    """The wheel, built in a copy: setuptools leaves folders behind where it builds."""
    folder = tmp_path_factory.mktemp("wheel")
    left_out = (".*", "runs", "build", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(ROOT, folder / "copy", ignore=shutil.ignore_patterns(*left_out), symlinks=True)
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=folder / "copy", check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of a fresh environment with the wheel in it, and this one's libraries behind it."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # What a .pth file in there names, such as the checkout, is not looked at.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin" / "python"


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


def test_every_command_runs_from_a_wheel(python, tmp_path):
    """In a folder without anything of ours, one after the other in one process, which imports everything once."""
    short = "--train.steps 2 --train.global_batch_size 4 --train.warmup_steps 1 --train.dtype fp32 --train.log_every 1"
    short += " --scoring.limit 2 --scoring.models [student]"
    short += " --student.factorize.weighting none --student.factorize.allocation uniform"
    limits = "--max_prompt_length 96 --max_length 112 --decoding greedy --limit 2 --dtype fp32"
    commands = (
        f"train --num_gpus 1 --ds_config zero2 --output_dir out {short}",
        "train --ds_config ds_configs/zero3.json --dry_run --json",
        "compare --methods none,sft --seeds 1 --dry_run --json",
        "compress --model embedded:teacher --rank 8 --dry_run --json",
        "export --to dense --model out/student --output dense --json",
        f"generate --model embedded:teacher --data embedded:valid --output answers.jsonl --engine hf --json {limits}",
        f"evaluate --model dense --data answers.jsonl --json {limits}",
        "evaluate --suite glue --help",
    )
    variables = {key: value for key, value in environment().items() if key != "PYTHONPATH"}
    command, said = [str(python), "-c", COMMANDS], "\n".join(commands)
    done = subprocess.run(command, cwd=tmp_path, env=variables, input=said, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = done.stdout.splitlines()
    assert Path(lines[0]).is_relative_to(python.parents[1])
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 2
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["student"]["params"] > 0
    results = [json.loads(line) for line in lines if line.startswith("{")]
    train, compare, compress, export, generate, evaluate = results
    assert train["ds_config"]["zero_optimization"]["stage"] == 3
    assert [row["title"] for row in compare["runs"]]
    assert compress["student_params"] < compress["teacher_params"]
    assert export
    assert generate["prompts"] == 2
    assert evaluate["sets"]["answers"]["examples"] == 2
