"""How a command ends: 0, or 2 with one sentence where the user can mend it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from llmdistill.errors import UserError


def exit_code(job: Callable[[], None]) -> int:
    """Run a job; a UserError becomes one sentence on stderr and exit code 2, anything else stays an exception."""
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
