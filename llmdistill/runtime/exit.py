"""The exit code of every command: 0, or 2 with a one-sentence message for an error that the user can correct."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from llmdistill.errors import UserError


def exit_code(job: Callable[[], None]) -> int:
    """Run a job; a UserError is printed to stderr and gives exit code 2, other exceptions are not caught.

    torch must not be loaded before this call, because it reads the setting for waiting threads when it is loaded.
    """
    # Waiting threads that spin for a long time make a run on busy cores several times slower; threads that sleep
    # immediately make the small operations of a loss twice as slow on idle cores.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        job()
    except UserError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            # All ranks stop with the same error, and the launcher ends all ranks when the first one exits. The other
            # ranks wait, so that rank 0 can print the message.
            time.sleep(3)
        return 2
    return 0
