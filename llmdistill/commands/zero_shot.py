"""``llmdistill evaluate --suite zero_shot``: scores decoders on tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence

from jsonargparse import ArgumentParser

from llmdistill.config.command_line import build, parse
from llmdistill.config.zero_shot import ZeroShotConfig
from llmdistill.runtime.terminal import exit_code, quiet_transformers


def build_parser(prog: str) -> ArgumentParser:
    """Return the parser; its arguments are all fields of ZeroShotConfig."""
    parser = ArgumentParser(
        prog=prog,
        exit_on_error=False,
        description="Score decoders on tasks of lm-evaluation-harness without fine-tuning, such as the teacher, the "
        "untrained student and the student of a run side by side. Finished models are kept, so the same command "
        "continues an interrupted one.",
    )
    parser.add_argument("--json", action="store_true", help="Print results.json instead of the table.")
    parser.add_class_arguments(ZeroShotConfig, None)
    return parser


def main(arguments: Sequence[str] | None = None, *, prog: str = "evaluate") -> int:
    """Run the command and return its exit code. Bad input gives exit code 2 and a one-sentence message on stderr."""
    return exit_code(lambda: evaluate(sys.argv[1:] if arguments is None else arguments, prog=prog))


def evaluate(arguments: Sequence[str], *, prog: str) -> None:
    """Score the models according to the arguments and print the result.

    Raises:
        UserError: bad arguments or input.
    """
    parsed = parse(build_parser(prog), arguments)
    config = build(parsed, ZeroShotConfig)
    quiet_transformers()
    # Imported here so that --help and errors in the arguments do not wait for torch.
    from llmdistill.experiments import zero_shot

    results = zero_shot.evaluate(config, command=f"{prog} {shlex.join(arguments)}")
    if parsed.json:
        print(json.dumps(results))
    else:
        zero_shot.print_results(results)
        print(f"The report is {results['folder']}/report.md.")
