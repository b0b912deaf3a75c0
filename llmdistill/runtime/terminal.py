"""The process around a run: terminal output, exit codes, and the global state that a guest restores."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llmdistill.errors import UserError

if TYPE_CHECKING:
    from llmdistill.runtime.distributed import World


def exit_code(job: Callable[[], None]) -> int:
    """Run a job and return its exit code: 0, or 2 for a UserError, whose message goes to stderr.

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


@contextmanager
def guest() -> Iterator[None]:
    """Restore the environment, torch's random state and the log levels of the libraries after the block.

    The process group is kept, because DeepSpeed cannot create a second one in the same process.
    """
    import torch
    from transformers.utils import logging as transformers_logging

    environment, verbosity = dict(os.environ), transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    deepspeed_logger = logging.getLogger("DeepSpeed")
    level = deepspeed_logger.level
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=devices):
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
        deepspeed_logger.setLevel(level)


def quiet_transformers() -> None:
    """Hide the messages and progress bars of transformers; its errors are still printed."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def quiet_libraries() -> None:
    """Hide the messages of all libraries of a run."""
    from deepspeed.utils.logging import logger as deepspeed_logger

    quiet_transformers()
    deepspeed_logger.setLevel(logging.ERROR)
    # The user of a run cannot fix deprecation warnings inside torch and DeepSpeed.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)


def print_main(text: str, world: World) -> None:
    """Print on rank 0."""
    if world.is_main:
        print(text, flush=True)


def warn_main(text: str, world: World) -> None:
    """Print a highlighted warning on rank 0."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    if world.is_main:
        Console(stderr=True).print(Panel(Text(text), title="WARNING", border_style="bold yellow"))
