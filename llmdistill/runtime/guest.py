"""A run in somebody else's process: what it changes there for all is put back when it ends."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def guest() -> Iterator[None]:
    """Put back the environment, torch's random numbers and what the libraries print as they were.

    The process group stays: DeepSpeed could not make another one in the same process.
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
