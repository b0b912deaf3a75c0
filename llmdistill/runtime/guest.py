"""A run in the process of a caller: global state that the run changes is restored at its end."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def guest() -> Iterator[None]:
    """Restore the environment, torch's random state and the log levels of the libraries after the block.

    The process group is kept, because DeepSpeed cannot create a second one in the same process.
    """
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
