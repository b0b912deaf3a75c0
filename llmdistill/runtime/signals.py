"""SIGTERM and SIGINT: a training finishes its step and saves, and everything else ends at once, with one line."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmdistill.errors import Stopped

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_AGAIN_SECONDS = 0.5
"""From then on a second SIGINT is another Ctrl-C, and not the same one that a launcher passes on."""
_BLOCKED_SECONDS = 20.0
"""How long a process may go on after a signal that Python has not handled, because it waits inside a library. It has no
limit in a block of `waiting`."""


class _State:
    """What a block of `handling` knows of signals."""

    def __init__(self) -> None:
        self.number = 0
        self.since = 0.0
        self.waits = False
        self.is_over = threading.Event()
        self.is_hopeless: Callable[[], bool] = lambda: False


_state = _State()
"""That of the block that runs: signals belong to the process, so there is one at a time."""


@contextmanager
def handling() -> Iterator[None]:
    """Handle SIGTERM and SIGINT in this block: raise Stopped, or in a block of `waiting` only remember the signal.

    The end of the launcher that has started this rank counts as SIGTERM, because a launcher that is killed passes
    nothing on. A second Ctrl-C ends the process at once. Only the main thread can handle signals; elsewhere nothing
    changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    global _state
    _state = state = _State()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = {each: signal.signal(each, _handle) for each in _SIGNALS}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(reader, state), name="signals", daemon=True).start()
    _watch_launcher(state)
    try:
        yield
    finally:
        state.is_over.set()
        signal.set_wakeup_fd(wakeup)
        for each, handler in before.items():
            signal.signal(each, handler)
        writer.close()
        _state = _State()  # what comes later in this process is not asked to stop


@contextmanager
def waiting() -> Iterator[None]:
    """Only remember a signal in this block, which asks `caught` from time to time.

    Raises Stopped after the block for a signal that the block did not see.
    """
    _state.waits = True
    try:
        yield
    finally:
        _state.waits = False
    if _state.number:
        raise Stopped(_state.number)


def caught() -> int:
    """Return the number of the first signal; 0 if there was none."""
    return _state.number


def give_up() -> None:
    """From now on a signal ends the process at once and silently: what it has to say has another cause."""
    if threading.current_thread() is threading.main_thread():
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)


def leave_if(is_hopeless: Callable[[], bool]) -> None:
    """End this process at once at a signal if `is_hopeless` says, in another thread, that its work cannot go on."""
    _state.is_hopeless = is_hopeless


def _handle(number: int, _frame: object) -> None:
    if _state.number == 0:
        _state.number, _state.since = number, time.monotonic()
        if not _state.waits:
            raise Stopped(number)
        if os.environ.get("RANK", "0") == "0":
            _say(f"{signal.Signals(number).name}: the training stops after this step and saves it")
    elif number == signal.SIGINT and time.monotonic() - _state.since > _AGAIN_SECONDS:
        _say("error: stopped at once by a second SIGINT; the same command goes on from the last checkpoint")
        os._exit(Stopped(number).code)


def _say(line: str) -> None:
    # A handler may interrupt a print, and Python's streams cannot be entered twice.
    os.write(sys.stderr.fileno() if _has_number(sys.stderr) else 2, f"{line}\n".encode())


def _has_number(stream: object) -> bool:
    try:
        stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return False
    return True


def _listen(reader: socket.socket, state: _State) -> None:
    """End the process where its main thread cannot: it waits inside a library, which Python does not interrupt."""
    with reader:
        while numbers := reader.recv(1):
            if numbers[0] not in _SIGNALS:
                continue
            if state.is_hopeless():
                os._exit(Stopped(numbers[0]).code)
            # Where a signal waits anyway, a long call may be the writing of a checkpoint, which nothing must cut short.
            if not state.is_over.wait(_BLOCKED_SECONDS) and state.number == 0 and not state.waits:
                _say(f"error: {Stopped(numbers[0])}")
                os._exit(Stopped(numbers[0]).code)


def _watch_launcher(state: _State) -> None:
    """Send this rank SIGTERM when its launcher ends, in whichever way."""
    if "RANK" not in os.environ or not hasattr(os, "pidfd_open"):
        return
    watched = selectors.DefaultSelector()
    for process in _launchers():
        with suppress(OSError):
            watched.register(os.pidfd_open(process), selectors.EVENT_READ)
    if watched.get_map():
        threading.Thread(target=_wait_for_launcher, args=(watched, state), name="launcher", daemon=True).start()


def _wait_for_launcher(watched: selectors.BaseSelector, state: _State) -> None:
    watched.select()
    if not state.is_over.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def _launchers() -> Iterator[int]:
    """The parent of this rank, and what has started the parent if it is DeepSpeed's runner on the same node."""
    process = os.getppid()
    while process > 1:
        yield process
        with suppress(OSError):
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            if any(word.endswith(b"/deepspeed") or word.startswith(b"deepspeed.launcher") for word in words[:4]):
                continue
        return
