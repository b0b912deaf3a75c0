"""The exception whose message is shown to the user, and an exception that is converted to it."""


class UserError(ValueError):
    """An error in the user's input.

    The message is one sentence: what is wrong, where (key or ``file:line``), the value, and the remedy.
    Commands print it without a traceback and exit with code 2.
    """


class FieldError(ValueError):
    """A field of a settings class has an invalid value.

    The message begins with the name of the field. The settings may be used alone or as part of a run configuration, so
    the code that builds them adds the prefix that the user types before the name.
    """
