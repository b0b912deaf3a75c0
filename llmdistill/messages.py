"""What a user reads in a terminal: results on stdout, and messages of progress, notes and warnings by logging.

All messages go to the logger "llmdistill", which has one handler. The environment variable LLMDISTILL_LOG is the level
of a command: info (the default) shows all, warning leaves out progress and notes, error the warnings too.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from tqdm import tqdm

from llmdistill import progress
from llmdistill.errors import UserError

logger = logging.getLogger("llmdistill")
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _Terminal(logging.Handler):
    """Writes above the bars: warnings to stderr, and the messages of rank 0 to stdout, or to stderr if they say so."""

    def emit(self, record: logging.LogRecord) -> None:
        # A name of somebody else's must not steer the terminal.
        line = "".join(
            char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
            for char in record.getMessage()
        )
        is_warning = record.levelno >= logging.WARNING
        if not is_warning and os.environ.get("RANK", "0") != "0":
            return
        stream = sys.stderr if is_warning or getattr(record, "aside", False) else sys.stdout
        try:
            progress.postpone_line()
            with tqdm.external_write_mode(file=stream):  # takes the bars away meanwhile
                if getattr(record, "framed", False):
                    from rich.console import Console
                    from rich.panel import Panel
                    from rich.text import Text

                    Console(stderr=True).print(Panel(Text(line), title="WARNING", border_style="bold yellow"))
                else:
                    print(fold(line, stream), file=stream, flush=True)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            _discard(stream)  # Ctrl-C has ended `tee`, or the terminal is closed, and a training finishes its step


def fold(text: str, stream: Any = None, *, indent: int | None = None) -> str:
    """Break sentences between words at the width of the terminal, if `stream` is one (by default stdout).

    A line after a label, such as "Student     ...", goes on below its first word. Commands, tables and what is indented
    stay as they are, so that they can be copied; with `indent`, every line is folded and goes on after so many spaces.
    """
    if not (sys.stdout if stream is None else stream).isatty():
        return text
    width, lines = shutil.get_terminal_size().columns, list[str]()
    for line in text.split("\n"):
        label = re.match(r"\S+( \S+)* {2,}(?=\S)", line)
        start = indent if indent is not None else label.end() if label else 0
        is_plain = indent is not None or (
            not line.startswith((" ", "llmdistill ", "{", "[")) and "  " not in line[start:]
        )
        if len(line) <= width or not is_plain or start > width // 2:
            lines.append(line)
            continue
        below = " " * start
        lines += textwrap.wrap(line, width, subsequent_indent=below, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def _discard(stream: Any) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


logger.addHandler(_Terminal())
logger.setLevel(logging.INFO)
logger.propagate = False  # what a guest's own handlers write would stand in the terminal twice


def set_level() -> None:
    """Take the level from LLMDISTILL_LOG.

    Raises:
        UserError: there is no such level.
    """
    level = os.environ.get("LLMDISTILL_LOG", "info")
    if level.lower() not in _LEVELS:
        raise UserError(f"LLMDISTILL_LOG={level}: there is no such level; give one of {', '.join(_LEVELS)}")
    logger.setLevel(_LEVELS[level.lower()])


def quiet_imports() -> None:
    """Hide what torchao says while transformers imports it: several lines on a GPU that is not there."""
    for name in ("torchao", "torch.utils._pytree"):
        if logging.getLogger(name).level == logging.NOTSET:  # else somebody wants to see them
            logging.getLogger(name).setLevel(logging.ERROR)


def say(line: str, *, aside: bool = False) -> None:
    """Write a message of progress or a note on rank 0; `aside`: to stderr, because stdout is for the result alone."""
    logger.info("%s", line, extra={"aside": aside})


@lru_cache
def warn_once(text: str) -> None:
    """Write a highlighted warning on rank 0, the first time in this process."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning("%s", text, extra={"framed": True})


_UNREAD = 128 + 13
"""The exit code of a program that SIGPIPE ends, as the other programs of a pipe have it."""


def print_result(result: object) -> None:
    """Print a result on stdout: a text as it is, plain values as one line of JSON."""
    with exit_on_closed_pipe():
        print(result if isinstance(result, str) else json.dumps(result), flush=True)


@contextmanager
def exit_on_closed_pipe() -> Iterator[None]:
    """End the command quietly if nobody reads what the block writes to stdout any more, as after `| head -1`."""
    try:
        try:
            yield
        finally:
            # A closed pipe shows when something is written to it, at the latest here.
            sys.stdout.flush()
    except BrokenPipeError:
        _discard(sys.stdout)
        raise SystemExit(_UNREAD) from None
