"""``llmdistill evaluate --suite glue``: fine-tunes a model on tasks (GLUE, XNLI, SQuAD, MLQA), and scores it."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence

from jsonargparse import ArgumentParser

from llmdistill.config.command_line import add_config, build, parse
from llmdistill.config.tasks import FineTuningConfig
from llmdistill.methods import METHODS
from llmdistill.runtime.terminal import exit_code


def main(arguments: Sequence[str] | None = None, *, prog: str = "evaluate") -> int:
    """Run the command and return its exit code. Bad input gives exit code 2 and a one-sentence message on stderr."""
    return exit_code(lambda: fine_tune(sys.argv[1:] if arguments is None else arguments, prog=prog))


def fine_tune(
    arguments: Sequence[str],
    *,
    prog: str,
    launcher_flags: Sequence[str] = (),
    launch: Callable[[], None] | None = None,
) -> None:
    """Fine-tune a model according to the arguments and print the result.

    With `launch`, the launcher with its flags replaces this process, unless each run has its own process and launcher.
    """
    parser = ArgumentParser(
        prog=prog,
        exit_on_error=False,
        description="Fine-tune a model on tasks of GLUE, SQuAD or MLQA, choose learning rate and epochs on dev, and "
        "report mean and standard deviation over seeds. Finished runs are kept, so the same command continues an "
        "interrupted one. Under the deepspeed launcher several ranks share each run.",
    )
    parser.add_argument("--json", action="store_true", help="Print results.json instead of the table.")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # given by the launcher
    add_config(parser, FineTuningConfig, METHODS)
    parsed = parse(parser, arguments)
    config = build(parsed, FineTuningConfig, METHODS, prefix="--")
    if launcher_flags and launch is not None and config.trials_at_once == 1:
        launch()
    # Imported here so that --help and errors in the arguments do not wait for transformers and DeepSpeed.
    from llmdistill.papers.fine_tuning.run import run

    words = [*(word for word in arguments if not word.startswith("--local_rank")), *launcher_flags]
    run(config, command=f"{prog} {shlex.join(words)}", as_json=parsed.json, launcher_flags=launcher_flags)
