"""The process around a run: terminal output, exit codes, and the global state that a guest restores."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmdistill.errors import RankError, Stopped, UserError
from llmdistill.files import explain_refusal
from llmdistill.messages import exit_on_closed_pipe, logger, quiet_imports, say, set_level
from llmdistill.progress import Activity
from llmdistill.runtime import signals
from llmdistill.runtime.launch import launched_ranks


@dataclass
class Ending:
    """How a command ended."""

    code: int = 0


@contextmanager
def command_block() -> Iterator[Ending]:
    """Run a command in this block and set its exit code: 0, or 2 for a UserError, whose message goes to stderr.

    SIGTERM and SIGINT end it with 143 and 130, a training after the step that it is doing (see `signals`).

    On one of several ranks that have joined a process group a failure ends the process here, and the launcher then
    ends the other ranks. Leaving the group first would wait for them, and they wait for this rank.

    torch must not be loaded before this block, because it reads the setting for waiting threads when it is loaded.
    """
    # Waiting threads that spin for a long time make a run on busy cores several times slower; threads that sleep
    # immediately make the small operations of a loss twice as slow on idle cores.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    quiet_imports()
    ending, has_begun = Ending(), False
    try:
        with exit_on_closed_pipe(), signals.handling(), Activity("Working"):
            launched_ranks()  # sets the variables of a rank in a task of srun, before the command reads them
            try:
                has_begun = True
                yield ending
            except BrokenPipeError:
                raise  # of stdout, see `exit_on_closed_pipe`
            except (Stopped, Exception) as error:
                failure = error if isinstance(error, Stopped | UserError) else explain_refusal(error) or error
                has_sentence = isinstance(failure, Stopped | UserError) or _out_of_memory(failure) is not None
                if launched_ranks() == 1 and not has_sentence:
                    if not signals.first_signal():
                        raise
                    # A Ctrl-C also ends the compiler that a library has started, which then fails.
                    failure = Stopped(signals.first_signal())
                ending.code = _report_failure(failure)
    except Stopped as stopped:  # by a signal before the command began or after it had ended
        ending.code = _report_failure(stopped)
        if not has_begun:  # a context manager cannot skip its block
            raise SystemExit(ending.code) from None


def exit_code(job: Callable[[], None]) -> int:
    """Run a job in `command_block` and return its exit code."""
    with command_block() as ending:
        set_level()  # within the block, which reports a wrong level
        job()
    return ending.code


_HEARING_SECONDS = 3.0
"""How long a rank whose failure another rank explains waits before it ends. The launcher ends it in that time."""
_CONNECTION_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError")


def _report_failure(error: BaseException) -> int:
    """Say why a command fails and return its exit code, or end the process if it has joined a process group.

    Of several ranks of a node one says which failed and why: rank 0 what every rank is known to raise, and else the
    first one that has a reason.
    """
    if launched_ranks() == 1:
        remedy = _out_of_memory(error)
        if remedy is not None:
            traceback.print_exception(error)
        print(f"{signals.line_start()}error: {remedy or error}", file=sys.stderr, flush=True)
        return error.code if isinstance(error, Stopped | UserError) else 1
    signals.set_handlers(signal.SIG_IGN)  # what the launcher does about another rank must not come before the reason
    rank = int(os.environ.get("RANK", "0"))
    module = sys.modules.get("llmdistill.runtime.distributed")
    node = None if module is None else module.node()
    is_everywhere, is_own, code = getattr(error, "everywhere", False), False, 1
    lost_connection = isinstance(error, RuntimeError) and any(words in str(error) for words in _CONNECTION_LOST)
    where = f" (rank {rank})" if rank else ""
    if isinstance(error, Stopped):
        is_everywhere = is_everywhere or node is None  # no rank waits for another one before they have joined
        code = error.code
        sentence = (None if node is None or is_everywhere else node.describe_lost_ranks()) or f"{error}{where}"
    elif isinstance(error, UserError):
        code, sentence = error.code, f"{error}{where}"
    elif isinstance(error, RankError):
        sentence = f"rank {rank} stops: {error}"
    elif lost_connection:
        sentence = (
            f"rank {rank} lost its connection to a rank of another node ({str(error).splitlines()[0]}): if that one "
            "has not said why, it was killed (out of the machine's memory, for instance); the same command goes on "
            "from the last checkpoint"
        )
    else:
        is_own = True
        traceback.print_exception(error)
        sentence = f"rank {rank} failed: {_out_of_memory(error) or _name(error)}"
    if is_own or isinstance(error, UserError):
        # torchrun's report takes the reason from this file; other launchers name none. The decorator `record` of
        # torch.distributed.elastic would write a traceback, also for a UserError.
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if file is not None:
            Path(file).write_text(json.dumps({"message": sentence, "timestamp": int(time.time())}), encoding="utf-8")
    # Rank 0 mostly raises the same and says it, and the launcher ends this rank while it waits.
    if rank != 0 and isinstance(error, UserError | RankError):
        _wait_for_launcher()
    is_first = node is None or node.claim_report()
    # It may have lost a rank of this node, whose process ends a moment after its connections.
    if lost_connection and is_first and node is not None:
        sentence = node.describe_lost_ranks(_HEARING_SECONDS) or sentence
    sys.stdout.flush()
    if rank == 0 if is_everywhere else is_own or is_first:
        print(f"{signals.line_start()}error: {sentence}", file=sys.stderr)
    sys.stderr.flush()
    if lost_connection:
        _wait_for_launcher()
    ranks = sys.modules.get("torch.distributed")
    if ranks is not None and ranks.is_initialized() and ranks.get_world_size() > 1:
        os._exit(code)  # to leave the group would wait for the other ranks
    return code


def _wait_for_launcher() -> None:
    signals.set_handlers(signal.SIG_DFL)
    time.sleep(_HEARING_SECONDS)


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _out_of_memory(error: BaseException) -> str | None:
    """Return what to do about an exception that says that memory is full; None for any other exception."""
    if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":
        return None
    return (
        f"out of memory ({_name(error).splitlines()[0]}): lower train.micro_batch_size, data.max_length or "
        "scoring.batch_size, set train.activation_checkpointing, shard the models (--ds_config zero3, "
        "--teacher.sharding zero3), or use more ranks"
    )


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
    """Hide the messages and progress bars of transformers, deprecation warnings of all libraries, and DeepSpeed's
    warning that there is no GPU.

    The errors of transformers are still printed.
    """
    from transformers.utils import logging as transformers_logging

    from llmdistill.runtime.devices import choose_accelerator

    choose_accelerator()
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # our own show the reading of data
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # The user of a command cannot fix deprecation warnings inside torch, transformers and DeepSpeed.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)


def quiet_libraries() -> None:
    """Hide the messages of all libraries of a run."""
    from deepspeed.utils.logging import logger as deepspeed_logger

    quiet_transformers()
    deepspeed_logger.setLevel(logging.ERROR)


def print_main(text: str) -> None:
    """Write a message of progress or a note on rank 0."""
    if _is_main():
        say(text)


def warn_main(text: str) -> None:
    """Print a highlighted warning on rank 0."""
    if _is_main():
        logger.warning("%s", text, extra={"framed": True})


def _is_main() -> bool:
    from llmdistill.runtime.distributed import World  # loads torch, before which a command sets its threads

    return World.current().is_main
