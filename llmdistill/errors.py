"""Exceptions whose message is for the user, one that is converted to such, and a check of names."""

from __future__ import annotations

import signal

_LONGEST = 3000
"""Characters of a message; its end, which has the remedy, is never cut."""


class UserError(ValueError):
    """An error in the user's input.

    The message is one sentence: what is wrong, where (key or ``file:line``), the value, and the remedy.
    Commands print it without a traceback and exit with code 2.
    """

    def __init__(self, message: str) -> None:
        """Escape what would break the sentence, such as a newline in a name, and cut what would make it very long."""
        line = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in message)
        super().__init__(line if len(line) <= _LONGEST else f"{line[: _LONGEST - 500]} ... {line[-500:]}")

    everywhere = False
    """Whether every rank is known to raise the same error, so that rank 0 alone prints it."""
    code = 2
    """The exit code."""


class ServerLost(UserError):
    """A server that a training run needs does not answer any more. Once it does, the same command goes on."""

    code = 75  # EX_TEMPFAIL of sysexits.h: try again later


class CannotWrite(UserError):
    """A model is not able to write data for its own compression or training."""


class Stopped(KeyboardInterrupt):
    """A signal has stopped the command. Only code that must leave something in order catches it, and raises it again.

    Its message says whether the same command goes on from what is finished, or begins anew.
    """

    def __init__(self, signal_number: int, where: str = "", *, keeps: bool = True) -> None:
        """`where` says how far the work had come; without `keeps` the command keeps nothing before its end."""
        name = signal.Signals(signal_number).name
        if where:
            sentence = f"stopped by {name} {where}, which is saved; the same command goes on from there"
        elif keeps:
            sentence = f"stopped by {name}; the same command goes on from what is finished"
        else:
            sentence = f"stopped by {name} before the end; the same command begins anew"
        super().__init__(sentence)
        self.code = 128 + signal_number
        """The exit code, as a shell counts: 143 for SIGTERM, 130 for SIGINT."""
        self.everywhere = bool(where)
        """Whether every rank is known to raise it too, because they have agreed on where they stop."""


class RankError(RuntimeError):
    """The work stopped because another rank failed. That rank reports the cause."""


class FieldError(ValueError):
    """A field of a settings class has an invalid value.

    The message begins with the name of the field. The settings may be used alone or as part of a run configuration, so
    the code that builds them adds the prefix that the user types before the name.
    """


def install_command(extra: str | None = None) -> str:
    """Return how llmdistill is installed, with the packages of an extra: no index has it, so from a checkout."""
    place = "." if extra is None else f'".[{extra}]"'
    return f"pip install -e {place} in a checkout of llmdistill"


_LONGEST_NAME = 200
"""Bytes of a name that becomes that of a file: most file systems have 255, and endings are added."""


def check_name(name: object, key: str) -> None:
    """Raise a UserError if a name that becomes a file's own would lie in another folder, or is no file's name."""
    text = str(name)
    if not text or text.startswith(".") or {"/", "\\"} & set(text) or not text.isprintable():
        raise UserError(
            f"{key} has the name {text!r}: it becomes a file's, so give one without /, \\ and line ends that does not "
            "begin with a dot"
        )
    if len(text.encode()) > _LONGEST_NAME:
        raise UserError(
            f"{key} has the name {text[:40]!r}... of {len(text.encode())} bytes: give {_LONGEST_NAME} at most"
        )
