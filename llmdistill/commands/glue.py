"""``llmdistill evaluate --suite glue``: a model in, GLUE's table out."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from jsonargparse import ArgumentParser

from llmdistill.config.command_line import add_config, build, parse
from llmdistill.config.glue import GlueConfig
from llmdistill.methods import METHODS
from llmdistill.runtime.exit import exit_code


def build_parser(prog: str) -> ArgumentParser:
    """The arguments: every field of GlueConfig."""
    parser = ArgumentParser(
        prog=prog,
        exit_on_error=False,
        description="Fine-tune a model on GLUE's tasks, choose learning rate and epochs on dev, and report mean and "
        "standard deviation over seeds. Finished runs are kept: the same command goes on where it stopped. Under the "
        "deepspeed launcher several ranks share each run.",
    )
    parser.add_argument("--json", action="store_true", help="Print results.json in place of the table.")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # given by the launcher
    add_config(parser, GlueConfig, METHODS)
    return parser


def main(arguments: Sequence[str] | None = None, *, prog: str = "evaluate") -> int:
    """Run the command and return its exit code: 2, and one sentence on stderr, for bad input."""
    return exit_code(lambda: evaluate(sys.argv[1:] if arguments is None else arguments, prog=prog))


def evaluate(arguments: Sequence[str], *, prog: str) -> None:
    """Fine-tune as the arguments say and print the result.

    Raises:
        UserError: bad arguments or input.
    """
    parsed = parse(build_parser(prog), arguments)
    config = build(parsed, GlueConfig, METHODS)
    # Imported here: --help and mistyped arguments must wait for neither transformers nor DeepSpeed.
    from llmdistill.experiments.glue.run import run

    command = f"{prog} {shlex.join(word for word in arguments if not word.startswith('--local_rank'))}"
    run(config, command=command, as_json=parsed.json)
