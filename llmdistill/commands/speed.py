"""``llmdistill evaluate --suite speed``: times models side by side, as papers time theirs."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence

from jsonargparse import ArgumentParser

from llmdistill.config.command_line import build, parse
from llmdistill.config.speed import SpeedConfig
from llmdistill.runtime.terminal import exit_code, quiet_transformers


def build_parser(prog: str) -> ArgumentParser:
    """Return the parser; its arguments are all fields of SpeedConfig."""
    parser = ArgumentParser(
        prog=prog,
        exit_on_error=False,
        description="Time the forward pass, and the training step, of models and of shapes of a model side by side: "
        "the seconds for 100 batches of MiniLM Table 4 and the training latency of KroneckerBERT A.1.",
    )
    parser.add_argument("--json", action="store_true", help="Print results.json instead of the table.")
    parser.add_class_arguments(SpeedConfig, None)
    return parser


def main(arguments: Sequence[str] | None = None, *, prog: str = "evaluate") -> int:
    """Run the command and return its exit code. Bad input gives exit code 2 and a one-sentence message on stderr."""
    return exit_code(lambda: evaluate(sys.argv[1:] if arguments is None else arguments, prog=prog))


def evaluate(arguments: Sequence[str], *, prog: str) -> None:
    """Time the models according to the arguments and print the result.

    Raises:
        UserError: bad arguments or input.
    """
    parsed = parse(build_parser(prog), arguments)
    config = build(parsed, SpeedConfig)
    quiet_transformers()
    # Imported here so that --help and errors in the arguments do not wait for torch.
    from llmdistill.experiments import speed

    results = speed.evaluate(config, command=f"{prog} {shlex.join(arguments)}")
    if parsed.json:
        print(json.dumps(results))
    else:
        speed.print_results(results)
        print(f"The report is {results['folder']}/report.md.")
