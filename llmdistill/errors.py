"""The exception that is meant for the user's eyes, and one that becomes it."""


class UserError(ValueError):
    """A mistake in what the user gave.

    The message is one sentence: what is wrong, where (key or ``file:line``), the value, and the remedy.
    Commands print it without a traceback and exit with code 2.
    """


class FieldError(ValueError):
    """A field of a settings class has a value that does not fit.

    The message begins with the field's own name. The settings may stand in a run's configuration or by themselves, so
    whoever builds them puts in front what the user types before that name.
    """
