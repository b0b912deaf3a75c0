"""Terminal output: only rank 0 prints, and messages of the libraries are hidden."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmdistill.runtime.distributed import World


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
