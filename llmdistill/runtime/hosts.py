"""The hostfile of the deepspeed launcher, checked before the launcher starts."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from llmdistill.errors import UserError

_ANSWER_SECONDS = 10
"""How long a host may take to answer."""
_ENTRY = re.compile(r"(\S+)\s+slots=\d+")


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
    """Return the names in a hostfile, whose lines are `NAME slots=GPUS`, a comment (#) or empty.

    Raises UserError if the file does not exist, or a line has another form or repeats a name.
    """
    if not file.is_file():
        raise UserError(f"--hostfile {file}: there is no such file; write a line such as 'node1 slots=8' for each node")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"--hostfile {file}: not UTF-8 text: fix or replace it") from error
    hosts: list[str] = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        entry = _ENTRY.match(text)
        if entry is None:
            raise UserError(f"{file}:{number}: {text!r} is no host: write its name and its GPUs, such as node1 slots=8")
        if entry[1] in hosts:
            raise UserError(f"{file}:{number}: {entry[1]} is there twice: give each node one line with all its slots")
        hosts.append(entry[1])
    if not hosts:
        raise UserError(f"--hostfile {file}: it names no host; write a line such as 'node1 slots=8' for each node")
    return hosts


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
