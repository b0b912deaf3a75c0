"""``llmdistill doctor``: is this machine ready for runs, and is this run ready to be launched?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from jsonargparse import ArgumentParser

from llmdistill.config.command_line import parse_own, parse_run
from llmdistill.errors import UserError
from llmdistill.messages import print_result
from llmdistill.methods import METHODS
from llmdistill.runtime.terminal import quiet_transformers


def doctor(arguments: Sequence[str]) -> int:
    """Check the machine and a run, print each finding, and return 1 if one is a failure, else 0."""
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
    parsed, words = parse_own(parser, arguments)
    config, _ = parse_run(words, METHODS)
    quiet_transformers()
    # Imported here so that --help does not wait for torch and transformers.
    from llmdistill.planning.checkup import check_run
    from llmdistill.runtime.devices import choose_accelerator
    from llmdistill.runtime.environment import check_environment, print_finding
    from llmdistill.training.disk import DiskNeed
    from llmdistill.training.plan import make_plans

    choose_accelerator()
    disk_bytes, findings = None, []
    with suppress(UserError):  # check_run below reports the same error as a finding
        disk_bytes = DiskNeed.of(make_plans(config)[-1]).total
    for finding in chain(check_environment(Path(str(config.output_dir)), disk_bytes), check_run(config)):
        findings.append(finding)
        if not parsed.json:
            print_finding(finding)
    if parsed.json:
        print_result([asdict(finding) for finding in findings])
    return int(any(finding.state == "failure" for finding in findings))
