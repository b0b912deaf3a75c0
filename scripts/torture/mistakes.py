"""Prints what a newcomer's mistakes are answered with: each command, its exit code and its one sentence.

    python scripts/torture/mistakes.py                 # all of mistakes.yaml, in about a minute
    python scripts/torture/mistakes.py --only Models   # one of its parts

An answer is one sentence that says what mistakes.yaml expects, with exit code 2. Exit code 1 if one is not.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
TABLE = Path(__file__).with_suffix(".yaml")
ROWS = [{"instruction": f"Where is {n}?", "input": "", "output": f"In town {n}."} for n in range(8)]


def parts() -> list[dict[str, Any]]:
    return list(yaml.safe_load(TABLE.read_text(encoding="utf-8")))


def prepare(folder: Path) -> None:
    """Make the data and models that the cases name."""
    from tiny import save_decoder, tiny_config

    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "text.txt").write_text("One line.\n\nAnother one.\n")
    save_decoder(folder / "model", num_hidden_layers=2)
    shutil.copytree(folder / "model", folder / "bare")
    for file in (folder / "bare").glob("tokenizer*"):
        file.unlink()
    tiny_config("bert", architectures=["BertForMaskedLM"]).save_pretrained(folder / "encoder")


def answer(case: dict[str, Any], folder: Path) -> tuple[int | str, str]:
    """Return the exit code of a case, and what it said. The exit code of a UserError in Python counts as 2."""
    for name, content in case.get("files", {}).items():
        (folder / name).write_text(content)
    before, environment = os.getcwd(), dict(os.environ)
    os.chdir(folder)
    os.environ.pop("WORLD_SIZE", None)
    out, said = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
            code = _command(case["run"]) if "run" in case else _python(case["python"])
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environment)
    lines = [line for line in said.getvalue().splitlines() if not line.startswith("Working")]
    return code, "\n".join(lines)


def _command(words: str) -> int | str:
    from llmdistill.cli import main

    given = shlex.split(words)
    try:  # what is wrong is found before anything is trained
        return main([*given, "--dry_run"] if given[0] == "train" and "--help" not in given else given)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int | str) else 0


def _python(line: str) -> int:
    import torch
    from tiny import tiny_model

    import llmdistill
    from llmdistill.runtime.terminal import quiet_transformers

    quiet_transformers()

    def two_losses() -> None:
        teacher, student = tiny_model("llama"), tiny_model("llama", seed=1)
        for _ in range(2):
            llmdistill.DistillationLoss(teacher, student, "kd")

    names = {name: getattr(llmdistill, name) for name in ("compress", "distill", "DistillationLoss")}
    batch = {"input_ids": torch.tensor([[3, 4]]), "labels": torch.tensor([[3, 4]])}
    names |= {"ROWS": ROWS, "BATCH": batch, "in_memory": lambda: tiny_model("llama"), "two_losses": two_losses}
    try:
        eval(line, names)
    except llmdistill.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    return 0


def fault(case: dict[str, Any], code: int | str, said: str) -> str | None:
    """Return what is wrong with an answer; None if nothing is."""
    if code != 2:
        return f"exit code {code}"
    if not said.startswith("error: ") or "\n" in said:
        return "not one sentence"
    return None if case["says"] in said else f"it does not say {case['says']!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="the part of this name")
    arguments = parser.parse_args()
    found = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            prepare(folder)
        for part in parts():
            if arguments.only not in (None, part["what"]):
                continue
            print(f"\n## {part['what']}\n")
            for case in part["cases"]:
                code, said = answer(case, folder)
                wrong = fault(case, code, said)
                print(f"$ llmdistill {case['run']}" if "run" in case else f">>> {case['python']}")
                print(said.replace(str(folder), ".") + ("" if wrong is None else f"\n    ! {wrong}"), flush=True)
                found += wrong is not None
    print(f"\n{found} answers are not as expected")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
