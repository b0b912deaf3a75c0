"""What a study does in processes of its own, beside its runs: python -m llmdistill.commands.worker FILE.

The file names the work and its settings (`Trial.write`). The file of a run is a recipe, and its entry is
llmdistill/train.py.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from llmdistill.config.command_line import build
from llmdistill.config.generation import ResponseConfig
from llmdistill.config.tasks import FineTuningConfig
from llmdistill.errors import UserError
from llmdistill.messages import print_result, set_level
from llmdistill.methods import METHODS
from llmdistill.runtime.terminal import command_block, quiet_transformers


def main(arguments: Sequence[str] | None = None) -> int:
    """Do the work of a file and return the exit code of the command that does the same."""
    (file,) = sys.argv[1:] if arguments is None else arguments
    with command_block() as ending:
        set_level()
        given = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        if given["work"] not in WORK:
            raise UserError(f"{file}: there is no work {given['work']!r} (there are {', '.join(WORK)})")
        WORK[given["work"]](given["settings"], f"python -m llmdistill.commands.worker {shlex.quote(file)}")
    return ending.code


def _generate(settings: Mapping[str, Any], command: str) -> None:
    from llmdistill.commands.generate import summary
    from llmdistill.generation.responses import generate_responses
    from llmdistill.runtime.distributed import process_group

    quiet_transformers()
    output = Path(settings["output"])
    with process_group(command, needed=False) as world:
        record = generate_responses(settings["model"], settings["data"], output, build(settings, ResponseConfig))
    if world.is_main:
        print_result(summary(record, output))


def _fine_tune(settings: Mapping[str, Any], command: str) -> None:
    from llmdistill.papers.fine_tuning.run import run

    config = build(settings, FineTuningConfig, METHODS, prefix="tasks.")
    run(config, command=command, as_json=False, launcher_flags=settings["launcher_flags"])


WORK = {"generate": _generate, "fine_tune": _fine_tune}

if __name__ == "__main__":
    sys.exit(main())
