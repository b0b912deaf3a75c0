"""The exception whose message is shown to the user, an exception that is converted to it, and a common check."""

from __future__ import annotations


class UserError(ValueError):
    """An error in the user's input.

    The message is one sentence: what is wrong, where (key or ``file:line``), the value, and the remedy.
    Commands print it without a traceback and exit with code 2.
    """

    everywhere = False
    """Whether every rank is known to raise the same error, so that rank 0 alone prints it."""


class RankError(RuntimeError):
    """The work stopped because another rank failed. That rank reports the cause."""


class FieldError(ValueError):
    """A field of a settings class has an invalid value.

    The message begins with the name of the field. The settings may be used alone or as part of a run configuration, so
    the code that builds them adds the prefix that the user types before the name.
    """


def check_least(
    settings: object, least: float, *keys: str, prefix: str = "", error: type[ValueError] = ValueError
) -> None:
    """Raise an error if one of these settings is below its least value; a setting may be None."""
    for key in keys:
        value = getattr(settings, key)
        if value is not None and value < least:
            raise error(f"{prefix}{key} is {value}: give {least} or more")
