"""What is printed on the terminal: by rank 0 alone, and without the libraries' notices."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmdistill.runtime.distributed import World


def quiet_transformers() -> None:
    """Keep transformers' notices and bars off the terminal; its errors still show."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def quiet_libraries() -> None:
    """Keep the notices of all the libraries of a run off the terminal."""
    from deepspeed.utils.logging import logger as deepspeed_logger

    quiet_transformers()
    deepspeed_logger.setLevel(logging.ERROR)
    # Deprecations inside torch and DeepSpeed concern their authors, not the user of a run.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)


def print_main(text: str, world: World) -> None:
    """Print on rank 0."""
    if world.is_main:
        print(text, flush=True)


def warn_main(text: str, world: World) -> None:
    """Print a warning on rank 0 so that nobody overlooks it."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    if world.is_main:
        Console(stderr=True).print(Panel(Text(text), title="WARNING", border_style="bold yellow"))
