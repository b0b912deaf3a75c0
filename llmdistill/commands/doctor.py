"""``llmdistill doctor``: is this machine ready for runs, and is this run ready to be launched?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser

from llmdistill.config import RunConfig
from llmdistill.config.command_line import parse, parse_run, split_words
from llmdistill.messages import print_result
from llmdistill.methods import METHODS
from llmdistill.runtime.terminal import quiet_transformers

if TYPE_CHECKING:
    from llmdistill.runtime.environment import Finding


def doctor(arguments: Sequence[str]) -> int:
    """Check the machine and a run, print each finding, and return 1 if one is a failure, else 0.

    Raises:
        UserError: bad arguments.
    """
    parser = ArgumentParser(
        prog="llmdistill doctor",
        usage="llmdistill doctor [--recipe NAME] [--json] [--KEY VALUE ...]",
        exit_on_error=False,
        description="Check libraries, compiler, GPU, communication and disk, and a run on one batch of its data: the "
        "teacher against chance, the teacher as its own student, and each term's size and share of the gradient in a "
        "first step. All settings of a run (llmdistill train --help all) can be given; without any it checks the quick "
        "start. The exit code is 1 if a check fails.",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON list with the findings.")
    own, words = split_words(arguments, {"help", "json"})
    parsed = parse(parser, own)
    config, _ = parse_run(words, METHODS)
    quiet_transformers()
    from llmdistill.runtime.environment import print_finding

    found = []
    for finding in findings(config):
        found.append(finding)
        if not parsed.json:
            print_finding(finding)
    if parsed.json:
        print_result([asdict(finding) for finding in found])
    return int(any(finding.state == "failure" for finding in found))


def findings(config: RunConfig) -> Iterator[Finding]:
    """Check the machine, and then the run, one finding after the other."""
    # Imported here so that --help does not wait for torch and transformers.
    from llmdistill.errors import UserError
    from llmdistill.run.checks import DiskNeed
    from llmdistill.run.checkup import check_run
    from llmdistill.run.plan import make_plans
    from llmdistill.runtime.devices import choose_accelerator
    from llmdistill.runtime.environment import check_machine

    choose_accelerator()
    needed = None
    try:
        plan = make_plans(config)[-1]
        needed = DiskNeed.of(plan).total
    except UserError:
        pass  # the check of the run names it
    yield from check_machine(Path(str(config.output_dir)), needed)
    yield from check_run(config)
