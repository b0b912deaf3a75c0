"""How every command begins and ends: with 0, or with 2 and one sentence where the user can mend it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from llmdistill.errors import UserError


def exit_code(job: Callable[[], None]) -> int:
    """Run a job; a UserError becomes one sentence on stderr and exit code 2, anything else stays an exception.

    The job must not have loaded torch yet: how its threads wait is read when it is loaded.
    """
    # Threads that spin for long while they wait make a run on busy cores several times slower, threads that sleep at
    # once make the small operations of a loss twice as slow on idle ones.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        job()
    except UserError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            # All ranks stop for the same reason, and the launcher ends the others with the first: rank 0 must speak.
            time.sleep(3)
        return 2
    return 0
