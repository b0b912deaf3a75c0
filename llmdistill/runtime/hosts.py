"""The hostfile of the deepspeed launcher, checked before the launcher starts."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from llmdistill.errors import UserError
from llmdistill.runtime.ds_check import quiet_deepspeed

_ANSWER_SECONDS = 10
"""How long a host may take to answer."""


def check_hosts(flags: Sequence[str]) -> None:
    """Check the hostfile that the launcher's flags name, if any: that it is read, and that its hosts answer to ssh.

    DeepSpeed itself goes on with this node alone if there is no such file, and asks its first host only: the ranks
    would wait for the others. Raises UserError if there is no such file, a line cannot be read, or a host does not
    answer.
    """
    words = [part for flag in flags for part in flag.split("=", 1)]
    given = dict(pairwise(words))
    if "--hostfile" not in given:
        return
    hosts = read_hosts(Path(given["--hostfile"]))
    # --include and --exclude choose among the hosts in DeepSpeed's own way.
    if "--no_ssh" in words or "--include" in given or "--exclude" in given:
        return
    chosen = hosts[: int(given["--num_nodes"])] if given.get("--num_nodes", "").isdecimal() else hosts
    with ThreadPoolExecutor(max_workers=64) as pool:
        answers = dict(zip(chosen, pool.map(_ask, chosen), strict=True))
    silent = {host: reason for host, reason in answers.items() if reason is not None}
    if silent:
        named = "; ".join(f"{host} ({reason})" for host, reason in silent.items())
        raise UserError(
            f"--hostfile {given['--hostfile']}: {len(silent)} of {len(chosen)} hosts cannot be reached by ssh without "
            f"a password: {named}: correct the names, set up ssh keys, or start every node by hand with --no_ssh "
            "--node_rank"
        )


def read_hosts(file: Path) -> list[str]:
    """Return the names in a hostfile, as DeepSpeed reads it: lines `NAME slots=GPUS`, comments (#) and empty ones.

    Raises UserError if there is no such file, which DeepSpeed would pass over, or DeepSpeed refuses it.
    """
    remedy = "write a line such as 'node1 slots=8' for each node, and each node once"
    if not file.is_file():
        raise UserError(f"--hostfile {file}: there is no such file; {remedy}")
    with quiet_deepspeed(logging.ERROR):  # it logs the whole file
        from deepspeed.launcher.runner import fetch_hostfile

        try:
            return list(fetch_hostfile(str(file)))
        except UnicodeDecodeError as error:
            raise UserError(f"--hostfile {file}: not UTF-8 text: fix or replace it") from error
        except ValueError as error:
            raise UserError(f"--hostfile {file}: {str(error).partition(', unable')[0]}; {remedy}") from error


def _ask(host: str) -> str | None:
    """Return why a host does not answer to ssh; None if it does."""
    # In batch mode ssh fails where it would ask for a password.
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_ANSWER_SECONDS}"]
    try:
        answer = subprocess.run(
            ["ssh", *options, host, "true"],
            stdin=subprocess.DEVNULL,  # else ssh takes what is typed or piped to this command
            capture_output=True,
            text=True,
            errors="replace",
            timeout=3 * _ANSWER_SECONDS,  # ConnectTimeout ends before the login, which may take longer
        )
    except FileNotFoundError:
        return "ssh is not installed here"
    except subprocess.TimeoutExpired:
        return "no answer"
    if answer.returncode == 0:
        return None
    lines = answer.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {answer.returncode}"
