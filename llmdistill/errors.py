"""The one exception that is meant for the user's eyes."""


class UserError(ValueError):
    """A mistake in what the user gave.

    The message is one sentence: what is wrong, where (key or ``file:line``), the value, and the remedy.
    Commands print it without a traceback and exit with code 2.
    """
